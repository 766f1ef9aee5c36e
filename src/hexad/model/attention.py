"""Self-attention with grouped key/value heads, over this rank's heads."""

from functools import partial

import torch
from torch import Tensor, nn

from hexad.parallel.attention_choice import TILED, AttentionMethod, choose_attention
from hexad.parallel.context.attention import KeyExchange, attention_over_ranks
from hexad.parallel.context.exchange import heads_for_tokens, tokens_for_heads
from hexad.parallel.context.kernels import ProbabilityFactors, tile_kernel
from hexad.parallel.context.rounds import Tile, rounds
from hexad.parallel.sharding import Shard
from hexad.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

from . import exact_attention, exact_ops, ops
from .attention_inventory import AttentionCoreSpec, AttentionSpec
from .attention_kernels import device_kernel
from .dropout import Dropper, Site, adapter_dropper
from .norms import Norm
from .positions import Geometry
from .recompute import recomputable


def dropped_tiles(dropper: Dropper, queries: Tensor, kv_heads: int, length: int) -> ProbabilityFactors:
    """Factors of the probabilities of tiles of attention, of a layer's ``dropper``.

    Args:
        queries: int32 ``[2, tokens, heads]``, keys of this rank's queries for all layers.
        kv_heads: by which heads are grouped.
        length: tokens of a sequence; an element's column is its key's place in it.
    """

    def factors(tile: Tile, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        begin, number = tile.queries[0], tile.first + columns.start
        keys = dropper.keys(queries[:, begin + rows.start : begin + rows.stop])
        grouped = keys.transpose(1, 2).unflatten(1, (kv_heads, -1))
        return dropper.factors(grouped, number % length, columns.stop - columns.start, dtype)

    return factors


class AttentionCore(nn.Module):
    """Attention of this rank's query heads over its key/value heads, between the projections.

    Attributes:
        out: the projection back into the residual stream.
    """

    out: RowParallelLinear

    def __init__(self, inventory: AttentionCoreSpec, shard: Shard, layer: int) -> None:
        super().__init__()
        self.layer, self.compiled, self.exact = layer, shard.compiled, shard.exact
        self.ring, self.ulysses = shard.ring, shard.ulysses
        self.method = shard.method
        self.dropper = Dropper(inventory.dropout, layer, Site.PROBABILITIES, shard.device, shard.compiled)
        ranks = shard.tensor.size
        self.width = inventory.head_width
        self.heads, self.kv_heads = inventory.heads // ranks, inventory.kv_heads_held // ranks
        self.scale, self.window = inventory.scale, inventory.window
        self.use_kernel(shard.device, shard.dtype)

    def use_kernel(self, device: torch.device, dtype: torch.dtype) -> None:
        """Find the device's kernels for a number format; again where weights are converted after
        construction."""
        sizes = self.heads, self.kv_heads, self.width
        self.kernel = device_kernel(device, dtype, *sizes, self.scale, self.window)

    @property
    def last(self) -> RowParallelLinear:
        """The product that makes the branch's result."""
        return self.out

    def _core(self, q: Tensor, k: Tensor, v: Tensor, where: Geometry) -> Tensor:
        """``q [tokens, heads, width]``, ``k`` and ``v [tokens, key/value heads, width]`` -> ``[tokens,
        heads * width]``, over the keys of all context ranks."""
        if where.slice is not None:
            q, k, v = self._exchanged(q, k, v)
            return tokens_for_heads(self._attended(q, k, v, where), self.heads, self.ulysses)
        return self._attended(q, k, v, where)

    def _exchanged(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange some heads of this rank's tokens for all tokens of some heads among context ranks."""
        return heads_for_tokens(q, k, v, self.ulysses)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, where: Geometry) -> Tensor:
        """``[tokens, heads, width]`` of all three -> ``[tokens, heads * width]``, over the keys of the
        ring."""
        facts = self.kernel.facts(q, where.spans, self.exact, self.ring.size, where.queries is not None)
        method = choose_attention(facts)
        if method is not AttentionMethod.EXACT:
            return self._usual(q, k, v, where, method)
        usual = partial(self._usual, where=where, method=choose_attention(facts._replace(exact=False)))
        slice_, scale, window = where.slice or where.spans.undivided, self.kernel.scale, self.kernel.window
        exact = partial(exact_attention.attention, slice_=slice_, axis=self.ring, scale=scale, window=window)
        return exact_ops.replaced(exact, usual, q, k, v)

    def _usual(self, q: Tensor, k: Tensor, v: Tensor, where: Geometry, method: AttentionMethod) -> Tensor:
        """Attention of :meth:`_attended` by a method of the usual arithmetic."""
        if method not in TILED:
            return self.kernel.attend(method, q, k, v, where.spans)
        slice_, factors = where.slice or where.spans.undivided, None
        if where.queries is not None:
            factors = dropped_tiles(self.dropper, where.queries, k.shape[1], slice_.length)
        contiguous = factors is not None
        steps = rounds(slice_, self.ring.rank, self.kernel.window, contiguous, self.method == "all_gather")
        exchange = KeyExchange(steps, self.ring, self.method)
        kernel = tile_kernel(method, self.kernel.scale, factors)
        return attention_over_ranks(q, k, v, exchange, kernel, self.compiled)


class Attention(AttentionCore):
    """Causal self-attention (Vaswani et al., arXiv 1706.03762; grouped queries: arXiv 2305.13245)."""

    def __init__(self, inventory: AttentionSpec, shard: Shard, layer: int) -> None:
        super().__init__(inventory, shard, layer)
        self.qkv = ColumnParallelLinear(inventory.qkv, shard)
        self.out = RowParallelLinear(inventory.out, shard)
        features = inventory.heads * inventory.width
        self.droppers = (
            adapter_dropper(inventory.layer.lora, layer, Site.ADAPTED_QKV, shard),
            adapter_dropper(inventory.layer.lora, layer, Site.ADAPTED_OUT, shard, features),
        )
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if inventory.head_norms:
            self.q_norm, self.k_norm = (Norm(norm, shard, "rotated") for norm in inventory.head_norms)

    def forward(self, x: Tensor, where: Geometry) -> Tensor:
        """Normalised ``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        heads, kv_heads = self.heads, self.kv_heads
        first, second = (dropper.at(where.adapted) for dropper in self.droppers)
        widths = (heads + kv_heads) * self.width, kv_heads * self.width
        parts = self.qkv(x, first).split_with_sizes(widths, 1)
        qk = recomputable("rotated", self._queries_and_keys, parts[0], where)
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        v = parts[1].view(-1, kv_heads, self.width)
        if where.cache is not None:
            return self.out(where.cache.attend(self.layer, q, k, v, self.kernel), second)
        return self.out(self._core(q, k, v, where), second)

    def _queries_and_keys(self, qk: Tensor, where: Geometry) -> Tensor:
        """``[tokens, heads + key/value heads, width]``, normalised and rotated; else a view of ``qk``."""
        heads, kv_heads = self.heads, self.kv_heads
        qk = qk.view(-1, heads + kv_heads, self.width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([heads, kv_heads], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if where.cos is not None and where.sin is not None:
            qk = (exact_ops if self.exact else ops).rotate(qk, where.cos, where.sin, self.compiled)
        return qk
