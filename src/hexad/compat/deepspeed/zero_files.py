"""Reading DeepSpeed's own checkpoints: ZeRO stages 1 to 3, the bf16 optimizer, and the universal format,
which has a directory of files for each trained parameter.

In stages 1 and 2 a parameter group is one vector, of which each rank holds a part. In stage 3 each parameter
is split over the ranks, and a rank's parts of a group are one vector. ``param_shapes`` gives names and shapes
in the order of the values; padding follows each parameter (where it is aligned) and the vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hexad.checkpoint.manifest import MANIFEST_FILE
from hexad.config import HexadError

from .saved_state import (
    MOMENTS,
    Flat,
    SavedState,
    SavedTensor,
    adam_step,
    entry,
    load_file,
    progress,
    read_unsharded,
    shapes,
)

_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?zero)_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(zero)_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_COMPLETE_MODEL = re.compile(r"()mp_rank_(\d+)()(?:_\d+)?_model_states\.pt")
_PARALLEL = re.compile(r"layer_.*model_states\.pt|expp_rank_.*_optim_states\.pt")

_MIXED = "files of several checkpoints are mixed"

Shard = Mapping[str, Any]
"""The content of a rank's file."""


def read_zero(directory: Path) -> SavedState:
    """The state in a tag's directory.

    Raises:
        HexadError: a file is missing, damaged or of another checkpoint; or the state is that of a
            model-parallel run, of experts, or of NVMe offload.
    """
    for path in sorted(directory.iterdir()):
        if _PARALLEL.fullmatch(path.name):
            raise _model_parallel(path)
    shard_files = _by_rank(directory, _OPTIMIZER)
    files, sharded = model_files(directory)
    models = [load_file(path) for path in files]
    shards = [load_file(path) for path in shard_files]
    if sharded and len(files) != len(shards):
        raise HexadError(
            f"{directory}: found {len(files)} files of model states and {len(shards)} of optimizer states; "
            f"files are missing, or {_MIXED}"
        )
    if sharded:
        return _Stage3(directory, files, models, shard_files, shards).state()
    if shards:
        return _Stage12(directory, files, models, shard_files, shards).state()
    return read_unsharded(directory, files[0], models[0])


def model_files(directory: Path) -> tuple[list[Path], bool]:
    """The files with the module's state, by rank, and whether each has a part of it (stage 3).

    Raises:
        HexadError: one is missing, or they are those of a model-parallel run or of several checkpoints.
    """
    sharded, complete = _by_rank(directory, _MODEL), _by_rank(directory, _COMPLETE_MODEL)
    if sharded and complete:
        raise HexadError(f"{sharded[0]}: found beside {complete[0].name}; {_MIXED}")
    if len(complete) > 1:
        raise _model_parallel(complete[1])
    if (directory / MANIFEST_FILE).is_file():
        raise HexadError(f"{directory}: found a checkpoint of Hexad, which is loaded without an import")
    if not sharded and not complete:
        expected = "mp_rank_00_model_states.pt, or with ZeRO 3 zero_pp_rank_0_mp_rank_00_model_states.pt"
        raise HexadError(f"{directory}: no DeepSpeed checkpoint; expected {expected}")
    return sharded or complete, bool(sharded)


class _Zero:
    """What all stages have in common.

    Args:
        directory: of the tag.
        files: of the model, by rank.
        models: their content.
        shard_files: of the optimizer, by rank.
        shards: their content.
    """

    def __init__(
        self,
        directory: Path,
        files: Sequence[Path],
        models: Sequence[Shard],
        shard_files: Sequence[Path],
        shards: Sequence[Shard],
    ) -> None:
        self.directory, self.files, self.models = directory, files, models
        self.shard_files = shard_files
        self.optimizers: list[Shard] = [
            entry(shard, path, "optimizer_state_dict", Mapping) for path, shard in zip(shard_files, shards)
        ]
        self.model, self.file = models[0], files[0]
        self.module: Mapping[str, torch.Tensor] = entry(self.model, self.file, "module", Mapping)
        self.groups = shapes(entry(self.model, self.file, "param_shapes", list), self.file)
        self.aliases: dict[str, str] = dict(entry(self.model, self.file, "shared_params", Mapping))
        self._check_ranks()

    def _check_ranks(self) -> None:
        """All ranks' files are there, and of one step."""
        for path, optimizer in zip(self.shard_files, self.optimizers):
            counts = optimizer.get("partition_count")
            found = max(counts) if isinstance(counts, (list, tuple)) else counts
            if found != len(self.shard_files):
                raise HexadError(
                    f"{path}: found partition_count {found}, but {len(self.shard_files)} files of optimizer "
                    f"states; files are missing, or {_MIXED}"
                )
        for path, model in zip(self.files, self.models):
            for key in ("global_steps", "global_samples", "skipped_steps", "param_shapes"):
                if model.get(key) != self.model.get(key):
                    raise HexadError(f"{path}: {key} is not that of {self.file.name}; {_MIXED}")

    def state(self) -> SavedState:
        """All of it."""
        masters = self.partitions()
        weights = self.tensors(masters, rounded=True)
        ranks = range(len(self.optimizers))
        held = [self.adam(rank) for rank in ranks]
        moments = {}
        for kind in MOMENTS:
            if all(isinstance(state.get(kind), torch.Tensor) for states in held for state in states):
                parts = [[state[kind] for state in states] for states in held]
                moments[kind] = self.tensors(parts, rounded=False)
        settings: list[list[Any]] = [self.base(rank).get("param_groups", []) for rank in ranks]
        updates = adam_step(chain(*held), chain(*settings))
        dtypes = [each.dtype for name, each in self.module.items() if name in weights]
        return SavedState(
            self.directory,
            weights | self.untrained(),
            moments if len(moments) == len(MOMENTS) else {},
            self.aliases,
            max(set(dtypes), key=dtypes.count, default=torch.float32),
            progress(self.model, self.file, updates, self.optimizers[0]),
            [dict(each) for each in settings[0] if isinstance(each, Mapping)],
        )

    def partitions(self) -> list[list[torch.Tensor]]:
        """Each rank's part of each group's master weights."""
        raise NotImplementedError

    def base(self, rank: int) -> Shard:
        """The state of the optimizer that DeepSpeed's wraps."""
        raise NotImplementedError

    def tensors(self, parts: Sequence[Sequence[torch.Tensor]], rounded: bool) -> dict[str, SavedTensor]:
        """The parameters in vectors that are like the master weights' partitions."""
        raise NotImplementedError

    def untrained(self) -> dict[str, SavedTensor]:
        """Frozen parameters and buffers."""
        raise NotImplementedError

    def adam(self, rank: int) -> list[Shard]:
        """The optimizer's state of each group, empty where there is none."""
        states, groups = self.base(rank).get("state", {}), range(len(self.groups))
        found = [states.get(number, {}) if isinstance(states, Mapping) else {} for number in groups]
        return [each if isinstance(each, Mapping) else {} for each in found]

    def per_group(self, key: str) -> list[list[torch.Tensor]]:
        """Of each rank, the tensors of each group under a key.

        Raises:
            HexadError: there are more or fewer than groups, or other things.
        """
        found = []
        for path, optimizer in zip(self.shard_files, self.optimizers):
            tensors = list(entry(optimizer, path, key, (list, tuple)))
            kinds = {isinstance(each, torch.Tensor) for each in tensors}
            if len(tensors) != len(self.groups) or False in kinds:
                raise HexadError(
                    f"{path}: {key} holds {len(tensors)} tensors, but param_shapes in {self.file.name} has "
                    f"{len(self.groups)} groups"
                )
            found.append(tensors)
        return found


class _Stage12(_Zero):
    """Stages 1 and 2, and DeepSpeed's bf16 optimizer."""

    def partitions(self) -> list[list[torch.Tensor]]:
        return self.per_group("single_partition_of_fp32_groups")

    def base(self, rank: int) -> Shard:
        found = self.optimizers[rank].get("base_optimizer_state", {})
        # With elastic checkpoints it is a list of states.
        return found if isinstance(found, Mapping) else {"state": dict(enumerate(found))}

    def tensors(self, parts: Sequence[Sequence[torch.Tensor]], rounded: bool) -> dict[str, SavedTensor]:
        found = {}
        for number, group in enumerate(self.groups):
            flat = Flat([part[number] for part in parts])
            begin = 0
            for place, (name, shape) in enumerate(group.items()):
                pieces = flat.cut(begin, math.prod(shape))
                copy = self.module.get(name) if rounded else None
                found[name] = SavedTensor(shape, pieces, self.shard_files[0], copy)
                begin += math.prod(shape) + self._padding(number, place)
            align = 2 * len(self.shard_files)  # what follows the last parameter
            if -(-begin // align) != -(-len(flat) // align):
                raise HexadError(
                    f"{self.shard_files[0]}: group {number} has {len(flat)} values on all ranks, expected "
                    f"{begin} and padding to a multiple of {align}; {_MIXED}"
                )
        return found

    def _padding(self, group: int, place: int) -> int:
        """Values between a parameter and the next."""
        paddings = self.optimizers[0].get("param_alignment_paddings")
        return int(paddings[group][place]) if paddings else 0

    def untrained(self) -> dict[str, SavedTensor]:
        trained = {name for group in self.groups for name in group}
        return untrained_complete(self.module, self.file, trained | set(self.aliases))


class _Stage3(_Zero):
    """Stage 3."""

    def partitions(self) -> list[list[torch.Tensor]]:
        return self.per_group("fp32_flat_groups")

    def base(self, rank: int) -> Shard:
        found: Shard = entry(self.optimizers[rank], self.shard_files[rank], "optimizer_state_dict", Mapping)
        return found

    def tensors(self, parts: Sequence[Sequence[torch.Tensor]], rounded: bool) -> dict[str, SavedTensor]:
        found = {}
        for number, group in enumerate(self.groups):
            begin = 0
            for name, shape in group.items():
                found[name] = _joined(shape, [part[number][begin:] for part in parts], self.shard_files[0])
                begin += _shard_size(shape, len(parts))
            for path, part in zip(self.shard_files, parts):
                if part[number].numel() != begin:
                    raise HexadError(
                        f"{path}: group {number} has {part[number].numel()} values, expected {begin}; "
                        f"{_MIXED}, or values were offloaded to NVMe"
                    )
        return found

    def untrained(self) -> dict[str, SavedTensor]:
        return untrained_sharded(self.models, self.files)


def untrained_complete(
    module: Mapping[str, torch.Tensor], file: Path, others: Container[str]
) -> dict[str, SavedTensor]:
    """The tensors of a module that are complete in its file, but for ``others``."""
    return {
        name: SavedTensor(tuple(tensor.shape), (tensor.flatten(),), file)
        for name, tensor in module.items()
        if name not in others
    }


def untrained_sharded(models: Sequence[Shard], files: Sequence[Path]) -> dict[str, SavedTensor]:
    """Stage 3's frozen parameters, of which every rank's file has a part, and buffers."""
    found = {}
    frozen = shapes([models[0].get("frozen_param_shapes") or {}], files[0])[0]
    parts = [model.get("frozen_param_fragments") or {} for model in models]
    for name, shape in frozen.items():
        held = [entry(part, path, name, torch.Tensor).flatten() for path, part in zip(files, parts)]
        found[name] = _joined(shape, held, files[0])
    module = entry(models[0], files[0], "module", Mapping)
    for name in entry(models[0], files[0], "buffer_names", list):
        tensor = entry(module, files[0], name, torch.Tensor)
        found[name] = SavedTensor(tuple(tensor.shape), (tensor.flatten(),), files[0])
    return found


def _shard_size(shape: Sequence[int], ranks: int) -> int:
    """How many values of a parameter a rank holds in stage 3, including padding."""
    return -(-math.prod(shape) // ranks)


def _joined(shape: tuple[int, ...], parts: Sequence[torch.Tensor], file: Path) -> SavedTensor:
    """A parameter of which every rank has a shard at the beginning of a vector."""
    count, size = math.prod(shape), _shard_size(shape, len(parts))
    pieces = (part[: max(0, min(size, count - rank * size))] for rank, part in enumerate(parts))
    return SavedTensor(shape, tuple(pieces), file)


def _by_rank(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of a kind, by data-parallel rank.

    Raises:
        HexadError: one is missing, or they are those of a model-parallel run or of several checkpoints.
    """
    found: dict[int, Path] = {}
    kinds = set()
    for path in sorted(directory.iterdir()):
        named = pattern.fullmatch(path.name)
        if named is None:
            continue
        if named[3] and int(named[3]):
            raise _model_parallel(path)
        kinds.add(named[1])
        if len(kinds) > 1:
            raise HexadError(
                f"{path}: found beside files that begin with {min(kinds - {named[1]})}; {_MIXED}"
            )
        found[int(named[2])] = path
    missing = set(range(len(found))) - set(found)
    if missing:
        example = next(iter(found.values()))
        raise HexadError(f"{directory}: the file of rank {min(missing)} is missing; found {example.name}")
    return [found[rank] for rank in sorted(found)]


def _model_parallel(path: Path) -> HexadError:
    return HexadError(
        f"{path}: a part of a tensor- or pipeline-parallel model or of experts, which is not read; convert "
        "the checkpoint with deepspeed.checkpoint.ds_to_universal first"
    )


FOLDER = "zero"

_UNIVERSAL_OPTIMIZER = "optimizer_state.pt"


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
    optimizer = entry(
        {_UNIVERSAL_OPTIMIZER: load_file(folder / _UNIVERSAL_OPTIMIZER)},
        folder / _UNIVERSAL_OPTIMIZER,
        _UNIVERSAL_OPTIMIZER,
        Mapping,
    )
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
