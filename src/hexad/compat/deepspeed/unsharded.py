"""Reading DeepSpeed's checkpoints without ZeRO, which hold one file and an optimizer state without names.

The state has numbers where the module has names. Parameters are assigned by shape, and by value where there
are master weights; among equal ones the order is the module's, as in ``module.parameters()``. What remains
ambiguous, equal parameters in two groups, is not assigned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .saved_state import MOMENTS, SavedState, SavedTensor, adam_step, entry, progress

_SAMPLE = 64
"""Values that are compared first: those of different parameters differ."""


@dataclass(frozen=True)
class _Slot:
    """A parameter of the optimizer.

    Attributes:
        shape: None where it is the beginning of a vector of several parameters.
        master: its master weights, or that vector; None where the module's own are.
    """

    shape: torch.Size | None
    master: torch.Tensor | None

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether it may be the module's parameter."""
        if self.shape is not None and self.shape != tensor.shape:
            return False
        if self.master is None:
            return True
        count, master, values = tensor.numel(), self.master.flatten(), tensor.flatten()
        if master.numel() < count:
            return False
        return all(
            torch.equal(master[:some].to(tensor.dtype), values[:some])
            for some in (min(_SAMPLE, count), count)
        )


class _Ambiguous(Exception):
    """Parameters cannot be assigned; names one."""


def read_unsharded(directory: Path, file: Path, model: Mapping[str, Any]) -> SavedState:
    """The state in ``mp_rank_00_model_states.pt`` of a run without ZeRO.

    Args:
        directory: of the tag.
        file: the only one.
        model: its content.

    Raises:
        HexadError: it is not of DeepSpeed.
    """
    module: Mapping[str, torch.Tensor] = entry(model, file, "module", Mapping)
    buffers = entry(model, file, "buffer_names", list)
    aliases = _aliases(module)
    weights = {
        name: SavedTensor(tuple(tensor.shape), (tensor.flatten(),), file)
        for name, tensor in module.items()
        if name not in aliases
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
    dtypes = [tensor.dtype for tensor in parameters.values()]
    return SavedState(
        directory,
        weights,
        moments if all(moments.values()) else {},
        aliases,
        max(set(dtypes), key=dtypes.count, default=torch.float32),
        progress(model, file, adam_step(states.values(), groups), optimizer),
        groups,
        lacking,
    )


def _aliases(module: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Further names of tied tensors, which have one memory, -> the first."""
    first: dict[tuple[int, torch.Size], str] = {}
    found = {}
    for name, tensor in module.items():
        known = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if known != name and tensor.numel():
            found[name] = known
    return found


def _assigned(
    optimizer: Mapping[str, Any],
    groups: list[dict[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    parameters: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor | None, dict[str, torch.Tensor]]]:
    """Of each parameter of the optimizer: its name, master weights, and moments as vectors.

    Raises:
        _Ambiguous: they cannot be assigned.
    """
    vectors, lists = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    owners: dict[str, int] = {}
    alike: list[tuple[int, list[str]]] = []
    for number, group in enumerate(groups):
        if vectors is not None:
            # DeepSpeed's fused Adam: a group is one vector, and one parameter to the optimizer.
            held = _moments(states.get(number, {}))
            begin, total = 0, vectors[number].numel()
            while begin < total:
                name = _next(_Slot(None, vectors[number][begin:]), number, parameters, owners, alike)
                end = begin + parameters[name].numel()
                parts = {kind: tensor.flatten()[begin:end] for kind, tensor in held.items()}
                yield name, vectors[number][begin:end], parts
                begin = end
            continue
        for place, key in enumerate(group["params"]):
            master = None if lists is None else lists[number][place]
            held = _moments(states.get(key, {}))
            if master is None and not held:
                continue  # the module's weights, before a first step
            shape = next(iter(held.values())).shape if master is None else master.shape
            name = _next(_Slot(shape, master), number, parameters, owners, alike)
            vector = None if master is None else master.flatten()
            yield name, vector, {kind: tensor.flatten() for kind, tensor in held.items()}
    for number, names in alike:
        for name in names:
            if owners.get(name) != number:
                raise _Ambiguous(name)


def _next(
    slot: _Slot,
    group: int,
    parameters: Mapping[str, torch.Tensor],
    owners: dict[str, int],
    alike: list[tuple[int, list[str]]],
) -> str:
    """The name of the parameter of a slot: the first that is left. ``owners`` receives its group, ``alike``
    all that it could be."""
    names = [name for name, tensor in parameters.items() if slot.fits(tensor)]
    left = [name for name in names if name not in owners]
    if not left:
        raise _Ambiguous(f"a parameter of group {group}")
    if len({parameters[name].numel() for name in left}) > 1:
        raise _Ambiguous(left[0])
    owners[left[0]] = group
    alike.append((group, names))
    return left[0]


def _moments(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {kind: state[kind] for kind in MOMENTS if isinstance(state.get(kind), torch.Tensor)}
