"""Vocabulary-parallel embedding and output head (Shoeybi et al., arXiv 1909.08053)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from hexad.comm import all_gather, all_reduce, reduce_scatter

from ..shapes import padded_vocab
from ..sharding import Declaration, Piece, Placement, ShardedModule
from ..slot import slot_of
from .linear import column_linear
from .loss import head_loss_sum


def _vocab_weight(
    vocab: int, hidden: int, place: Placement, std: float, name: str = "weight", **flags: bool
) -> tuple[nn.Parameter, Declaration]:
    """A ``[padded vocab / size, hidden]`` weight; padding rows belong to no piece and stay zero."""
    size, rank = place.axis.size, place.axis.rank
    rows = padded_vocab(vocab, size) // size
    begin = min(rank * rows, vocab)
    sizes = (min(begin + rows, vocab) - begin, hidden)
    piece = Piece(name, (vocab, hidden), (begin, 0), sizes, std=std)
    declaration = Declaration((piece,), size > 1, partial=False, decay=True, **flags)
    return place.parameter(rows, hidden), declaration


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, place: Placement) -> torch.Tensor:
        ctx.weight, ctx.place = weight, place
        axis = place.axis
        if axis.size == 1:
            ctx.save_for_backward(tokens, None)
            return F.embedding(tokens, weight)
        rows = tokens - axis.rank * weight.shape[0]
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(rows, elsewhere)
        out = F.embedding(rows, weight).masked_fill_(elsewhere[:, None], 0)
        return (reduce_scatter if place.sequence else all_reduce)(out, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, elsewhere = ctx.saved_tensors
        if ctx.place.sequence:
            gradient = all_gather(gradient.contiguous(), ctx.place.axis)
        if elsewhere is not None:
            gradient = gradient.masked_fill(elsewhere[:, None], 0)
        slot = slot_of(ctx.weight)
        if slot is not None:
            slot.add_rows(rows, gradient)
            return None, None, None
        weight = torch.zeros_like(ctx.weight).index_add_(0, rows, gradient)
        return None, weight, None


class VocabParallelEmbedding(ShardedModule):
    """A token embedding with the vocabulary's rows divided over the axis.

    Args:
        vocab: number of tokens, any; padded internally.
        hidden: width.
        place: in sequence parallel the output is divided over tokens.
        tied: another pipeline rank's output head holds a copy of the weight.
    """

    weight: nn.Parameter

    def __init__(self, vocab: int, hidden: int, place: Placement, *, std: float, tied: bool = False) -> None:
        super().__init__()
        self.place = place
        self.declare("weight", *_vocab_weight(vocab, hidden, place, std, tied=tied))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 ``[tokens]`` -> ``[tokens (/ size in sequence parallel), hidden]``."""
        return _Embed.apply(tokens, self.weight, self.place)


class VocabParallelHead(ShardedModule):
    """The output projection with the vocabulary divided over the axis; each rank returns its own logits.

    Args:
        tied: the embedding's weight where this rank holds it; ``copy`` where another pipeline rank does, of
            which the head then holds a copy; None makes a weight of its own.
    """

    weight: nn.Parameter

    def __init__(
        self,
        vocab: int,
        hidden: int,
        place: Placement,
        *,
        tied: nn.Parameter | Literal["copy"] | None,
        std: float,
    ) -> None:
        super().__init__()
        self.place = place
        self.vocab = vocab
        if tied is None:
            self.declare("weight", *_vocab_weight(vocab, hidden, place, std))
        elif isinstance(tied, nn.Parameter):
            self.weight = tied
        else:
            name = ".embedding.weight"
            self.declare("weight", *_vocab_weight(vocab, hidden, place, std, name, tied=True, copy=True))

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, seed: float | None = None
    ) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> logits ``[tokens, padded vocab / size]``.

        With ``labels``, int64 ``[tokens]``: the sum of the token losses, without ever holding all logits; see
        :func:`hexad.parallel.tensor.loss.head_loss_sum`. Both are calls of the module, whose hooks see to it
        that the weight is there.
        """
        if labels is None:
            return column_linear(x, self.weight, None, replace(self.place, fp8=False))
        return head_loss_sum(x, self.weight, labels, self.vocab, self.place, seed)
