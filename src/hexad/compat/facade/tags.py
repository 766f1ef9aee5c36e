"""Checkpoints of an engine in directories by tag, ``DIR/TAG`` and ``DIR/latest`` with the newest tag, with
the state that a script adds."""

from __future__ import annotations

import argparse
import base64
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.directory import CheckpointDirectory, make_visible
from hexad.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from hexad.checkpoint.reader import load as load_chunks
from hexad.checkpoint.tensor_file import Chunk
from hexad.comm import first_difference, from_first, merged
from hexad.config import AgreedError, Config, HexadError, one_line
from hexad.dataset.files import sync_directory, write_durably
from hexad.optim.torch_optimizer import TorchOptimizer
from hexad.topology.mesh import Axis, Mesh

if TYPE_CHECKING:
    from hexad.engine.engine import Engine

log = logging.getLogger("hexad")


class TagDirectory(CheckpointDirectory):
    """A directory with one checkpoint per tag; none is removed. With ``name_latest`` the tag is written to
    ``latest``."""

    def __init__(self, directory: str | Path, tag: str, name_latest: bool = True) -> None:
        self.path = Path(directory)
        self._tag, self._latest = tag, name_latest
        if not tag or tag in (".", "..", "latest") or Path(tag).name != tag:
            raise HexadError(f"tag: found {tag!r}, expected the name of a directory")

    def begin(self, step: int) -> Path:
        """An empty directory for the checkpoint."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f".{self._tag}.partial"
        self._remove(partial)
        partial.mkdir()
        return partial

    def commit(self, partial: Path, step: int) -> Path:
        """Make a fully written checkpoint visible; one of the same tag is replaced."""
        final, replaced = self.path / self._tag, self.path / f".{self._tag}.replaced"
        self._remove(replaced)
        if final.exists():
            os.rename(final, replaced)
        make_visible(partial, final)
        self._remove(replaced)
        return final

    def tidy(self, keep: int, best: Sequence[int] = ()) -> None:
        """Name the checkpoint as the latest."""
        if self._latest:
            temporary = self.path / ".latest.partial"
            write_durably(temporary, self._tag)
            os.replace(temporary, self.path / "latest")
            sync_directory(self.path)

    @staticmethod
    def _remove(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def save(
    chunks: Sequence[Chunk],
    config: Config,
    mesh: Mesh,
    where: TagDirectory,
    progress: Mapping[str, Any],
) -> None:
    """Write chunks and progress, all ranks together, in a checkpoint of its own.

    Raises:
        AgreedError: it cannot be written.
    """
    checkpointer = Checkpointer(config, mesh, where)
    checkpointer.save(chunks, dict(progress), "save_checkpoint", last=True)
    checkpointer.close()


def load(engine: Engine, path: Path, optimizer: bool, strict: bool, hint: str) -> dict[str, Any]:
    """Load weights and, if wanted, optimizer state from one checkpoint, all ranks together; returns its
    progress.

    Args:
        hint: how a script loads without ``strict``, for the message.
        strict: refuse a checkpoint that lacks tensors of the module, or has others. Otherwise these are
            unchanged or ignored, and a warning names them.

    Raises:
        AgreedError: it is damaged, or of another module.
    """
    axis = engine.mesh.world
    manifest = from_first(lambda: read_manifest(path), axis)
    # A checkpoint from before the first update has no tensors of the optimizer, but its settings.
    resumes = optimizer and (not manifest.weights_only or "optimizer" in manifest.progress)
    if resumes and isinstance(engine.optimizer.rule, TorchOptimizer):
        engine.optimizer.rule.check(manifest.progress.get("optimizer", {}))
    local_names = {chunk.name for chunk in engine.chunks() if chunk.name.startswith("model.")}
    lacking = lacking_names(local_names, axis, path, manifest, strict, hint)
    load_chunks(path, _chunks(engine, manifest, resumes, lacking), axis)
    if resumes:
        engine.restored(manifest.progress)
    else:
        engine.publish()
    return manifest.progress


def find(
    directory: str | os.PathLike[str], tag: str | None, explain: Callable[[Path], str | None]
) -> Path | None:
    """The checkpoint of a tag, by default the latest; None without a file ``latest``. ``explain`` says what a
    directory without a manifest holds instead, and what to do with it, if it knows.

    Raises:
        HexadError: it is a file, or there is none of that tag.
    """
    folder = Path(directory)
    if folder.is_file():
        raise HexadError(f"load_checkpoint: found load_dir {folder}, a file; expected a directory")
    if tag is None:
        latest = folder / "latest"
        if not latest.is_file():
            log.warning("load_checkpoint: found no %s; nothing is loaded", latest)
            return None
        tag = latest.read_text(encoding="utf-8").strip()
    path = folder / str(tag)
    if (path / MANIFEST_FILE).is_file():
        return path
    raise HexadError(f"{path}: {explain(path) or 'no such checkpoint'}")


def common(tag: str, axis: Axis, validation: str) -> str:
    """The first rank's tag; all ranks together. Where another rank's differs, ``validation`` says whether to
    ``Ignore`` that, to ``Warn`` or to ``Fail``."""
    first = from_first(lambda: tag, axis)
    difference = first_difference(tag, axis) if validation != "Ignore" else None
    if difference is not None:
        one, rank, other = difference
        text = f"tag: found {other!r} on rank {rank} where rank 0 has {one!r}"
        if validation == "Fail":
            raise AgreedError(f"{text}; all ranks need the same")
        if not axis.rank:
            log.warning("%s; that of rank 0 is used", text)
    return first


def lacking_names(
    local_names: set[str], axis: Axis, path: Path, manifest: Manifest, strict: bool, hint: str
) -> set[str]:
    """Names of the module's tensors that a checkpoint does not have, the same on all ranks; ``local_names``
    are those of this rank, with ``model.`` before each.

    Raises:
        AgreedError: there are some, or the checkpoint has others, and ``strict`` refuses that.
    """
    all_names = merged(local_names, axis, set.union)
    stored = {name for name in manifest.tensors if name.startswith("model.")}
    problems = [
        f"{what}: {_shown(names)}"
        for what, names in (("missing", all_names - stored), ("unexpected", stored - all_names))
        if names
    ]
    text = f"{path}: found a checkpoint of another module ({'; '.join(problems)})"
    if problems and strict:
        raise AgreedError(f"{text}; load it into the same module, or with {hint}")
    if problems and not axis.rank:
        log.warning("%s; what is missing stays as it is, what is unexpected is ignored", text)
    return {name.removeprefix("model.") for name in all_names - stored}


def _shown(names: set[str], most: int = 8) -> str:
    first = [name.removeprefix("model.") for name in sorted(names)[:most]]
    return ", ".join(first) + (f" and {len(names) - most} more" if len(names) > most else "")


def _chunks(engine: Engine, manifest: Manifest, optimizer: bool, lacking: set[str]) -> list[Chunk]:
    """The chunks to load. A ``torch.optim`` optimizer creates its state in its first step; here before."""
    if optimizer and isinstance(engine.optimizer.rule, TorchOptimizer):
        names = (name for name in manifest.tensors if name.startswith("optimizer."))
        engine.optimizer.rule.make_state(sorted({".".join(name.split(".")[:2]) for name in names}))

    def wanted(name: str) -> bool:
        weight = name.startswith("model.")
        return (optimizer or weight) and name.split(".", 1 if weight else 2)[-1] not in lacking

    return [chunk for chunk in engine.chunks() if wanted(chunk.name)]


def encoded(state: Any, what: str) -> dict[str, Any]:
    """A state as JSON, or where that is impossible in torch's format, restricted to types that run no code.

    Raises:
        HexadError: it holds objects other than numbers, texts, tensors and containers of these.
    """
    with suppress(TypeError, ValueError):
        if json.loads(json.dumps(state)) == state:
            return {"json": state}
    file = io.BytesIO()
    try:
        torch.save(state, file)
        kept = {"torch": base64.b64encode(file.getvalue()).decode()}
        decoded(kept)
    except Exception:  # any: objects refuse to be pickled in any way
        name, value = next(_unsafe(state, what), (what, state))
        raise HexadError(
            f"{name}: found a {type(value).__name__}, which a checkpoint cannot store safely; keep numbers, "
            "texts, tensors and containers of these"
        ) from None
    return kept


def _unsafe(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of what is neither a number, a text, a tensor nor a container of these."""
    if isinstance(state, argparse.Namespace):
        state = vars(state)
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _unsafe(value, f"{name}.{key}")
    elif isinstance(state, list | tuple | set):
        for number, value in enumerate(state):
            yield from _unsafe(value, f"{name}[{number}]")
    elif not isinstance(state, bool | int | float | complex | str | bytes | Tensor | None):
        yield name, state


def decoded(state: Mapping[str, Any]) -> Any:
    """The inverse of :func:`encoded`."""
    if "json" in state:
        return state["json"]
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(io.BytesIO(base64.b64decode(state["torch"])), weights_only=True)


def save_model(state: Mapping[str, Tensor], directory: str, name: str, mesh: Mesh) -> bool:
    """Write a ``state_dict`` to one file, on the first rank.

    Raises:
        AgreedError: it cannot be written.
    """

    if Path(name).name != name:
        raise HexadError(f"save_filename: found {name!r}, expected a name without a directory")

    def write() -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}.partial"
        if name.endswith(".safetensors"):
            from safetensors.torch import save_file

            shared: dict[int, str] = {}
            alone = {}
            for key, value in state.items():  # the format stores no tensor twice
                if value.data_ptr() not in shared or not value.numel():
                    shared[value.data_ptr()] = key
                    alone[key] = value.contiguous()
            save_file(alone, temporary, metadata={"format": "pt"})
        else:
            torch.save(dict(state), temporary)
        os.replace(temporary, folder / name)

    try:
        from_first(write, mesh.world)
    except OSError as error:
        raise AgreedError(f"{directory}: {name} cannot be written: {one_line(error)}") from error
    return True
