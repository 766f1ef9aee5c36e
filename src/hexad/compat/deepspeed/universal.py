"""Reading DeepSpeed's universal checkpoints: a directory of files for each parameter that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hexad.config import HexadError

from .saved_state import MOMENTS, SavedState, SavedTensor, adam_step, entry, load_file, progress, shapes
from .zero_files import model_files, untrained_complete, untrained_sharded

FOLDER = "zero"
_OPTIMIZER = "optimizer_state.pt"


def read_universal(directory: Path) -> SavedState:
    """The state in a directory that DeepSpeed's ``ds_to_universal`` wrote.

    Raises:
        HexadError: a file is missing or damaged, or the model's states are those of a model-parallel run.
    """
    files, sharded = model_files(directory)
    models = [load_file(path) for path in (files if sharded else files[:1])]
    module: Mapping[str, torch.Tensor] = entry(models[0], files[0], "module", Mapping)
    wanted: dict[str, tuple[int, ...]] = {}
    for group in shapes(entry(models[0], files[0], "param_shapes", list), files[0]):
        wanted |= group
    aliases: dict[str, str] = dict(entry(models[0], files[0], "shared_params", Mapping))
    folder = directory / FOLDER
    copies: Mapping[str, torch.Tensor] = {} if sharded else module
    weights = {name: _tensor(folder, name, "fp32", shape, copies.get(name)) for name, shape in wanted.items()}
    moments = {}
    for kind in MOMENTS:
        if all((folder / name / f"{kind}.pt").is_file() for name in wanted):
            moments[kind] = {name: _tensor(folder, name, kind, shape) for name, shape in wanted.items()}
        elif any((folder / name / f"{kind}.pt").is_file() for name in wanted):
            lacking = next(name for name in wanted if not (folder / name / f"{kind}.pt").is_file())
            raise HexadError(f"{folder / lacking / kind}.pt: missing; other parameters have {kind}")
    if sharded:
        others = untrained_sharded(models, files)
    else:
        others = untrained_complete(module, files[0], wanted.keys() | aliases.keys())
    optimizer = entry({_OPTIMIZER: load_file(folder / _OPTIMIZER)}, folder / _OPTIMIZER, _OPTIMIZER, Mapping)
    groups = [group for group in optimizer.get("param_groups", []) if isinstance(group, Mapping)]
    dtypes = [module[name].dtype for name in wanted if name in module]
    return SavedState(
        directory,
        weights | others,
        moments if len(moments) == len(MOMENTS) else {},
        aliases,
        max(set(dtypes), key=dtypes.count, default=torch.float32),
        progress(models[0], files[0], _updates(folder, wanted, optimizer, groups), optimizer),
        [dict(group) for group in groups],
    )


def _tensor(
    folder: Path, name: str, kind: str, shape: tuple[int, ...], copy: torch.Tensor | None = None
) -> SavedTensor:
    """A parameter's values, from a file of their own: a vector, or in a dictionary that says how parts of
    model-parallel ranks were joined."""
    path = folder / name / f"{kind}.pt"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise HexadError(f"{path}: found the name {name!r}, expected one of a file in {folder}")
    found: Any = load_file(path)
    if isinstance(found, Mapping):
        found = found.get("param")
    if not isinstance(found, torch.Tensor):
        raise HexadError(f"{path}: holds no tensor")
    return SavedTensor(shape, (found.flatten(),), path, copy)


def _updates(
    folder: Path, names: Mapping[str, Any], optimizer: Mapping[str, Any], groups: list[Any]
) -> set[int]:
    """The numbers of updates: of each parameter, or else of the first rank's optimizer."""
    steps = [path for name in names if (path := folder / name / "step.pt").is_file()]
    states: list[Any] = [{"step": load_file(path)} for path in steps]
    if not states:
        base = optimizer.get("optimizer_state_dict")
        held = base.get("state", {}) if isinstance(base, Mapping) else {}
        states = list(held.values()) if isinstance(held, Mapping) else []
    return adam_step(states, groups)
