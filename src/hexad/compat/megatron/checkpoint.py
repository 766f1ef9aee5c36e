"""Saving, resuming and initial weights of a launch line. No torch."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from hexad.config import ConfigError

DEFAULT_DIRECTORY = "runs/megatron"
"""``run.dir`` without ``--save``."""


def checkpoint_settings(arguments: Namespace) -> tuple[dict[str, Any], str | None, list[str]]:
    """The group ``checkpoint``, ``model.load``, and notes for the user.

    As in Megatron-LM, a run resumes only from what ``--load`` names.

    Raises:
        ConfigError: what Hexad cannot load, or flags that exclude each other.
    """
    notes: list[str] = []
    load, save, weights = arguments.load, arguments.save, arguments.pretrained_checkpoint
    resumes = load is not None and save is not None and Path(load) == Path(save)
    found: dict[str, Any] = {
        "every": (arguments.save_interval or 0) if save else 0,
        "keep": 10**9,  # Megatron-LM deletes none
        "asynchronous": arguments.async_save,
        "resume": "auto" if resumes else "never",
    }
    if not save:
        notes.append(f"without --save: the last checkpoint, metrics and logs are in {DEFAULT_DIRECTORY}")
    _refuse_foreign("--load", load)
    _refuse_foreign("--pretrained-checkpoint", weights)
    if arguments.finetune and load is not None:
        if resumes:
            raise ConfigError("--finetune", f"found with --load and --save {load}; save to another directory")
        load, weights = None, load
    if load is not None and arguments.no_load_optim and _holds_checkpoints(load):
        raise ConfigError(
            "--no-load-optim",
            f"found with --load {load}, which holds checkpoints; one is resumed completely: leave it out, or "
            "add --finetune to begin with the weights only",
        )
    if resumes and arguments.exit_on_missing_checkpoint:
        found["resume"] = "must"
    elif load is not None and not resumes:
        if Path(load).is_dir() or arguments.exit_on_missing_checkpoint:
            found["load"] = load
        else:
            notes.append(f"--load: {load} does not exist: the run begins with initial weights")
    return found, weights, notes


def refuse_forgotten(directory: str, resume: str) -> None:
    """Refuse to start a new run in a directory with checkpoints, before anything starts.

    Args:
        directory: the run's directory.
        resume: ``checkpoint.resume``.

    Raises:
        ConfigError: naming the flag that resumes.
    """
    if resume == "never" and _holds_checkpoints(directory):
        raise ConfigError(
            "--save",
            f"{directory} holds checkpoints; add --save {directory} --load {directory} to resume, or "
            "save to another directory",
        )


def _holds_checkpoints(directory: str) -> bool:
    """Whether it is a run or a checkpoint of Hexad."""
    return any((Path(directory) / name).exists() for name in ("checkpoints", "manifest.json"))


def _refuse_foreign(flag: str, directory: str | None) -> None:
    """A checkpoint of Megatron-LM is recognised by its tracker file."""
    if directory is not None and (Path(directory) / "latest_checkpointed_iteration.txt").exists():
        raise ConfigError(
            flag,
            f"{directory} holds checkpoints of Megatron-LM; convert one with 'hexad checkpoint import --from "
            f"megatron:{directory} --to DIR --model run.yaml' and name DIR",
        )
