"""``megatron.core.tensor_parallel``: layers, mappings, random numbers, recomputation, data of ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hexad.comm import broadcast, gather_objects
from hexad.config import HexadError

from . import parallel_state
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding  # noqa: F401
from .mappings import (  # noqa: F401
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)

MODEL_PARALLEL, DATA_PARALLEL = "model-parallel-rng", "data-parallel-rng"
"""Names of states, as Megatron-LM's."""


class RngTracker:
    """States of the generator by name: inside :meth:`fork` one of them is in force."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def is_initialized(self) -> bool:
        """Whether there is any."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}

    def get_states(self) -> dict[str, Tensor]:
        """The states."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace the states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state of a seed.

        Raises:
            HexadError: there is one of this name.
        """
        if name in self._states:
            raise HexadError(f"rng tracker: found the state {name!r} already; use another name")
        generator = _device()
        before = generator.get_rng_state()
        generator.manual_seed(seed)
        self._states[name] = generator.get_rng_state()
        generator.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Use a state while inside, and keep how far it got.

        Raises:
            HexadError: there is none of this name.
        """
        if name not in self._states:
            known = ", ".join(self._states) or "none: call model_parallel_cuda_manual_seed"
            raise HexadError(f"rng tracker: found no state {name!r}; known: {known}")
        generator = _device()
        before = generator.get_rng_state()
        generator.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_rng_state()
            generator.set_rng_state(before)


def _device() -> Any:
    """The module of the generator that ranks compute with."""
    if parallel_state.is_initialized():
        return torch.cuda if parallel_state.get_mesh().device.type == "cuda" else torch
    return torch.cuda if torch.cuda.is_available() else torch


_tracker = RngTracker()


def get_cuda_rng_tracker(*_: Any, **__: Any) -> RngTracker:
    """The states of the device's generator."""
    return _tracker


_seeds: list[int] = []


def model_seed() -> int | None:
    """The seed of the last :func:`model_parallel_cuda_manual_seed`; None before it."""
    return _seeds[0] if _seeds else None


def model_parallel_cuda_manual_seed(seed: int, *_: Any, **__: Any) -> None:
    """Seed the generators: the default one and the data ranks' as ``seed``, the tensor ranks' apart."""
    _seeds[:] = [seed]
    _tracker.reset()
    _device().manual_seed(seed)
    _tracker.add(DATA_PARALLEL, seed)
    _tracker.add(MODEL_PARALLEL, seed + 2718 + parallel_state.get_tensor_model_parallel_rank())


def checkpoint(
    function: Callable[..., Any], distribute_saved_activations: bool = False, *args: Any, **__: Any
) -> Any:
    """``function(*args)``, recomputed in the backward pass with the same random numbers;
    ``distribute_saved_activations`` has no effect."""
    states, first = _tracker.get_states(), True

    def run(*inputs: Any) -> Any:
        nonlocal first
        if first:
            first = False
            return function(*inputs)
        now = _tracker.get_states()
        _tracker.set_states(states)
        try:
            return function(*inputs)
        finally:
            _tracker.set_states(now)

    return torch_checkpoint(run, *args, use_reentrant=False)


def broadcast_data(
    keys: Sequence[str], data: dict[str, Tensor] | None, datatype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors of the first tensor rank on all tensor ranks; others may pass None.

    Raises:
        HexadError: a tensor is missing or has another format; on all tensor ranks.
    """
    mesh, given = parallel_state.get_mesh(), data or {}
    axis = mesh.tensor
    formats = {key: (tensor.dtype, tensor.shape) for key, tensor in given.items() if key in keys}
    formats = gather_objects(formats, axis)[0]  # of the first rank
    result = {}
    for key in keys:
        dtype, shape = formats.get(key, (None, ()))
        if dtype != datatype:
            raise HexadError(f"broadcast_data: found {key} in {dtype}, expected {datatype}")
        own = given[key].to(mesh.device).contiguous() if axis.rank == 0 else None
        tensor = torch.empty(shape, dtype=datatype, device=mesh.device) if own is None else own
        result[key] = broadcast(tensor, axis)
    return result


def send_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """A dictionary of tensors, and other values, of the first tensor rank on all tensor ranks."""
    mesh = parallel_state.get_mesh()
    axis = mesh.tensor
    if axis.size == 1:
        return batch
    formats = {name: (v.dtype, v.shape) for name, v in batch.items() if isinstance(v, Tensor)}
    values = {name: None if name in formats else value for name, value in batch.items()}
    formats, result = gather_objects((formats, values) if axis.rank == 0 else None, axis)[0]
    for name, (dtype, shape) in formats.items():
        own = batch[name].to(mesh.device).contiguous() if axis.rank == 0 else None
        empty = torch.empty(shape, dtype=dtype, device=mesh.device) if own is None else own
        result[name] = broadcast(empty, axis)
    return dict(result)


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> list[Tensor]:
    """A tensor's equal parts along its last dim.

    Raises:
        HexadError: it does not divide.
    """
    if tensor.shape[-1] % num_partitions:
        raise HexadError(
            f"split_tensor_along_last_dim: found {tensor.shape[-1]}, which {num_partitions} does not divide"
        )
    parts = tensor.split(tensor.shape[-1] // num_partitions, dim=-1)
    return [part.contiguous() if contiguous_split_chunks else part for part in parts]
