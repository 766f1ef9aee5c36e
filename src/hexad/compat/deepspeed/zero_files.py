"""Reading DeepSpeed's own checkpoints: ZeRO stages 1 to 3, the bf16 optimizer, and the universal format,
which has a directory of files for each trained parameter.

In stages 1 and 2 a parameter group is one vector, of which each rank holds a part. In stage 3 each parameter
is split over the ranks, and a rank's parts of a group are one vector. ``param_shapes`` gives names and shapes
in the order of the values; padding follows each parameter (where it is aligned) and the vector. Errors are
those of :mod:`.saved_state`; states of model-parallel runs, of experts and of NVMe offload are refused.
"""

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from hexad.checkpoint.manifest import MANIFEST_FILE
from hexad.config import HexadError
from hexad.optim.schedule import MOMENTS

from .saved_state import (
    SavedState,
    SavedTensor,
    adam_step,
    entry,
    load_file,
    main_dtype,
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
    """The state in a tag's directory."""
    for path in sorted(directory.iterdir()):
        if _PARALLEL.fullmatch(path.name):
            raise _model_parallel(path)
    shard_files = _by_rank(directory, _OPTIMIZER)
    files, sharded = model_files(directory)
    if sharded and len(files) != len(shard_files):
        raise HexadError(
            f"{directory}: found {len(files)} files of model states and {len(shard_files)} of optimizer "
            f"states; files are missing, or {_MIXED}"
        )
    if not shard_files:
        return read_unsharded(directory, files[0], load_file(files[0]))
    return _Zero(directory, files, sharded, shard_files).state()


def model_files(directory: Path) -> tuple[list[Path], bool]:
    """The files with the module's state, by rank, and whether each has a part of it (stage 3)."""
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


def written_by_deepspeed(path: Path) -> str | None:
    """The instruction for a checkpoint that DeepSpeed has written; None for others."""
    command = f"'hexad checkpoint import --from ds:{path} --to DIR'"
    written = any(path.glob("*_states.pt"))
    return f"found a checkpoint that DeepSpeed has written; convert it with {command}" if written else None


class _Model:
    """The module's part of a checkpoint with ZeRO, or of the universal format; in ``sharded`` ones (stage 3)
    each rank's file has a part of the frozen parameters."""

    def __init__(self, directory: Path, files: Sequence[Path], sharded: bool) -> None:
        self.directory, self.files, self.sharded = directory, files, sharded
        self.models: list[Shard] = [load_file(path) for path in files]
        self.model, self.file = self.models[0], files[0]
        self.module: Mapping[str, Tensor] = entry(self.model, self.file, "module", Mapping)
        self.groups = shapes(entry(self.model, self.file, "param_shapes", list), self.file)
        self.aliases: dict[str, str] = dict(entry(self.model, self.file, "shared_params", Mapping))

    def saved(
        self,
        trained: Mapping[str, SavedTensor],
        moments: dict[str, dict[str, SavedTensor]],
        updates: set[int],
        optimizer: Mapping[str, Any],
        groups: Sequence[Any],
    ) -> SavedState:
        """The state of the checkpoint, with master weights of what is ``trained``, Adam's moments where all
        parameters have them, and the numbers of their updates."""
        copies = {} if self.sharded else self.module
        weights = {name: replace(tensor, rounded=copies.get(name)) for name, tensor in trained.items()}
        return SavedState(
            self.directory,
            weights | (self._untrained_shards() if self.sharded else self._untrained(trained)),
            moments if len(moments) == len(MOMENTS) else {},
            self.aliases,
            main_dtype(self.module[name] for name in trained if name in self.module),
            progress(self.model, self.file, updates, optimizer),
            [dict(group) for group in groups if isinstance(group, Mapping)],
        )

    def _untrained(self, trained: Container[str]) -> dict[str, SavedTensor]:
        """Frozen parameters and buffers."""
        return {
            name: SavedTensor.complete(tensor, self.file)
            for name, tensor in self.module.items()
            if name not in trained and name not in self.aliases
        }

    def _untrained_shards(self) -> dict[str, SavedTensor]:
        """Frozen parameters of which every file has a part, and buffers."""
        tensors = {}
        frozen = shapes([self.model.get("frozen_param_shapes") or {}], self.file)[0]
        parts = [model.get("frozen_param_fragments") or {} for model in self.models]
        for name, shape in frozen.items():
            fragments = [entry(part, path, name, Tensor).flatten() for path, part in zip(self.files, parts)]
            tensors[name] = _joined(shape, fragments, self.file)
        for name in entry(self.model, self.file, "buffer_names", list):
            tensors[name] = SavedTensor.complete(entry(self.module, self.file, name, Tensor), self.file)
        return tensors


class _Zero(_Model):
    """A checkpoint of ZeRO stages 1 to 3, or of DeepSpeed's bf16 optimizer, in the files ``shard_files``."""

    def __init__(
        self, directory: Path, files: Sequence[Path], sharded: bool, shard_files: Sequence[Path]
    ) -> None:
        super().__init__(directory, files, sharded)
        self.shard_files = shard_files
        self.optimizers: list[Shard] = [
            entry(load_file(path), path, "optimizer_state_dict", Mapping) for path in shard_files
        ]
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Check that all ranks' files are there, and of one step."""
        for path, optimizer in zip(self.shard_files, self.optimizers):
            counts = optimizer.get("partition_count")
            count = max(counts) if isinstance(counts, (list, tuple)) else counts
            if count != len(self.shard_files):
                raise HexadError(
                    f"{path}: found partition_count {count}, but {len(self.shard_files)} files of optimizer "
                    f"states; files are missing, or {_MIXED}"
                )
        for path, model in zip(self.files, self.models):
            for key in ("global_steps", "global_samples", "skipped_steps", "param_shapes"):
                if model.get(key) != self.model.get(key):
                    raise HexadError(f"{path}: {key} is not that of {self.file.name}; {_MIXED}")

    def state(self) -> SavedState:
        """The complete state that the checkpoint's files hold."""
        bases = [self._base(*pair) for pair in zip(self.shard_files, self.optimizers)]
        rank_states = [self._adam(base) for base in bases]
        moments = {}
        for kind in MOMENTS:
            if all(isinstance(state.get(kind), Tensor) for states in rank_states for state in states):
                moments[kind] = self._tensors([[state[kind] for state in states] for states in rank_states])
        settings: list[list[Any]] = [base.get("param_groups", []) for base in bases]
        updates = adam_step(chain(*rank_states), chain(*settings))
        masters = self._tensors(self._masters())
        return self.saved(masters, moments, updates, self.optimizers[0], settings[0])

    def _masters(self) -> list[list[Tensor]]:
        """Each rank's part of each group's master weights."""
        key = "fp32_flat_groups" if self.sharded else "single_partition_of_fp32_groups"
        parts = []
        for path, optimizer in zip(self.shard_files, self.optimizers):
            tensors = list(entry(optimizer, path, key, (list, tuple)))
            if len(tensors) != len(self.groups) or not all(isinstance(t, Tensor) for t in tensors):
                raise HexadError(
                    f"{path}: {key} holds {len(tensors)} tensors, but param_shapes in {self.file.name} has "
                    f"{len(self.groups)} groups"
                )
            parts.append(tensors)
        return parts

    def _base(self, path: Path, optimizer: Shard) -> Shard:
        """A rank's state of the optimizer that DeepSpeed's wraps."""
        if self.sharded:
            state: Shard = entry(optimizer, path, "optimizer_state_dict", Mapping)
            return state
        base = optimizer.get("base_optimizer_state", {})
        # With elastic checkpoints it is a list of states.
        return base if isinstance(base, Mapping) else {"state": dict(enumerate(base))}

    def _adam(self, base: Shard) -> list[Shard]:
        """The optimizer's state of each group, empty where there is none."""
        states = base.get("state", {})
        by_group = [states.get(n, {}) if isinstance(states, Mapping) else {} for n in range(len(self.groups))]
        return [state if isinstance(state, Mapping) else {} for state in by_group]

    def _tensors(self, parts: Sequence[Sequence[Tensor]]) -> dict[str, SavedTensor]:
        """The parameters in vectors, by rank and group, that are like the master weights'."""
        read = self._split if self.sharded else self._consecutive
        tensors: dict[str, SavedTensor] = {}
        for number in range(len(self.groups)):
            tensors |= read(number, [part[number].flatten() for part in parts])
        return tensors

    def _consecutive(self, number: int, parts: Sequence[Tensor]) -> dict[str, SavedTensor]:
        """A group's parameters in stages 1 and 2: the ranks' parts are one vector."""
        tensors, begin, file = {}, 0, self.shard_files[0]
        paddings = self.optimizers[0].get("param_alignment_paddings")
        for place, (name, shape) in enumerate(self.groups[number].items()):
            tensors[name] = SavedTensor(shape, _cut(parts, begin, math.prod(shape)), file)
            begin += math.prod(shape) + (int(paddings[number][place]) if paddings else 0)
        count = sum(part.numel() for part in parts)
        align = 2 * len(self.shard_files)  # what follows the last parameter
        if -(-begin // align) != -(-count // align):
            raise HexadError(
                f"{file}: group {number} has {count} values on all ranks, expected {begin} and padding to a "
                f"multiple of {align}; {_MIXED}"
            )
        return tensors

    def _split(self, number: int, parts: Sequence[Tensor]) -> dict[str, SavedTensor]:
        """A group's parameters in stage 3: every rank has a part of each."""
        tensors, begin = {}, 0
        for name, shape in self.groups[number].items():
            tensors[name] = _joined(shape, [part[begin:] for part in parts], self.shard_files[0])
            begin += _shard_size(shape, len(parts))
        for path, part in zip(self.shard_files, parts):
            if part.numel() != begin:
                raise HexadError(
                    f"{path}: group {number} has {part.numel()} values, expected {begin}; "
                    f"{_MIXED}, or values were offloaded to NVMe"
                )
        return tensors


def _cut(parts: Sequence[Tensor], begin: int, count: int) -> tuple[Tensor, ...]:
    """Views of ``count`` values from ``begin`` on of vectors that follow each other, as many as there are."""
    pieces = []
    for part in parts:
        piece = part[begin : begin + count]
        if piece.numel():
            pieces.append(piece)
        begin, count = max(0, begin - part.numel()), count - piece.numel()
    return tuple(pieces)


def _shard_size(shape: Sequence[int], ranks: int) -> int:
    """The number of a parameter's values that a rank holds in stage 3, including padding."""
    return -(-math.prod(shape) // ranks)


def _joined(shape: tuple[int, ...], parts: Sequence[Tensor], file: Path) -> SavedTensor:
    """A parameter of which every rank has a shard at the beginning of a vector."""
    count, size = math.prod(shape), _shard_size(shape, len(parts))
    pieces = (part[: max(0, min(size, count - rank * size))] for rank, part in enumerate(parts))
    return SavedTensor(shape, tuple(pieces), file)


def _by_rank(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of a kind, by data-parallel rank, all of one checkpoint."""
    paths: dict[int, Path] = {}
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
        paths[int(named[2])] = path
    missing = set(range(len(paths))) - set(paths)
    if missing:
        example = next(iter(paths.values()))
        raise HexadError(f"{directory}: the file of rank {min(missing)} is missing; found {example.name}")
    return [paths[rank] for rank in sorted(paths)]


def _model_parallel(path: Path) -> HexadError:
    return HexadError(
        f"{path}: a part of a tensor- or pipeline-parallel model or of experts, which is not read; convert "
        "the checkpoint with deepspeed.checkpoint.ds_to_universal first"
    )


FOLDER = "zero"
"""Directory of parameters in the universal format."""


def read_universal(directory: Path) -> SavedState:
    """The state in a directory that DeepSpeed's ``ds_to_universal`` wrote."""
    model, folder = _Model(directory, *model_files(directory)), directory / FOLDER
    shape_of = {name: shape for group in model.groups for name, shape in group.items()}
    weights = {name: _tensor(folder, name, "fp32", shape) for name, shape in shape_of.items()}
    moments = {}
    for kind in MOMENTS:
        lacking = [name for name in shape_of if not (folder / name / f"{kind}.pt").is_file()]
        if not lacking:
            moments[kind] = {name: _tensor(folder, name, kind, shape) for name, shape in shape_of.items()}
        elif len(lacking) < len(shape_of):
            raise HexadError(f"{folder / lacking[0] / kind}.pt: missing; other parameters have {kind}")
    path = folder / "optimizer_state.pt"
    optimizer = entry({path.name: load_file(path)}, path, path.name, Mapping)
    groups = optimizer.get("param_groups", [])
    return model.saved(weights, moments, _updates(folder, shape_of, optimizer, groups), optimizer, groups)


def _tensor(folder: Path, name: str, kind: str, shape: tuple[int, ...]) -> SavedTensor:
    """A parameter's values, from one file: a vector, or in a dictionary that says how parts of
    model-parallel ranks were joined."""
    path = folder / name / f"{kind}.pt"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise HexadError(f"{path}: found the name {name!r}, expected one of a file in {folder}")
    content: Any = load_file(path)
    values = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(values, Tensor):
        raise HexadError(f"{path}: holds no tensor")
    return SavedTensor(shape, (values.flatten(),), path)


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
