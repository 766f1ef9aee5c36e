"""Conversions of activations between tensor-parallel layers: identities, sums, gathers and slices over the
ranks of an axis, each with its counterpart in the backward pass (Shoeybi et al., arXiv 1909.08053, figure 3;
Korthikanti et al., arXiv 2205.05198, section 4.2).

*First* is dim 0, of tokens; *last* is the last dim, of features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hexad.comm import all_gather, all_reduce, reduce_scatter
from hexad.config import HexadError
from hexad.topology.mesh import Axis

TensorFunction = Callable[[Tensor, Axis], Tensor]


class _Mapping(torch.autograd.Function):
    """An operation in the forward pass, another one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: TensorFunction, backward: TensorFunction) -> Tensor:
        ctx.axis, ctx.backward_operation = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_operation(gradient, ctx.axis), None, None, None


def mapped(x: Tensor, axis: Axis, forward: TensorFunction, backward: TensorFunction) -> Tensor:
    """``forward`` of a tensor; ``backward`` of its gradient."""
    result: Tensor = _Mapping.apply(x, axis, forward, backward)
    return result


def identity(x: Tensor, axis: Axis) -> Tensor:
    """The tensor unchanged."""
    return x.view_as(x)


def total(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def slice_first(x: Tensor, axis: Axis) -> Tensor:
    """This rank's of equal runs of rows.

    Raises:
        HexadError: the rows do not divide.
    """
    if x.shape[0] % axis.size:
        raise HexadError(f"found {x.shape[0]} rows, which do not divide by the group's {axis.size} ranks")
    return x.chunk(axis.size)[axis.rank].clone(memory_format=torch.contiguous_format)


def gather_first(x: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks, in rank order."""
    return identity(x, axis) if axis.size == 1 else all_gather(x.contiguous(), axis)


def scatter_sum_first(x: Tensor, axis: Axis) -> Tensor:
    """This rank's run of rows of the sum over the ranks."""
    return identity(x, axis) if axis.size == 1 else reduce_scatter(x.contiguous(), axis)


def _along(dim: int, operation: TensorFunction) -> TensorFunction:
    """A collective along another dimension than the first."""

    def moved(x: Tensor, axis: Axis) -> Tensor:
        return operation(x.movedim(dim, 0), axis).movedim(0, dim).contiguous()

    return moved


slice_last, gather_last, scatter_sum_last = (
    _along(-1, operation) for operation in (slice_first, gather_first, scatter_sum_first)
)
_gather_second, _scatter_sum_second = _along(1, gather_first), _along(1, scatter_sum_first)


def copied(x: Tensor, axis: Axis) -> Tensor:
    """The tensor unchanged, for a computation of which each rank does a part: gradients are summed."""
    return mapped(x, axis, identity, total)


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks, for a computation that all repeat: gradients are passed on."""
    return mapped(x, axis, total, identity)


def gathered_first(x: Tensor, axis: Axis) -> Tensor:
    """``[tokens / size, ...]`` -> ``[tokens, ...]``, for a computation of which each rank does a part:
    gradients are summed and scattered."""
    return mapped(x, axis, gather_first, scatter_sum_first)


def split_last(x: Tensor, axis: Axis) -> Tensor:
    """``[..., h]`` -> this rank's ``[..., h / size]``; gradients are gathered."""
    return mapped(x, axis, slice_last, gather_last)


def gathered_last(x: Tensor, axis: Axis) -> Tensor:
    """``[..., h / size]`` -> ``[..., h]``, for a computation that all repeat: of gradients this rank's slice
    is passed on."""
    return mapped(x, axis, gather_last, slice_last)


def gathered_tokens(x: Tensor, axis: Axis) -> Tensor:
    """``[batch, tokens / size, ...]`` -> ``[batch, tokens, ...]``, for a computation of which each rank does
    a part: gradients are summed and scattered."""
    return mapped(x, axis, _gather_second, _scatter_sum_second)


def summed_tokens(x: Tensor, axis: Axis) -> Tensor:
    """``[batch, tokens, ...]`` -> this rank's ``[batch, tokens / size, ...]`` of the sum; gradients are
    gathered.

    Raises:
        HexadError: the tokens do not divide.
    """
    if x.dim() < 2 or x.shape[1] % axis.size:
        raise HexadError(
            f"sequence parallel: found activations of shape {tuple(x.shape)}, whose dim 1, of tokens, does "
            f"not divide by {axis.size} tensor ranks; pad the sequences"
        )
    return mapped(x, axis, _scatter_sum_second, _gather_second)
