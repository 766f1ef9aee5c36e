"""Checkpoint directories of a run: names, atomic creation, retention. No torch.

``checkpoints/step-00000100/`` is created by one rename after everything in it is on disk, so that every
directory with such a name and a manifest is complete. One without a manifest is no checkpoint, unless
``checkpoints/latest``, which names the newest, says so: it has then lost the manifest, and is damaged.
``checkpoints/best`` names the one with the lowest validation loss, if those are kept.
"""

import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hexad.config import Config, HexadError, blaming, dump_config, one_line
from hexad.config.model import ModelSettings, MoeSettings
from hexad.config.schema import CheckpointSettings
from hexad.dataset.files import reporting, sync_directory, write_durably
from hexad.model.pretrained import FREE, TRAINED
from hexad.version import __version__

from .index import FileRecord, Index
from .manifest import MANIFEST_FILE, STEP_NAME, Manifest, check_size, manifest_checksum, read_manifest

log = logging.getLogger("hexad")


class CheckpointDirectory:
    """The ``checkpoints`` folder of a run directory."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "checkpoints"

    def complete(self) -> list[tuple[int, Path]]:
        """(step, path) of every complete checkpoint, oldest first."""
        if not os.path.isdir(self.path):  # False for a name that is too long, too
            return []
        # One that is being replaced sorts before its successor.
        named = [(int(m[1]), not m[2], p) for p in self.path.iterdir() if (m := STEP_NAME.fullmatch(p.name))]
        return [(step, path) for step, _, path in sorted(named) if not self._is_stray(path)]

    def strays(self) -> list[Path]:
        """Files and directories that are named like checkpoints but are none."""
        paths = self.path.iterdir() if os.path.isdir(self.path) else ()
        return sorted(path for path in paths if STEP_NAME.fullmatch(path.name) and self._is_stray(path))

    def _is_stray(self, path: Path) -> bool:
        try:
            (path / MANIFEST_FILE).stat()
        except (FileNotFoundError, NotADirectoryError):
            return path.name != self._named("latest")
        except OSError:
            pass  # whoever reads it reports that
        return False

    def _named(self, file: str) -> str:
        """The checkpoint that ``latest`` or ``best`` names; empty where there is no such file."""
        try:
            return (self.path / file).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        checkpoints = self.complete()
        return checkpoints[-1][1] if checkpoints else None

    def condition(self) -> str:
        """A report of the earlier checkpoints left after one could not be written, according to manifests and
        sizes."""
        try:
            paths = [path for _, path in self.complete()]
        except OSError as error:
            return f"earlier checkpoints cannot be read: {one_line(error)}"
        damaged = [path.name for path in paths if not _looks_whole(path)]
        if damaged:
            return f"of earlier checkpoints, {', '.join(damaged)} cannot be read or lack data"
        return "earlier checkpoints are intact" if paths else "there is no earlier checkpoint"

    def start(self, settings: CheckpointSettings) -> Path | None:
        """The checkpoint that a run starts from according to ``checkpoint.resume`` and ``checkpoint.load``.

        Raises:
            HexadError: ``must`` without a checkpoint, ``never`` with one, or there is none to load.
        """
        newest = self.newest()
        for stray in self.strays():
            log.warning("%s: no checkpoint, as it has no %s; ignored", stray, MANIFEST_FILE)
        if settings.resume == "never" and newest is not None:
            raise HexadError(
                f"checkpoint.resume: found never, but {self.path} holds {newest.name}; "
                "choose another run.dir, remove it, or set checkpoint.resume=auto"
            )
        if newest is not None:
            return newest
        if settings.resume == "must" and settings.load is None:
            raise HexadError(f"checkpoint.resume: found must, but {self.path} holds no complete checkpoint")
        if settings.load is None:
            return None
        with blaming("checkpoint.load"):
            return find_checkpoint(settings.load)

    def begin(self, step: int) -> Path:
        """An empty directory for the checkpoint of ``step``; leftovers of killed saves are removed."""
        for left in self.path.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        # Not the run's own directory: if that is missing, it must be reported.
        self.path.mkdir(exist_ok=True)
        sync_directory(self.path.parent)
        partial = self.path / f".step-{step:08d}.partial"
        partial.mkdir()
        return partial

    def commit(self, partial: Path, step: int) -> Path:
        """Make a fully written checkpoint visible, by one rename."""
        final = self.path / f"step-{step:08d}"
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():  # saved again after a roll back
            if replaced.exists():
                _remove(replaced)
            os.rename(final, replaced)
        make_visible(partial, final)
        return final

    def tidy(self, keep: int, best: Sequence[int] = ()) -> None:
        """Let ``latest`` name the newest checkpoint and ``best`` the first of ``best``, steps that are kept
        whatever their age, and remove those they replaced and all others but the newest ``keep`` of those
        that are complete according to manifest and sizes: a damaged one does not count and is kept for
        inspection."""
        self._name_latest()
        names = [f"step-{step:08d}" for step in best]
        if names and (self.path / names[0]).is_dir():
            self._name("best", names[0])
        for replaced in self.path.glob("step-*.replaced"):
            if replaced.with_suffix("").exists():
                _remove(replaced)
        whole = [path for _, path in self.complete() if _looks_whole(path)]
        for path in whole[:-keep]:
            if path.name not in names:
                _remove(path)

    def _name_latest(self) -> None:
        newest = self.newest()
        if newest is not None:
            self._name("latest", newest.name)

    def _name(self, file: str, checkpoint: str) -> None:
        temporary = self.path / f".{file}.partial"
        write_durably(temporary, checkpoint + "\n")
        os.replace(temporary, self.path / file)
        sync_directory(self.path)

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a damaged checkpoint so that it is no longer found; returns its new path."""
        number, aside = 0, checkpoint.with_name(f"damaged-{checkpoint.name}")
        while aside.exists():
            number += 1
            aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{number}")
        os.rename(checkpoint, aside)
        self._name_latest()
        return aside


def write_manifest(
    directory: Path,
    index: Index,
    expected: Mapping[str, tuple[int, ...]],
    config: Config | None,
    progress: Mapping[str, Any],
    origin: Mapping[str, Any],
    others: Mapping[str, FileRecord] | None = None,
) -> None:
    """Write ``config.yaml`` and ``manifest.json`` beside the tensor files of a checkpoint.

    Args:
        directory: of the checkpoint.
        index: its tensor files and what is in them.
        expected: name and shape of every tensor that they must cover.
        config: resolved; None for the state of a plain module.
        progress, origin: see :class:`~hexad.checkpoint.manifest.Manifest`.
        others: further files that exist already, by name.

    Raises:
        OSError: they cannot be written.
        ValueError: the files do not cover every tensor exactly once.
    """
    text = b"{}\n" if config is None else dump_config(config).encode()
    tree = {} if config is None else config.model_dump(mode="json", by_alias=True)
    write_durably(directory / "config.yaml", text)
    complete = Index.empty({"config.yaml": FileRecord.of(text), **(others or {})}).merge(index)
    manifest = Manifest(dict(progress), tree, complete, dict(origin))
    manifest.check_coverage(expected)
    write_durably(directory / MANIFEST_FILE, manifest.encode())


def origin_of(
    reason: str, torch: str, world: int = 1, layout: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The origin of a checkpoint that is being written, for its manifest; ``torch``: its version."""
    return {
        "world": world,
        "layout": dict(layout or {}),
        "reason": reason,
        "saved_at": time.time(),
        "hexad": __version__,
        "torch": torch,
    }


def wait_until_visible(checkpoint: Path, checksum: bytes | None, seconds: float) -> None:
    """Wait until this process sees a checkpoint's manifest as another one does, with this ``checksum`` (None:
    there is none), for so many seconds at most.

    Raises:
        HexadError: it does not become visible.
    """
    end, pause = time.monotonic() + seconds, 0.05
    while checksum is not None and manifest_checksum(checkpoint) != checksum:
        if time.monotonic() >= end:
            raise HexadError(
                f"checkpoint {checkpoint} is not visible after {seconds:.0f} s, but on rank 0 it is; use a "
                "file system that all hosts share"
            )
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
        with suppress(OSError):
            os.listdir(checkpoint.parent)  # to open a directory makes NFS ask the server for changes


def make_visible(partial: Path, final: Path) -> None:
    """Rename a directory whose files are on disk, so that it appears atomically."""
    sync_directory(partial)
    os.rename(partial, final)
    sync_directory(final.parent)


def _looks_whole(checkpoint: Path) -> bool:
    try:
        for name, record in read_manifest(checkpoint).files.items():
            check_size(checkpoint, name, record)
    except HexadError:
        return False
    return True


_OLDER = {"train": "all", "lora": None}
"""Values of settings in checkpoints that are older than the setting."""


def check_same_model(
    path: Path,
    saved_config: dict[str, Any],
    config: Config,
    *,
    adapters: bool = True,
    resuming: bool = False,
) -> None:
    """Refuse a checkpoint whose model differs from the configuration's; with ``adapters`` also one that
    trains other parts of it. ``resuming``: a run continues from it.

    Raises:
        HexadError: naming the first setting that differs.
    """
    difference = different_setting(saved_config.get("model", {}), config, adapters)
    if difference is not None:
        name, value, has = difference
        own_run = resuming and path.absolute().is_relative_to(Path(config.run.dir).absolute())
        hint = "; another run needs another run.dir" if own_run else ""
        raise HexadError(f"{name}: found {value!r}, but checkpoint {path} has {has!r}{hint}")


def different_setting(
    saved: Mapping[str, Any], config: Config, adapters: bool = True
) -> tuple[str, Any, Any] | None:
    """The first setting in which a saved model differs from a configuration's, with the configuration's value
    and the saved one; with ``adapters`` also one of what is trained. None: there is none."""
    settings = config.model.model_dump(mode="json", by_alias=True)
    for name, value in settings.items():
        if name in ("preset", "load", "max_positions", *FREE) or (not adapters and name in TRAINED):
            continue
        has = saved.get(name, _OLDER.get(name, value))
        if isinstance(has, dict):  # of an older version, without what its defaults are now
            has = ModelSettings.model_validate({name: has}).model_dump(mode="json")[name]
        if name == "moe" and has is not None and value is not None:
            others = (key for key in value if key not in MoeSettings.OF_TRAINING and has[key] != value[key])
            if (key := next(others, None)) is None:
                continue
            name, has, value = f"moe.{key}", has[key], value[key]
        if has != value:
            return f"model.{name}", value, has
    return None


_SHAPING = (
    "run", "model", "data", "batch", "parallel", "precision", "memory", "optimizer", "lr_schedule"
)  # fmt: skip
"""Groups of settings that shape the training, or how it is computed."""


def changed_settings(saved: dict[str, Any], config: Config) -> list[str]:
    """``name: old -> new`` for settings that shape the training and differ from the checkpoint's."""
    settings = config.model_dump(mode="json", by_alias=True)
    # The effect of run.steps on the learning-rate schedule is shown by lr_schedule.decay_steps.
    silent = {"run.dir", "run.device", "run.timeout", "run.steps", "run.cpu_binding", "model.init_std"}
    return [
        f"{group}.{name}: {saved[group][name]} -> {value}"
        for group in _SHAPING
        for name, value in settings[group].items()
        if f"{group}.{name}" not in silent and (group != "model" or name in FREE)
        if saved.get(group, {}).get(name, "auto") not in (value, "auto")  # auto: as older versions saved it
    ]


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint at ``path``: the path itself, the newest one of a run directory, or the one that a run's
    ``checkpoints/best`` or ``checkpoints/latest`` names.

    Raises:
        HexadError: none of them.
    """
    start = Path(path)
    if start.name in ("best", "latest") and os.path.isfile(start):
        with reporting(start):
            start = start.parent / start.read_text(encoding="utf-8", errors="replace").strip()
    if os.path.isfile(start / MANIFEST_FILE) or (STEP_NAME.fullmatch(start.name) and start.is_dir()):
        return start
    newest = CheckpointDirectory(start).newest()
    if newest is None:
        problem = "neither a checkpoint nor a run directory with a complete checkpoint"
        raise HexadError(f"{start}: {problem}{_what_else(start)}")
    return newest


def _what_else(directory: Path) -> str:
    """What a directory that is no checkpoint holds, as the end of a message."""
    if os.path.isfile(directory / "config.json"):
        return f"; a directory of a Hugging Face model is named hf:{directory}"
    inner = directory.glob(f"*/{MANIFEST_FILE}") if os.path.isdir(directory) else ()
    tags = sorted(path.parent.name for path in inner)
    return f"; it holds checkpoints of its own: name one, such as {directory / tags[-1]}" if tags else ""


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that an interrupted removal leaves nothing incomplete
    under a valid name."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
