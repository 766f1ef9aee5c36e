"""Vocabulary-parallel embedding and output head (Shoeybi et al., arXiv 1909.08053)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hexad.comm import all_gather, all_reduce, reduce_scatter
from hexad.topology.mesh import Axis

from ..sharding import Declaration, Piece, ShardedModule
from ..slot import slot_of
from .linear import column_linear

_ROWS_MULTIPLE = 64  # matrix units want the vocabulary's share in multiples of this


def padded_vocab(vocab: int, size: int) -> int:
    """The vocabulary padded so that each of ``size`` ranks holds the same, well-aligned number of rows."""
    multiple = _ROWS_MULTIPLE * size
    return -(-vocab // multiple) * multiple


def _declaration(vocab: int, hidden: int, axis: Axis, std: float) -> Declaration:
    """Declare a ``[padded vocab / size, hidden]`` weight; padding rows belong to no piece and stay zero."""
    rows = padded_vocab(vocab, axis.size) // axis.size
    begin = min(axis.rank * rows, vocab)
    sizes = (min(begin + rows, vocab) - begin, hidden)
    piece = Piece("weight", (vocab, hidden), (begin, 0), sizes, std=std)
    return Declaration((piece,), sharded=axis.size > 1, partial=False, decay=True)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, axis: Axis, sequence: bool
    ) -> torch.Tensor:
        ctx.weight, ctx.axis, ctx.sequence = weight, axis, sequence
        if axis.size == 1:
            ctx.save_for_backward(tokens, None)
            return F.embedding(tokens, weight)
        rows = tokens - axis.rank * weight.shape[0]
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(rows, elsewhere)
        out = F.embedding(rows, weight).masked_fill_(elsewhere[:, None], 0)
        return (reduce_scatter if sequence else all_reduce)(out, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, elsewhere = ctx.saved_tensors
        if ctx.sequence:
            gradient = all_gather(gradient.contiguous(), ctx.axis)
        if elsewhere is not None:
            gradient = gradient.masked_fill(elsewhere[:, None], 0)
        slot = slot_of(ctx.weight)
        if slot is not None:
            slot.add_rows(rows, gradient)
            return None, None, None, None
        weight = torch.zeros_like(ctx.weight).index_add_(0, rows, gradient)
        return None, weight, None, None


class VocabParallelEmbedding(ShardedModule):
    """A token embedding with the vocabulary's rows divided over the axis.

    Args:
        vocab: number of tokens, any; padded internally.
        hidden: width.
        sequence: the output is divided over tokens (sequence parallel).
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        axis: Axis,
        *,
        sequence: bool,
        std: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence = sequence and axis.size > 1
        rows = padded_vocab(vocab, axis.size) // axis.size
        weight = nn.Parameter(torch.empty(rows, hidden, dtype=dtype, device=device))
        self.declare("weight", weight, _declaration(vocab, hidden, axis, std))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 ``[tokens]`` -> ``[tokens (/ size in sequence parallel), hidden]``."""
        return _Embed.apply(tokens, self.weight, self.axis, self.sequence)


class VocabParallelHead(ShardedModule):
    """The output projection with the vocabulary divided over the axis; each rank returns its own logits.

    Args:
        tied: the embedding's weight where it is shared; None makes an own one.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        axis: Axis,
        *,
        tied: nn.Parameter | None,
        sequence: bool,
        std: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence = sequence and axis.size > 1
        self.weight: nn.Parameter
        if tied is not None:
            self.weight = tied
            return
        rows = padded_vocab(vocab, axis.size) // axis.size
        weight = nn.Parameter(torch.empty(rows, hidden, dtype=dtype, device=device))
        self.declare("weight", weight, _declaration(vocab, hidden, axis, std))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> ``[tokens, padded vocab / size]``."""
        return column_linear(x, self.weight, None, self.axis, self.sequence)
