"""Vocabulary-parallel embedding and output head (Shoeybi et al., arXiv 1909.08053)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexad.comm import all_gather_async, all_reduce, reduce_scatter

from ..contributions import EmbeddingRows, applied, contributed, meanwhile
from ..sharding import Shard, ShardedModule
from .embedding_inventory import EmbeddingSpec, HeadSpec
from .linear import column_linear
from .loss import head_loss_sum


def embed(tokens: Tensor, weight: Tensor, shard: Shard) -> Tensor:
    """int64 ``[tokens]`` -> ``[tokens (/ size in sequence parallel), hidden]``, given this rank's rows of the
    table, of which all ranks but the last have as many."""
    rows: Tensor = applied(_Embed, tokens, weight, shard)
    return rows


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, shard: Shard) -> Tensor:
        ctx.weight, ctx.shard = weight, shard
        axis = shard.tensor
        if axis.size == 1:
            ctx.save_for_backward(tokens, None)
            return F.embedding(tokens, weight)
        rows = tokens - axis.rank * weight.shape[0]
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(rows, elsewhere)
        out = F.embedding(rows, weight).masked_fill_(elsewhere[:, None], 0)
        return (reduce_scatter if shard.sequence else all_reduce)(out, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, elsewhere = ctx.saved_tensors
        if ctx.shard.sequence:
            gathering = all_gather_async(gradient.contiguous(), ctx.shard.tensor)
            meanwhile(ctx.weight)
            gradient = gathering.wait()
        if elsewhere is not None:
            gradient = gradient.masked_fill(elsewhere[:, None], 0)
        return None, contributed(ctx.weight, EmbeddingRows(rows, gradient)), None


class VocabParallelEmbedding(ShardedModule):
    """A token embedding with the vocabulary's rows divided over the tensor axis; padding rows belong to no
    weight and stay zero."""

    weight: nn.Parameter

    def __init__(self, inventory: EmbeddingSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.declare(*inventory.parameters)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 ``[tokens]`` -> ``[tokens (/ size in sequence parallel), hidden]``."""
        return embed(tokens, self.weight, self.shard)


class VocabParallelHead(ShardedModule):
    """The output projection with the vocabulary divided over the tensor axis; each rank returns its own
    logits. ``weight`` is the embedding's, where the inventory says that it is used ``here``."""

    weight: nn.Parameter

    def __init__(self, inventory: HeadSpec, shard: Shard, weight: nn.Parameter | None = None) -> None:
        super().__init__(shard)
        self.vocab = inventory.vocab
        self.declare(*inventory.parameters)
        if inventory.tied == "here":
            assert weight is not None
            self.weight = weight

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: float | None = None) -> Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> logits ``[tokens, padded vocab / size]``.

        With ``labels``, int64 ``[tokens]``: the sum of the token losses, without ever holding all logits; see
        :func:`hexad.parallel.tensor.loss.head_loss_sum`. Both are calls of the module, whose hooks gather the
        weight first.
        """
        if labels is None:
            return column_linear(x, self.weight, None, self.shard, self.shard.arithmetic.unrounded)
        return head_loss_sum(x, self.weight, labels, self.vocab, self.shard, scale)
