"""Megatron-LM's ``tensor_parallel.mappings`` over :mod:`hexad.parallel.tensor.regions`, and its
``vocab_parallel_cross_entropy``.

``group`` is a group of :mod:`~hexad.compat.megatron.parallel_state`; None for that of the tensor ranks.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from hexad.comm import all_to_all as exchange
from hexad.config import HexadError
from hexad.parallel.tensor import regions
from hexad.parallel.tensor.loss import cross_entropy
from hexad.topology.mesh import Axis

from . import parallel_state
from .parallel_state import axis_of

Group = dist.ProcessGroup | None


def _mapped(
    x: Tensor, group: Group, forward: regions.TensorFunction, backward: regions.TensorFunction
) -> Tensor:
    return regions.mapped(x, axis_of(group), forward, backward)


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The same tensor; gradients are summed over the ranks."""
    return regions.copied(input_, axis_of(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The sum over the ranks; gradients are passed on."""
    return regions.summed(input_, axis_of(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[..., h]`` -> this rank's ``[..., h / size]``; gradients are gathered."""
    return regions.split_last(input_, axis_of(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[..., h / size]`` -> ``[..., h]``; of gradients this rank's slice is passed on."""
    return regions.gathered_last(input_, axis_of(group))


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[s, ...]`` -> this rank's ``[s / size, ...]``; gradients are gathered."""
    return _mapped(input_, group, regions.slice_first, regions.gather_first)


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Group = None
) -> Tensor:
    """``[s / size, ...]`` -> ``[s, ...]``. Gradients are summed and scattered; without
    ``tensor_parallel_output_grad``, where all ranks have the same ones, this rank's slice is passed on."""
    backward = regions.scatter_sum_first if tensor_parallel_output_grad else regions.slice_first
    return _mapped(input_, group, regions.gather_first, backward)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[s, ...]`` -> this rank's ``[s / size, ...]`` of the sum; gradients are gathered."""
    return _mapped(input_, group, regions.scatter_sum_first, regions.gather_first)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[..., h / size]`` -> ``[..., h]``; gradients are summed and scattered."""
    return _mapped(input_, group, regions.gather_last, regions.scatter_sum_last)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[..., h]`` -> this rank's ``[..., h / size]`` of the sum; gradients are gathered."""
    return _mapped(input_, group, regions.scatter_sum_last, regions.gather_last)


def all_to_all(
    group: Group,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Rows to every rank and rows from every rank, in rank order; gradients return the same way.

    Args:
        group: see the module.
        input_: ``[rows, ...]``.
        output_split_sizes_: rows from each rank; by default equal parts.
        input_split_sizes: rows to each rank; by default equal parts.
    """

    sizes = input_split_sizes, output_split_sizes_

    def exchanged(x: Tensor, axis: Axis, *sizes: Sequence[int] | None) -> Tensor:
        send, receive = sizes or (None, None)
        if axis.size == 1:
            return regions.identity(x, axis)
        return exchange(x.contiguous(), axis, send, receive)

    return _mapped(
        input_,
        group,
        lambda x, axis: exchanged(x, axis, *sizes),
        lambda x, axis: exchanged(x, axis, *sizes[::-1]),
    )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of every token, in nats, in at least float32; the same on all tensor ranks.

    Args:
        vocab_parallel_logits: ``[s, b, vocab / size]``, this rank's columns; any leading dims.
        target: int64 ``[s, b]``, the leading dims; -100 for no loss.
        label_smoothing: 0.

    Returns:
        ``[s, b]``.

    Raises:
        HexadError: label smoothing, or shapes that do not fit.
    """
    if label_smoothing:
        raise HexadError(f"label_smoothing: found {label_smoothing}; it is not supported: use 0")
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise HexadError(
            f"target: found shape {tuple(target.shape)} with logits of shape "
            f"{tuple(vocab_parallel_logits.shape)}; expected all but the last dim"
        )
    axis = parallel_state.get_mesh().tensor
    vocab = vocab_parallel_logits.shape[-1] * axis.size
    return cross_entropy(vocab_parallel_logits, target, vocab, axis)
