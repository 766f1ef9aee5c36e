"""Checkpoints of Lightning's trainer in Hexad's format: a directory with the weights and the optimizer's
state of any layout, and beside them what Lightning keeps of loops, callbacks, schedules and hyperparameters.

Files of other strategies are read as they are, and written by :func:`export_checkpoint`.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hexad.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from hexad.checkpoint.reader import Checkpoint
from hexad.checkpoint.reader import load as load_chunks
from hexad.checkpoint.tensor_file import Chunk
from hexad.comm import from_first
from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.model.configuration import load_config
from hexad.optim.torch_optimizer import TorchOptimizer
from hexad.parallel.rectangle import Rectangle
from hexad.topology.mesh import Axis, Mesh

from ..facade import tags
from .module import EngineModule
from .training import ModuleTraining, group_states

_LENIENT = "LightningModule.strict_loading = False"
_KEY = "lightning"
"""Key of Lightning's part of a checkpoint's progress."""
NO_NAMES: dict[str, Any] = {"numbers": [], "complex": [], "aliases": {}}
"""What :func:`_names` says of tensors that are all stored under their only name, in their shape."""


class Saved(NamedTuple):
    """A checkpoint that was found.

    Attributes:
        path: its directory.
        manifest: what it holds.
    """

    path: Path
    manifest: Manifest


def find(path: Path, axis: Axis) -> Saved | None:
    """The checkpoint in a directory, all ranks together; None of a file.

    Raises:
        AgreedError: the directory holds none, or a damaged one.
    """

    def read() -> Saved | None:
        if not path.is_dir():
            return None
        if not (path / MANIFEST_FILE).is_file():
            raise HexadError(f"{path}: {_foreign(path)}")
        return Saved(path, read_manifest(path))

    return from_first(read, axis)


def _foreign(path: Path) -> str:
    """What a directory without a manifest is, and what to do with it."""
    if (path / ".metadata").is_file():
        return (
            "a sharded checkpoint of Lightning's FSDP or model-parallel strategy; make one file of it: "
            "python -m lightning.pytorch.utilities.consolidate_checkpoint DIRECTORY"
        )
    if (path / "checkpoint").is_dir() or (path / "latest").is_file():
        return (
            "a checkpoint of Lightning's DeepSpeed strategy; make one file of it: "
            "lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict"
        )
    return "no checkpoint"


# Saving


def save(
    path: Path,
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    training: ModuleTraining | Engine | None,
    mesh: Mesh,
    omitted: set[str],
) -> None:
    """Write a checkpoint, all ranks together; one of the same path is replaced when the new one is complete.

    Args:
        checkpoint: of ``Trainer.save_checkpoint``, without weights; with ``optimizer_states`` if the
            optimizer's state is to be saved too.
        training: of the last fit; where there was none, an engine around a divided module, or None.
        omitted: names in ``state_dict`` that are not saved.

    Raises:
        AgreedError: it cannot be written.
    """
    lightning = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
    progress: dict[str, Any] = {"step": int(checkpoint.get("global_step", 0)), "samples": 0}
    fit = training if isinstance(training, ModuleTraining) else None
    if training is None:
        chunks, config = module_chunks(module, mesh), load_config({"checkpoint": {"asynchronous": False}})
    elif fit is None:
        assert isinstance(training, Engine)
        chunks, config = training.chunks(), training.config
    else:
        fit.take_written()
        chunks, config = fit.engine.chunks(), fit.engine.config
        progress |= fit.engine.progress()
        if fit.released and mesh.tensor.size == 1:
            _take_changes(chunks, module)
    optimizer = "optimizer_states" in checkpoint  # of which there is none before a fit
    if not optimizer:
        progress.pop("optimizer", None)
    wanted = [
        chunk
        for chunk in chunks
        if (optimizer or chunk.name.startswith("model.")) and chunk.name.removeprefix("model.") not in omitted
    ]
    kept = {
        "content": base64.b64encode(_pickled(lightning)).decode(),
        "optimizer": optimizer,
        "groups": [] if fit is None else fit.groups,
        "names": _names(module),
    }
    where = tags.TagDirectory(path.parent, path.name, name_latest=False)
    tags.save(wanted, config, mesh, where, {**progress, _KEY: kept})


def save_model(path: Path, checkpoint: Mapping[str, Any], module: EngineModule) -> None:
    """Write a checkpoint of a module with an engine of its own, all ranks together, as :func:`save`; of a
    configured model ``hexad`` commands read it too.

    Raises:
        AgreedError: it cannot be written.
    """
    engine = module.engine
    assert engine is not None
    lightning = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
    progress, chunks = module.progress(), engine.chunks()
    optimizer = "optimizer_states" in checkpoint and engine.training
    if not optimizer:
        progress.pop("optimizer", None)
        chunks = [chunk for chunk in chunks if chunk.name.startswith("model.")]
    kept = {
        "content": base64.b64encode(_pickled(lightning)).decode(),
        "optimizer": optimizer,
        "groups": [],
        "names": NO_NAMES,
    }
    where = tags.TagDirectory(path.parent, path.name, name_latest=False)
    tags.save(chunks, engine.config, engine.mesh, where, {**progress, _KEY: kept})


@torch.no_grad()
def _take_changes(chunks: list[Chunk], module: nn.Module) -> None:
    """Take the weights that a script has changed after a fit; others keep their master values, which may have
    more digits."""
    parameters = dict(module.named_parameters())
    for chunk in chunks:
        parameter = parameters.get(chunk.name.removeprefix("model."))
        if parameter is not None and chunk.name.startswith("model."):
            now = _part(parameter.detach(), chunk)
            same = now == chunk.tensor.to(now.dtype)
            chunk.tensor.copy_(torch.where(same, chunk.tensor, now.to(chunk.tensor.dtype)))


def _part(values: Tensor, chunk: Chunk) -> Tensor:
    """The part of a complete tensor that a chunk holds."""
    begin, sizes = chunk.rectangle.offset, chunk.rectangle.sizes
    return values.reshape(chunk.rectangle.shape)[tuple(slice(b, b + size) for b, size in zip(begin, sizes))]


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpickled(content: str, weights_only: bool | None) -> dict[str, Any]:
    file = io.BytesIO(base64.b64decode(content))
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    return loaded


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a module's state, under every name that one has."""
    for path, part in module.named_modules():
        kept = (
            (name, buffer)
            for name, buffer in part.named_buffers(recurse=False)
            if name not in part._non_persistent_buffers_set
        )
        for name, tensor in (*part.named_parameters(recurse=False), *kept):
            yield f"{path}.{name}".removeprefix("."), tensor


def _names(module: nn.Module) -> dict[str, Any]:
    """What a checkpoint's tensors do not tell of a ``state_dict``: numbers and complex tensors, which are
    stored in another shape, and further names of the same tensor."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in _named(module):
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    everything = list(_named(module))
    return {
        "numbers": [name for name, tensor in everything if not tensor.dim()],
        "complex": [name for name, tensor in everything if tensor.is_complex()],
        "aliases": aliases,
    }


def module_chunks(module: nn.Module, mesh: Mesh) -> list[Chunk]:
    """The state of a module that no engine trains, complete on every rank."""
    chunks, seen, holder = [], set[int](), (mesh.world.rank, mesh.world.size)
    for name, tensor in _named(module):
        if id(tensor) in seen or not tensor.numel():
            continue
        seen.add(id(tensor))
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        values = values if values.dim() else values.unsqueeze(0)
        chunks.append(
            Chunk(Rectangle.whole(f"model.{name}", tuple(values.shape)), values, holder, rounded=True)
        )
    return chunks


# Loading


def lightning_part(saved: Saved, weights_only: bool | None) -> dict[str, Any]:
    """What ``Trainer`` restores from a checkpoint; weights, which are loaded later, as ``meta`` tensors.

    Args:
        weights_only: as of ``torch.load``, of hyperparameters and states of callbacks.
    """
    kept = saved.manifest.progress.get(_KEY)
    if kept is None:  # of hexad train or another interface
        checkpoint = {"global_step": saved.manifest.step, "epoch": 0, "pytorch-lightning_version": "2.6.6"}
    else:
        checkpoint = _unpickled(kept["content"], weights_only)
        if kept["optimizer"]:
            checkpoint["optimizer_states"] = []
    checkpoint["state_dict"] = {
        name.removeprefix("model."): torch.empty(
            tuple(tensor.shape), dtype=getattr(torch, tensor.dtype), device="meta"
        )
        for name, tensor in saved.manifest.tensors.items()
        if name.startswith("model.")
    }
    return checkpoint


def fill_module(
    saved: Saved, module: nn.Module, mesh: Mesh, strict: bool, engine: Engine | None = None
) -> None:
    """Load weights into a module that no engine trains, all ranks together; ``engine`` is one around a
    divided module.

    Raises:
        AgreedError: it is damaged, or of another module.
    """
    if engine is not None:
        tags.load(engine, saved.path, False, strict, _LENIENT)
        return
    chunks = module_chunks(module, mesh)
    names = {chunk.name for chunk in chunks}
    lacking = tags.lacking_names(names, mesh.world, saved.path, saved.manifest, strict, _LENIENT)
    wanted = [chunk for chunk in chunks if chunk.name.removeprefix("model.") not in lacking]
    load_chunks(saved.path, wanted, mesh.world)


def fill_training(saved: Saved, training: ModuleTraining, strict: bool) -> None:
    """Load weights, and the optimizer's state if it was saved, into an engine, all ranks together.

    Raises:
        AgreedError: it is damaged, or of another module.
    """
    tags.load(training.engine, saved.path, True, strict, _LENIENT)


@torch.no_grad()
def fill_optimizer(state: Mapping[str, Any], training: ModuleTraining, step: int) -> None:
    """Load the state of a ``torch.optim`` optimizer from a file of another strategy.

    Raises:
        HexadError: it is of an optimizer with other groups.
    """
    rule = training.engine.optimizer.rule
    assert isinstance(rule, TorchOptimizer)
    states = group_states(state, training.groups)
    shapes = {name: parameter.shape for name, parameter in training.module.named_parameters()}
    kinds, counts = dict[str, None](), dict[str, Any]()
    for name, values in states.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == shapes[name] and (value.dim() or key != "step"):
                kinds[f"optimizer.{key}"] = None
            else:
                number = isinstance(value, Tensor)
                counts[key] = {"tensor": value.item()} if number else value
    rule.make_state(kinds)
    for chunk in training.engine.chunks():
        part, _, rest = chunk.name.partition(".")
        key, _, name = rest.partition(".")
        if part == "optimizer" and key in states.get(name, {}):
            chunk.tensor.copy_(_part(states[name][key], chunk))
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "fused", "foreach")}
        for group in state["param_groups"]
    ]
    training.engine.restore_counts({"step": step, "samples": 0})
    training.engine.updates = step
    rule.restored(step, {"groups": groups, "counts": counts})


# Files of other strategies


def read_checkpoint(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint directory as what other strategies keep in one file, on this rank alone: ``state_dict``,
    ``optimizer_states``, ``hyper_parameters``, loops, callbacks.

    Args:
        path: of the directory.
        weights_only: as of ``torch.load``, of hyperparameters and states of callbacks.

    Raises:
        HexadError: it is no checkpoint of :class:`HexadStrategy`, or damaged.
    """
    folder = Path(path)
    if not (folder / MANIFEST_FILE).is_file():
        raise HexadError(f"{folder}: {_foreign(folder)}")
    with Checkpoint(folder) as checkpoint:
        manifest = checkpoint.manifest
        kept = manifest.progress.get(_KEY, {"names": NO_NAMES, "groups": []})
        names = kept["names"]

        def read(kind: str, name: str) -> Tensor:
            values = checkpoint.read(f"{kind}.{name}")
            if name in names["complex"]:
                values = torch.view_as_complex(values)
            return values.reshape(()) if name in names["numbers"] else values

        result = lightning_part(Saved(folder, manifest), weights_only)
        state = {name: read("model", name) for name in result["state_dict"]}
        result["state_dict"] = state | {name: state[first] for name, first in names["aliases"].items()}
        if "optimizer_states" in result:
            groups = kept["groups"]
            result["optimizer_states"] = [_optimizer_state(manifest, groups, read)] if groups else []
    return result


def _optimizer_state(manifest: Manifest, groups: list[list[str]], read: Any) -> dict[str, Any]:
    """The state of the optimizer as ``torch.optim`` numbers it."""
    numbers = manifest.progress.get("optimizer", {"groups": [{} for _ in groups], "counts": {}})
    keys = sorted({name.split(".")[1] for name in manifest.tensors if name.startswith("optimizer.")})
    every = [name for names in groups for name in names]
    state = {
        number: _counts(numbers["counts"]) | {key: read(f"optimizer.{key}", name) for key in keys}
        for number, name in enumerate(every)
        if keys or numbers["counts"]
    }
    places = {name: number for number, name in enumerate(every)}
    saved = zip(numbers["groups"], groups)
    return {
        "state": state,
        "param_groups": [
            {**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}, "params": ids}
            for settings, names in saved
            if (ids := [places[name] for name in names]) is not None
        ],
    }


def _counts(counts: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer counts for one parameter, in tensors of its own: a step advances each of them."""
    return {
        key: torch.full(value.get("shape", []), value["tensor"], dtype=torch.float32)
        if isinstance(value, Mapping)
        else value
        for key, value in counts.items()
    }


def export_checkpoint(
    path: str | os.PathLike[str], to: str | os.PathLike[str], weights_only: bool | None = None
) -> None:
    """Write a checkpoint directory as one file that Lightning's other strategies load, and
    ``LightningModule.load_from_checkpoint``.

    Args:
        path: of the directory.
        to: the file; one that exists is replaced.
        weights_only: as of ``torch.load``, of hyperparameters and states of callbacks.

    Raises:
        HexadError: it is no checkpoint, damaged, or ``to`` cannot be written.
    """
    content, target = read_checkpoint(path, weights_only), Path(to)
    partial = target.with_name(f".{target.name}.partial")
    try:
        torch.save(content, partial)
        os.replace(partial, target)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            partial.unlink()
        raise HexadError(f"{to}: cannot be written: {error}") from error


def checkpoint_file(path: str | os.PathLike[str], weights_only: bool | None = None) -> io.BytesIO:
    """A checkpoint directory as an open file in memory:
    ``MyModule.load_from_checkpoint(checkpoint_file(path))``.

    Args:
        path: of the directory.
        weights_only: as of ``torch.load``, of hyperparameters and states of callbacks.
    """
    return io.BytesIO(_pickled(read_checkpoint(path, weights_only)))


def local_path(path: Any) -> Path:
    """A path of the local file system.

    Raises:
        HexadError: it is another one's.
    """
    if "://" in str(path) and not str(path).startswith("file://"):
        raise HexadError(
            f"checkpoint: found {path}, expected a directory of a file system that all ranks see; save "
            "there, and copy it"
        )
    return Path(str(path).removeprefix("file://"))
