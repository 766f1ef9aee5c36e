"""``megatron.core.tensor_parallel``: layers, mappings, random numbers, recomputation, data of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hexad.comm import broadcast, gather_objects
from hexad.config import HexadError

from ..facade.random_states import (  # noqa: F401
    DATA_PARALLEL,
    MODEL_PARALLEL,
    RngTracker,
    get_cuda_rng_tracker,
    seed_ranks,
    tracker,
)
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


def model_parallel_cuda_manual_seed(seed: int, *_: Any, **__: Any) -> None:
    """Seed the generators: the default one and the data ranks' as ``seed``, the tensor ranks' apart."""
    seed_ranks(seed, parallel_state.get_tensor_model_parallel_rank())


def checkpoint(
    function: Callable[..., Any], distribute_saved_activations: bool = False, *args: Any, **__: Any
) -> Any:
    """``function(*args)``, recomputed in the backward pass with the same random numbers;
    ``distribute_saved_activations`` has no effect."""
    states, first = tracker.get_states(), True

    def run(*inputs: Any) -> Any:
        nonlocal first
        if first:
            first = False
            return function(*inputs)
        now = tracker.get_states()
        tracker.set_states(states)
        try:
            return function(*inputs)
        finally:
            tracker.set_states(now)

    return torch_checkpoint(run, *args, use_reentrant=False)


def broadcast_data(
    keys: Sequence[str], data: dict[str, Tensor] | None, datatype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors of the first tensor rank on all tensor ranks; others may pass None.

    Raises:
        HexadError: a tensor is missing or has another format; on all tensor ranks.
    """
    mesh, tensors = parallel_state.get_mesh(), data or {}
    axis = mesh.tensor
    formats = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items() if key in keys}
    formats = gather_objects(formats, axis)[0]  # of the first rank
    result = {}
    for key in keys:
        dtype, shape = formats.get(key, (None, ()))
        if dtype != datatype:
            raise HexadError(f"broadcast_data: found {key} in {dtype}, expected {datatype}")
        local = tensors[key].to(mesh.device).contiguous() if axis.rank == 0 else None
        tensor = torch.empty(shape, dtype=datatype, device=mesh.device) if local is None else local
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
        local = batch[name].to(mesh.device).contiguous() if axis.rank == 0 else None
        empty = torch.empty(shape, dtype=dtype, device=mesh.device) if local is None else local
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
