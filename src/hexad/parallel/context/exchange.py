"""Exchanges between context ranks outside of rings: heads for tokens, and rows of tensors that ranks hold by
token.

Heads for tokens (Ulysses: Jacobs et al., arXiv 2309.14509): outside attention a rank has all
heads of its tokens, inside it has some heads of all tokens of its group."""

from typing import Any

import torch
from torch import Tensor

from hexad.comm import all_reduce, all_to_all
from hexad.topology.mesh import Axis

from .slice import Slice, heads_of


def heads_for_tokens(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all tokens of the group, of this rank's share of the heads.

    Where there are fewer key/value heads than ranks, several ranks get the same.

    Args:
        q: ``[tokens, heads, width]``; the axis's size divides the heads.
        k, v: ``[tokens, key/value heads, width]``; their number divides the size, or the reverse.
        axis: of the group; its ranks' tokens follow each other.

    Returns:
        the same, of ``size * tokens`` tokens.
    """
    if axis.size == 1:
        return q, k, v
    out: Tensor = _HeadsForTokens.apply(q, k, v, axis)
    own_q, own_k = q.shape[1] // axis.size, heads_of(k.shape[1], axis.size)
    parts = out.split([own_q, own_k, own_k], dim=1)
    return parts[0], parts[1], parts[2]


def tokens_for_heads(out: Tensor, heads: int, axis: Axis) -> Tensor:
    """The way back: ``[size * tokens, heads / size * width]`` -> ``[tokens, heads * width]``."""
    if axis.size == 1:
        return out
    result: Tensor = _TokensForHeads.apply(out.unflatten(1, (heads // axis.size, -1)), axis)
    return result.flatten(1)


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.shapes = axis, (q.shape, k.shape)
        parts = [_by_rank(x, axis.size) for x in (q, k, v)]
        return all_to_all(torch.cat(parts, dim=2).flatten(0, 1), axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        axis, ((_, heads, _), (_, kv_heads, _)) = ctx.axis, ctx.shapes
        back = all_to_all(gradient.contiguous(), axis).unflatten(0, (axis.size, -1))
        local_kv = heads_of(kv_heads, axis.size)
        q, k, v = back.split([heads // axis.size, local_kv, local_kv], dim=2)
        return _together(q, heads), _together(k, kv_heads), _together(v, kv_heads), None


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        back = all_to_all(x.contiguous(), axis).unflatten(0, (axis.size, -1))
        return _together(back, back.shape[0] * back.shape[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_to_all(_by_rank(gradient, ctx.axis.size).flatten(0, 1), ctx.axis), None


def _by_rank(x: Tensor, size: int) -> Tensor:
    """``[tokens, heads, width]`` -> ``[size, tokens, heads of a rank, width]``; of few heads, copies."""
    if x.shape[1] < size:
        return x.transpose(0, 1).unsqueeze(2).repeat_interleave(size // x.shape[1], dim=0)
    return x.unflatten(1, (size, -1)).transpose(0, 1)


def _together(x: Tensor, heads: int) -> Tensor:
    """The reverse: ``[tokens, heads, width]``; copies are added up."""
    if heads < x.shape[0]:
        return x.squeeze(2).unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
    return x.transpose(0, 1).flatten(1, 2)


def numbers_of(slice_: Slice, rank: int) -> Tensor:
    """int64 ``[tokens of a rank]``: their places in the flattened microbatch, ascending."""
    return torch.cat([torch.arange(*run) for run in slice_.runs[rank]])


def selected_rows(x: Tensor, tokens: Tensor, numbers: Tensor | None, axis: Axis) -> Tensor:
    """The rows of some tokens, on every rank; bitwise the same on all.

    Args:
        x: ``[this rank's tokens, ...]``.
        tokens: int64 ``[any]``, numbers of tokens.
        numbers: int64 ``[this rank's tokens]``, ascending; None where every rank has all.
        axis: the context axis.
    """
    if numbers is None:
        return x[tokens]
    place = torch.searchsorted(numbers, tokens).clamp(max=len(numbers) - 1)
    here = numbers[place] == tokens
    selected = x[place].masked_fill(~here.view(-1, *[1] * (x.dim() - 1)), 0.0)
    return all_reduce(selected, axis)  # one rank holds each, the others add zeros
