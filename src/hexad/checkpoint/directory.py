"""Checkpoint directories of a run: names, atomic appearance, retention. No torch.

``checkpoints/step-00000100/`` appears by one rename after everything in it is on disk, so that whatever has
such a name is complete. ``checkpoints/latest`` names the newest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from hexad.config import Config, HexadError

_NAME = re.compile(r"step-(\d{8,})")
STATE_FILE = "state.json"


class CheckpointDirectory:
    """The ``checkpoints`` folder of a run directory."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "checkpoints"

    def complete(self) -> list[tuple[int, Path]]:
        """(step, path) of every complete checkpoint, oldest first."""
        if not self.path.is_dir():
            return []
        found = [(int(m[1]), p) for p in self.path.iterdir() if (m := _NAME.fullmatch(p.name))]
        return sorted(found)

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        found = self.complete()
        return found[-1][1] if found else None

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of ``step`` into; what killed saves left is removed."""
        for left in self.path.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        partial = self.path / f".step-{step:08d}.partial"
        partial.mkdir(parents=True)
        return partial

    def commit(self, partial: Path, step: int, state: dict[str, Any]) -> Path:
        """Make a fully written checkpoint visible, by one rename, and let ``latest`` name it."""
        write_durably(partial / STATE_FILE, json.dumps(state, indent=1) + "\n")
        _sync_directory(partial)
        final = self.path / f"step-{step:08d}"
        if final.exists():  # saved again after going back to an earlier step
            _remove(final)
        os.rename(partial, final)
        _sync_directory(self.path)
        temporary = self.path / ".latest.partial"
        write_durably(temporary, final.name + "\n")
        os.replace(temporary, self.path / "latest")
        _sync_directory(self.path)
        return final

    def retain(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints."""
        for _, path in self.complete()[:-keep]:
            _remove(path)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The ``state.json`` of a checkpoint.

    Raises:
        HexadError: no checkpoint there, or a damaged file.
    """
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HexadError(f"{checkpoint}: not a checkpoint: {STATE_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise HexadError(f"{checkpoint / STATE_FILE}: cannot be read: {error}") from None
    wanted = {"step": int, "samples": int, "world": int, "config": dict}
    for name, kind in wanted.items():
        if not isinstance(state, dict) or not isinstance(state.get(name), kind):
            raise HexadError(f"{checkpoint / STATE_FILE}: damaged: {name} is missing or malformed")
    return state


_FREE = ("dropout", "attention_dropout")
"""Settings of a model that its weights do not depend on."""


def check_same_model(path: Path, state: dict[str, Any], config: Config) -> None:
    """Refuse a checkpoint whose model differs from the configuration's.

    Raises:
        HexadError: naming the first setting that differs.
    """
    saved = state["config"].get("model", {})
    wanted = config.model.model_dump(mode="json", by_alias=True)
    for name, value in wanted.items():
        if name in ("preset", "init_std", "max_positions", *_FREE):
            continue
        if name in saved and saved[name] != value:
            raise HexadError(f"model.{name}: found {value!r}, but checkpoint {path} has {saved[name]!r}")


def changed_settings(saved: dict[str, Any], config: Config) -> list[str]:
    """``name: old -> new`` for settings that shape the training and differ from the checkpoint's."""
    wanted = config.model_dump(mode="json", by_alias=True)
    silent = {"run.dir", "run.device", "run.timeout"}
    schedule = config.lr_schedule
    if schedule.decay_steps != "auto" or schedule.kind in ("constant", "inverse_sqrt"):
        silent.add("run.steps")  # otherwise it moves the learning-rate schedule
    return [
        f"{group}.{name}: {saved[group][name]} -> {value}"
        for group in ("run", "model", "data", "batch", "precision", "optimizer", "lr_schedule")
        for name, value in wanted[group].items()
        if f"{group}.{name}" not in silent and (group != "model" or name in _FREE)
        if name in saved.get(group, {}) and saved[group][name] != value
    ]


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest of a run directory.

    Raises:
        HexadError: neither.
    """
    given = Path(path)
    if (given / STATE_FILE).is_file():
        return given
    newest = CheckpointDirectory(given).newest()
    if newest is None:
        raise HexadError(f"{given}: neither a checkpoint nor a run directory with a complete checkpoint")
    return newest


def _remove(checkpoint: Path) -> None:
    """Renames first, so that a kill half way leaves no incomplete checkpoint under a valid name."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    """Write and flush to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
