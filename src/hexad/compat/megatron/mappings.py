"""Megatron-LM's ``tensor_parallel.mappings``: identities, sums, gathers and slices over the tensor ranks,
each with its counterpart in the backward pass; and ``vocab_parallel_cross_entropy`` over Hexad's.

``group`` is a group of :mod:`~hexad.compat.megatron.parallel_state`; None for that of the tensor ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexad.comm import all_gather, all_reduce, reduce_scatter
from hexad.comm import all_to_all as exchange
from hexad.config import HexadError
from hexad.parallel.tensor.loss import token_losses_
from hexad.topology.mesh import Axis

from . import parallel_state
from .parallel_state import axis_of

Group = dist.ProcessGroup | None
Operation = Callable[[Tensor, Axis], Tensor]


class _Mapping(torch.autograd.Function):
    """An operation in the forward pass, another one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Operation, backward: Operation) -> Tensor:
        ctx.axis, ctx.backward_operation = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_operation(gradient, ctx.axis), None, None, None


def _mapped(x: Tensor, group: Group, forward: Operation, backward: Operation) -> Tensor:
    result: Tensor = _Mapping.apply(x, axis_of(group), forward, backward)
    return result


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def _slice_first(x: Tensor, axis: Axis) -> Tensor:
    if x.shape[0] % axis.size:
        raise HexadError(f"found {x.shape[0]} rows, which do not divide by the group's {axis.size} ranks")
    return x.chunk(axis.size)[axis.rank].clone(memory_format=torch.contiguous_format)


def _gather_first(x: Tensor, axis: Axis) -> Tensor:
    return _identity(x, axis) if axis.size == 1 else all_gather(x.contiguous(), axis)


def _scatter_sum_first(x: Tensor, axis: Axis) -> Tensor:
    return _identity(x, axis) if axis.size == 1 else reduce_scatter(x.contiguous(), axis)


def _last(operation: Operation) -> Operation:
    """A collective along the last dimension instead of the first."""

    def moved(x: Tensor, axis: Axis) -> Tensor:
        return operation(x.movedim(-1, 0), axis).movedim(0, -1).contiguous()

    return moved


_slice_last, _gather_last, _scatter_sum_last = map(_last, (_slice_first, _gather_first, _scatter_sum_first))


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The same tensor; gradients are summed over the ranks."""
    return _mapped(input_, group, _identity, _sum)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The sum over the ranks; gradients are passed on."""
    return _mapped(input_, group, _sum, _identity)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[..., h]`` -> this rank's ``[..., h / size]``; gradients are gathered."""
    return _mapped(input_, group, _slice_last, _gather_last)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[..., h / size]`` -> ``[..., h]``; of gradients this rank's slice is passed on."""
    return _mapped(input_, group, _gather_last, _slice_last)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[s, ...]`` -> this rank's ``[s / size, ...]``; gradients are gathered."""
    return _mapped(input_, group, _slice_first, _gather_first)


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Group = None
) -> Tensor:
    """``[s / size, ...]`` -> ``[s, ...]``. Gradients are summed and scattered; without
    ``tensor_parallel_output_grad``, where all ranks have the same ones, this rank's slice is passed on."""
    backward = _scatter_sum_first if tensor_parallel_output_grad else _slice_first
    return _mapped(input_, group, _gather_first, backward)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[s, ...]`` -> this rank's ``[s / size, ...]`` of the sum; gradients are gathered."""
    return _mapped(input_, group, _scatter_sum_first, _gather_first)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[..., h / size]`` -> ``[..., h]``; gradients are summed and scattered."""
    return _mapped(input_, group, _gather_last, _scatter_sum_last)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """``[..., h]`` -> this rank's ``[..., h / size]`` of the sum; gradients are gathered."""
    return _mapped(input_, group, _scatter_sum_last, _gather_last)


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
        return _identity(x, axis) if axis.size == 1 else exchange(x.contiguous(), axis, *sizes)

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
    losses: Tensor = _CrossEntropy.apply(vocab_parallel_logits, target, axis)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, axis: Axis) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = logits.flatten(0, -2).to(wide, copy=True, memory_format=torch.contiguous_format)
        wanted = ctx.needs_input_grad[0]
        losses = token_losses_(
            rows, target.flatten(), rows.shape[1] * axis.size, axis, 1.0 if wanted else None
        )
        ctx.dtype = logits.dtype
        ctx.save_for_backward(rows if wanted else None)  # they are the losses' gradient now
        return losses.view(target.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        scaled = rows * gradient.reshape(-1, 1)
        return scaled.view(*gradient.shape, -1).to(ctx.dtype), None, None
