"""Self-attention with grouped key/value heads, over this rank's heads."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from hexad.parallel.sharding import Shard
from hexad.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

from . import attention_inventory
from .dropout import Dropper, Site
from .dropped_attention import dropped_attention
from .norms import RmsNorm
from .ops import rotate
from .positions import Geometry
from .recompute import recomputable


class KeyValueStore(Protocol):
    """Keeps one layer's keys and values between forward passes (generation)."""

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[sequences, heads, new, width]`` and return everything so far."""
        ...


class Attention(nn.Module):
    """Causal self-attention (Vaswani et al., arXiv 1706.03762; grouped queries: arXiv 2305.13245)."""

    def __init__(self, inventory: attention_inventory.Attention, shard: Shard, layer: int) -> None:
        super().__init__()
        self.compiled = shard.compiled
        self.dropper = Dropper(inventory.dropout, layer, Site.PROBABILITIES, shard.device, shard.compiled)
        ranks = shard.tensor.size
        self.width, self.scale = inventory.width, inventory.scale
        self.heads, self.kv_heads = inventory.heads // ranks, inventory.kv_heads // ranks
        self.qkv = ColumnParallelLinear(inventory.qkv, shard)
        self.out = RowParallelLinear(inventory.out, shard)
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        if inventory.head_norms:
            self.q_norm, self.k_norm = (RmsNorm(norm, shard) for norm in inventory.head_norms)

    def forward(self, x: torch.Tensor, where: Geometry, store: KeyValueStore | None = None) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same.

        Args:
            x: normalised hidden states.
            where: the tokens' geometry.
            store: keys and values so far (generation).
        """
        heads, kv_heads = self.heads, self.kv_heads
        parts = self.qkv(x).split([(heads + kv_heads) * self.width, kv_heads * self.width], dim=1)
        qk = self._queries_and_keys(parts[0], where)
        v = parts[1].view(-1, kv_heads, self.width)
        return self.out(self._core(qk, v, where, store))

    @recomputable
    def _queries_and_keys(self, qk: torch.Tensor, where: Geometry) -> torch.Tensor:
        """``[tokens, heads + key/value heads, width]``, normalised and rotated; else a view of ``qk``."""
        heads, kv_heads = self.heads, self.kv_heads
        qk = qk.view(-1, heads + kv_heads, self.width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([heads, kv_heads], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if where.cos is not None and where.sin is not None:
            qk = rotate(qk, where.cos, where.sin, self.compiled)
        return qk

    def _core(
        self, qk: torch.Tensor, v: torch.Tensor, where: Geometry, store: KeyValueStore | None
    ) -> torch.Tensor:
        """``[tokens, this rank's heads * width]``."""
        q, k = qk.split([self.heads, self.kv_heads], dim=1)
        if where.queries is None:
            return _attend(q, k, v, where, store, self.scale)
        length = len(q) // where.sequences
        bounds = where.documents or range(0, len(q) + 1, length)
        return dropped_attention(q, k, v, bounds, length, where.queries, self.dropper, self.scale)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: Geometry,
    store: KeyValueStore | None,
    scale: float,
) -> torch.Tensor:
    """Causal attention of ``[tokens, heads, width]`` inside each sequence or document; ``[tokens, all]``."""
    if where.documents is None:
        return _attend_sequences(q, k, v, where.sequences, store, scale)
    # One call per document: no mask to build, and no arithmetic between documents.
    lengths = [end - begin for begin, end in zip(where.documents, where.documents[1:])]
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths))
    return torch.cat([_attend_sequences(*part, 1, None, scale) for part in parts])


def _attend_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: int,
    store: KeyValueStore | None,
    scale: float,
) -> torch.Tensor:
    tokens = q.shape[0]
    q, k, v = (t.unflatten(0, (sequences, -1)).transpose(1, 2) for t in (q, k, v))
    causal = True
    if store is not None:
        k, v = store.extend(k, v)
        # A single new token may see everything stored.
        causal = q.shape[2] > 1
        if causal and q.shape[2] != k.shape[2]:
            raise ValueError("several tokens at once need an empty key/value store")
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(tokens, -1)
