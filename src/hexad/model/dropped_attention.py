"""Attention whose probabilities are dropped, exactly as :mod:`.dropout` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hexad.parallel.context.rounds import Tile

from .dropout import Dropper


def dropped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Sequence[int],
    length: int,
    rows: torch.Tensor,
    dropper: Dropper,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention inside each span of tokens, probabilities dropped after the softmax.

    PyTorch's fused attention draws its own random numbers, so scores are computed here: those of one span
    and all of this rank's heads exist at a time, in forward and again in backward, ``heads * span^2`` values
    in at least float32 a few times over. Only ``q``, ``k`` and ``v`` are kept.

    Args:
        q: ``[tokens, heads, width]``.
        k, v: ``[tokens, key/value heads, width]``.
        bounds: where spans (sequences or documents) begin in the tokens, and the total.
        length: tokens of a sequence; an element's column is its key's place in it.
        rows: int32 ``[2, tokens, heads]``, each query's keys for all layers.
        dropper: the layer's.
        scale: what scores are multiplied by.
        window: keys that a query sees, its own included; None for all before it.

    Returns:
        ``[tokens, heads * width]``.
    """
    return _DroppedAttention.apply(q, k, v, tuple(bounds), length, rows, dropper, scale, window)


@dataclass(frozen=True)
class DroppedTiles:
    """Factors of the probabilities of one tile of a context rank; see
    :data:`hexad.parallel.context.kernels.Drop`.

    Attributes:
        dropper: the layer's.
        keys: int32 ``[2, tokens, heads]``, of the queries at this site.
        kv_heads: by which heads are grouped.
        length: tokens of a sequence.
    """

    dropper: Dropper
    keys: torch.Tensor
    kv_heads: int
    length: int

    def __call__(self, tile: Tile, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """``[kv heads, group, queries, keys]``."""
        begin, number = tile.queries[0], tile.first + columns.start
        keys = self.keys[:, begin + rows.start : begin + rows.stop]
        grouped = keys.transpose(1, 2).unflatten(1, (self.kv_heads, -1))
        count = columns.stop - columns.start
        return self.dropper.factors(grouped, number % self.length, count, dtype)


class _Span:
    """One span's probabilities, and the factors by which they are dropped; heads grouped by key/value head.

    Shapes are ``[kv heads, group, tokens, ...]``.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        begin: int,
        length: int,
        keys: torch.Tensor,
        dropper: Dropper,
        scale: float,
        window: int | None,
    ) -> None:
        tokens, kv_heads, _ = k.shape
        self.scale = scale
        self.q = self.grouped(q, kv_heads)
        self.k = k.transpose(0, 1).unsqueeze(1)
        wide = _wide(self.q) @ _wide(self.k).transpose(2, 3)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu_(1)
        if window is not None:
            hidden |= hidden.new_ones(tokens, tokens).tril_(-window)
        wide.mul_(self.scale).masked_fill_(hidden, -torch.inf)
        self.probabilities = torch.softmax(wide, dim=-1)
        keys = keys.transpose(1, 2).unflatten(1, (kv_heads, -1))
        self.factors = dropper.factors(keys, begin % length, tokens, wide.dtype)

    @staticmethod
    def grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """``[tokens, heads, width]`` -> ``[kv heads, group, tokens, width]``."""
        return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)

    def output(self, v: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, width]``."""
        weighted = (self.probabilities * self.factors).to(v.dtype) @ v.transpose(0, 1).unsqueeze(1)
        return weighted.permute(2, 0, 1, 3).flatten(1, 2)

    def gradients(self, v: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of q, k and v, given the output's."""
        p, factors = self.probabilities, self.factors
        gradient = self.grouped(gradient, v.shape[1])
        grad_v = ((p * factors).to(v.dtype).transpose(2, 3) @ gradient).sum(1).transpose(0, 1)
        grad_p = (gradient @ v.transpose(0, 1).unsqueeze(1).transpose(2, 3)).to(p.dtype).mul_(factors)
        grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
        narrow = grad_scores.mul_(self.scale).to(v.dtype)
        grad_q = (narrow @ self.k).permute(2, 0, 1, 3).flatten(1, 2)
        grad_k = (narrow.transpose(2, 3) @ self.q).sum(1).transpose(0, 1)
        return grad_q, grad_k, grad_v


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In at least float32: a score may be larger than what fp16 can hold."""
    return x.float() if x.dtype.itemsize == 2 else x


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: tuple[int, ...],
        length: int,
        rows: torch.Tensor,
        dropper: Dropper,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, rows)
        ctx.arguments = bounds, length, dropper, scale, window
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part, span in _spans(q, k, rows, *ctx.arguments):
            out[part] = span.output(v[part])
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, rows = ctx.saved_tensors
        results = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        gradient = gradient.view(q.shape)
        for part, span in _spans(q, k, rows, *ctx.arguments):
            for result, values in zip(results, span.gradients(v[part], gradient[part])):
                result[part] = values
        return (*results, None, None, None, None, None, None)


def _spans(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    bounds: tuple[int, ...],
    length: int,
    dropper: Dropper,
    scale: float,
    window: int | None,
) -> Iterator[tuple[slice, _Span]]:
    keys = dropper.keys(rows)
    for begin, end in pairwise(bounds):
        part = slice(begin, end)
        yield part, _Span(q[part], k[part], begin, length, keys[:, part], dropper, scale, window)
