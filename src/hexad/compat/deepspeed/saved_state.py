"""The content of a DeepSpeed checkpoint, under the names of the module's parameters; and the reading of
checkpoints without ZeRO, which have one file and an optimizer state without names.

A file that is missing, damaged, incomplete or of another checkpoint is a ``HexadError`` that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexad.config import HexadError
from hexad.optim.schedule import MOMENTS

from ..facade.inert import Inert, load_inert
from ..facade.tags import encoded

_CLASSES = (
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""DeepSpeed's classes in its checkpoints."""

_OF_DEEPSPEED = frozenset(
    """
    buffer_names checkpoint_parallel_dimensions csr_tensor_module_names data_sampler ds_config
    ds_version dp_world_size frozen_param_fragments frozen_param_shapes global_samples global_steps
    lr_scheduler module mp_world_size optimizer param_shapes random_ltd shared_params skipped_steps
    sparse_tensor_module_names universal_checkpoint_info
    """.split()
)
"""Keys of a file of model states that are not a script's ``client_state``."""

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Attributes of DeepSpeed's engine, and keys of a file of model states."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that is spread over files.

    Attributes:
        shape: of the module's parameter or buffer.
        pieces: flat; together its values in row-major order.
        file: the first of its files, for messages.
        rounded: the module's own copy of a master weight, which must be equal to it in its format; None where
            there is no copy.
    """

    shape: tuple[int, ...]
    pieces: tuple[Tensor, ...]
    file: Path
    rounded: Tensor | None = None

    @classmethod
    def complete(cls, tensor: Tensor, file: Path) -> SavedTensor:
        """A tensor that is complete in one file."""
        return cls(tuple(tensor.shape), (tensor.flatten(),), file)

    @property
    def dtype(self) -> torch.dtype:
        """The format it is stored in."""
        return self.pieces[0].dtype if self.pieces else torch.float32

    @property
    def numel(self) -> int:
        """The number of its values."""
        return torch.Size(self.shape).numel()

    def check(self, name: str) -> None:
        """Check that its pieces have as many values as its shape."""
        count = sum(piece.numel() for piece in self.pieces)
        if count != self.numel:
            raise HexadError(
                f"{self.file}: {name} has {count} values, expected {self.numel} ({self.shape}); files of "
                "several checkpoints are mixed, or one is incomplete"
            )

    def read(self, name: str) -> Tensor:
        """Read all values, in the tensor's shape."""
        whole = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces or (torch.empty(0),))
        values = whole.view(self.shape)
        if self.rounded is not None:
            cast = values.to(self.rounded.dtype)
            if not ((cast == self.rounded) | (cast.isnan() & self.rounded.isnan())).all():
                raise HexadError(
                    f"{self.file}: the master weights of {name} are not those of the module in "
                    "*model_states.pt; files of several checkpoints are mixed"
                )
        return values


@dataclass
class SavedState:
    """The content of a checkpoint.

    Attributes:
        directory: of the tag.
        weights: by the module's names: master weights of what is trained, frozen parameters, buffers; each
            tensor once.
        moments: of :data:`MOMENTS` -> the trained parameters' -> values; empty where there are none.
        aliases: further names of tied parameters -> the name among ``weights``.
        dtype: of the model's parameters.
        progress: ``step``, ``updates`` and ``samples``; ``loss_scale`` of fp16; what scripts keep.
        groups: settings of the optimizer's parameter groups.
        lacking: why there are no moments, where that is known.
    """

    directory: Path
    weights: dict[str, SavedTensor]
    moments: dict[str, dict[str, SavedTensor]]
    aliases: dict[str, str]
    dtype: torch.dtype
    progress: dict[str, Any]
    groups: list[dict[str, Any]] = field(default_factory=list)
    lacking: str = ""

    def check(self) -> None:
        """Check sizes, before anything is read."""
        for kind, tensors in {"weight": self.weights, **self.moments}.items():
            for name, tensor in tensors.items():
                tensor.check(name if kind == "weight" else f"{kind} of {name}")


def load_file(path: Path) -> Any:
    """The content of one of DeepSpeed's files, tensors mapped to it.

    Raises:
        HexadError: it is missing, damaged, or could run code.
    """
    return load_inert(path, _CLASSES)


def main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The format of most tensors."""
    counts = Counter(tensor.dtype for tensor in tensors).most_common(1)
    return counts[0][0] if counts else torch.float32


def entry(content: Any, path: Path, key: str, kind: type | tuple[type, ...]) -> Any:
    """The value under a key of a file's dictionary."""
    value = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(value, kind):
        raise HexadError(f"{path}: {key} is missing or of another kind; this is no checkpoint of DeepSpeed")
    return value


def shapes(entries: Iterable[Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of each group, in the order of their values."""
    try:
        return [{str(name): tuple(map(int, shape)) for name, shape in group.items()} for group in entries]
    except (AttributeError, TypeError, ValueError):
        raise HexadError(f"{path}: param_shapes gives no names and shapes") from None


def adam_step(states: Iterable[Any], groups: Iterable[Any]) -> set[int]:
    """The numbers of updates that the states of parameters have, or else their groups."""
    for holders in (states, groups):
        steps = {
            _number(holder["step"]) for holder in holders if isinstance(holder, Mapping) and "step" in holder
        }
        if steps:
            return steps
    return set()


def progress(
    model: Mapping[str, Any], path: Path, updates: set[int], optimizer: Mapping[str, Any]
) -> dict[str, Any]:
    """The progress that Hexad's engine resumes from.

    Args:
        model, path: the content of a ``*model_states.pt``, and its path.
        updates: from :func:`adam_step`, of all files.
        optimizer: DeepSpeed's state of it.
    """
    counters = {key: _number(entry(model, path, key, (int, Tensor))) for key in COUNTERS}
    step, samples, skipped = counters.values()
    # Without ZeRO, DeepSpeed makes a first update with zero gradients, to allocate the state.
    if len(updates) > 1 or max(updates, default=0) > step - skipped + 1:
        raise HexadError(
            f"{path}: found step {step} ({skipped} skipped), and optimizer states after "
            f"{' and '.join(map(str, sorted(updates)))} updates; files of several checkpoints are mixed"
        )
    return {
        "step": step,
        "updates": updates.pop() if updates else step - skipped,
        "samples": samples,
        **_loss_scale(optimizer),
        "deepspeed": {"counters": counters, **_of_script(model)},
    }


def _of_script(model: Mapping[str, Any]) -> dict[str, Any]:
    """The state that an engine's ``load_checkpoint`` restores and returns: the schedule's, and of
    ``client_state`` all but objects of classes, which are not loaded."""
    others = {name: value for name, value in model.items() if name not in _OF_DEEPSPEED}
    kept = {name: value for name, value in others.items() if _encoded(value, name) is not None}
    schedule = model.get("lr_scheduler")
    return {
        "scheduler": None if schedule is None else _encoded(schedule, "lr_scheduler"),
        "client_state": encoded(kept, "client_state"),
    }


def _encoded(value: Any, name: str) -> dict[str, Any] | None:
    """A value as a checkpoint stores it; None if it holds objects of classes."""
    with suppress(HexadError):
        return encoded(value, name)
    return None


def _loss_scale(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The dynamic scale of fp16, as Hexad's ``LossScaler`` keeps it; empty without one."""
    scaler = optimizer.get("loss_scaler")
    values = scaler.attributes if isinstance(scaler, Inert) else optimizer
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")
    if not optimizer.get("dynamic_loss_scale") or any(name not in values for name in names):
        return {}
    scale, done, last, window = (float(values[name]) for name in names)
    patience = int(values.get("cur_hysteresis", 1))
    return {"loss_scale": {"scale": scale, "clean": int(done - last - 1) % int(window), "patience": patience}}


def _number(value: Any) -> int:
    """A count that is stored as a number or a tensor of one."""
    return int(value.item() if isinstance(value, Tensor) else value)


class _Ambiguous(Exception):
    """Parameters cannot be assigned; names one."""


class _Names:
    """The names of an optimizer's parameters, which are recognised by their values."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._groups: dict[str, int] = {}
        self._candidates: list[tuple[int, list[str]]] = []

    def next(self, group: int, shape: torch.Size | None, master: Tensor | None) -> str:
        """The name of the next parameter of a group: the first that fits and has none yet.

        Args:
            group: number of the group.
            shape: of the parameter; None where it is the beginning of a vector of several.
            master: its master weights, or that vector; None where the module's own are.
        """
        names = [name for name, tensor in self._parameters.items() if _fits(tensor, shape, master)]
        left = [name for name in names if name not in self._groups]
        if not left:
            raise _Ambiguous(f"a parameter of group {group}")
        if len({self._parameters[name].numel() for name in left}) > 1:
            raise _Ambiguous(left[0])
        self._groups[left[0]] = group
        self._candidates.append((group, names))
        return left[0]

    def check(self) -> None:
        """Check that all parameters that look alike are of one group."""
        for group, names in self._candidates:
            for name in names:
                if self._groups.get(name) != group:
                    raise _Ambiguous(name)


def _fits(tensor: Tensor, shape: torch.Size | None, master: Tensor | None) -> bool:
    """Whether a tensor of the module may be a parameter of the optimizer; see :meth:`_Names.next`."""
    if shape is not None and shape != tensor.shape:
        return False
    if master is None:
        return True
    count, master, values = tensor.numel(), master.flatten(), tensor.flatten()
    # A few values are compared first: those of different parameters differ.
    return master.numel() >= count and all(
        torch.equal(master[:some].to(tensor.dtype), values[:some]) for some in (min(64, count), count)
    )


def read_unsharded(directory: Path, file: Path, model: Mapping[str, Any]) -> SavedState:
    """The state of a run without ZeRO, whose one file, ``mp_rank_00_model_states.pt``, holds ``model``."""
    module: Mapping[str, Tensor] = entry(model, file, "module", Mapping)
    buffers = entry(model, file, "buffer_names", list)
    aliases = _aliases(module)
    weights = {
        name: SavedTensor.complete(tensor, file) for name, tensor in module.items() if name not in aliases
    }
    parameters = {name: module[name] for name in weights if name not in buffers}
    optimizer: Mapping[str, Any] = model.get("optimizer") or {}
    base = optimizer.get("optimizer_state_dict", optimizer)
    groups = [dict(group) for group in base.get("param_groups", [])]
    states: Mapping[int, Mapping[str, Any]] = base.get("state", {})
    moments: dict[str, dict[str, SavedTensor]] = {kind: {} for kind in MOMENTS}
    assigned, lacking = [], ""
    try:
        assigned = list(_assigned(optimizer, groups, states, parameters))
    except _Ambiguous as error:
        lacking = (
            f"holds an optimizer state without names (no ZeRO), and that of {error} cannot be "
            "determined; save it with ZeRO stage 1"
        )
    for name, master, held in assigned:
        shape = tuple(parameters[name].shape)
        if master is not None:
            weights[name] = SavedTensor(shape, (master,), file, parameters[name])
        for kind, tensor in held.items():
            moments[kind][name] = SavedTensor(shape, (tensor,), file)
    return SavedState(
        directory,
        weights,
        moments if all(moments.values()) else {},
        aliases,
        main_dtype(parameters.values()),
        progress(model, file, adam_step(states.values(), groups), optimizer),
        groups,
        lacking,
    )


def _aliases(module: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of tied tensors, which have one memory, -> the first."""
    first: dict[tuple[int, torch.Size], str] = {}
    names = {
        name: first.setdefault((tensor.data_ptr(), tensor.shape), name) for name, tensor in module.items()
    }
    return {name: known for name, known in names.items() if known != name and module[name].numel()}


def _assigned(
    optimizer: Mapping[str, Any],
    groups: list[dict[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    parameters: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor | None, dict[str, Tensor]]]:
    """The name, master weights and moments, as vectors, of each parameter of the optimizer."""
    vectors, lists = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    names = _Names(parameters)
    for number, group in enumerate(groups):
        if vectors is not None:
            # DeepSpeed's fused Adam: a group is one vector, and one parameter to the optimizer.
            tensors = _moments(states.get(number, {}))
            begin, total = 0, vectors[number].numel()
            while begin < total:
                name = names.next(number, None, vectors[number][begin:])
                end = begin + parameters[name].numel()
                parts = {kind: tensor[begin:end] for kind, tensor in tensors.items()}
                yield name, vectors[number][begin:end], parts
                begin = end
            continue
        for place, key in enumerate(group["params"]):
            master = None if lists is None else lists[number][place]
            moments = states.get(key, {})
            tensors = _moments(moments)
            if master is None and not tensors:
                continue  # the module's weights, before a first step
            shape = moments[next(iter(tensors))].shape if master is None else master.shape
            name = names.next(number, shape, master)
            yield name, None if master is None else master.flatten(), tensors
    names.check()


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Adam's moments in a parameter's state, as vectors."""
    return {kind: state[kind].flatten() for kind in MOMENTS if isinstance(state.get(kind), Tensor)}
