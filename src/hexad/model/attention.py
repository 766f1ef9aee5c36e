"""Self-attention with grouped key/value heads, over this rank's heads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from hexad.config.schema import ModelSettings
from hexad.parallel.sharding import Placement
from hexad.parallel.tensor import ColumnParallelLinear, RowParallelLinear

from .dropout import Dropper, Site
from .dropped_attention import dropped_attention
from .norms import RmsNorm
from .ops import rotate
from .positions import Geometry
from .recompute import made_again


class KeyValueStore(Protocol):
    """Keeps one layer's keys and values between forward passes (generation)."""

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[sequences, heads, new, width]`` and return everything so far."""
        ...


class Attention(nn.Module):
    """Causal self-attention (Vaswani et al., arXiv 1706.03762; grouped queries: arXiv 2305.13245)."""

    def __init__(self, model: ModelSettings, place: Placement, layer: int) -> None:
        super().__init__()
        self.dropper = Dropper(model.attention_dropout, layer, Site.PROBABILITIES)
        ranks, kv_heads = place.axis.size, int(model.kv_heads)
        self.width = width = int(model.head_dim)
        self.heads, self.kv_heads = model.heads // ranks, kv_heads // ranks
        outputs = {"q": model.heads * width, "k": kv_heads * width, "v": kv_heads * width}
        self.qkv = ColumnParallelLinear(
            model.hidden, outputs, place, bias=bool(model.qkv_bias), std=model.init_std
        )
        self.out = RowParallelLinear(
            model.heads * width,
            model.hidden,
            place,
            bias=model.family == "gpt2",
            std=model.init_std / (2 * model.layers) ** 0.5,
        )
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        if model.qk_norm:
            # Every tensor rank normalises its own heads.
            self.q_norm = RmsNorm(width, model.norm_eps, place, partial=ranks > 1)
            self.k_norm = RmsNorm(width, model.norm_eps, place, partial=ranks > 1)

    def forward(
        self,
        x: torch.Tensor,
        where: Geometry,
        store: KeyValueStore | None = None,
        again: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same.

        Args:
            x: normalised hidden states.
            where: the tokens' geometry.
            store: keys and values so far (generation).
            again: makes ``x`` again; given where the layer recomputes selectively.
        """
        selective = again is not None
        with made_again(x, again) if again is not None else nullcontext():
            qkv = self.qkv(x)
        heads, kv_heads = self.heads, self.kv_heads
        parts = qkv.split([(heads + kv_heads) * self.width, kv_heads * self.width], dim=1)
        qk = self._queries_and_keys(parts[0], where)
        v = parts[1].view(-1, kv_heads, self.width)
        again = partial(self._queries_and_keys, parts[0].detach(), where)
        with made_again(qk, again) if selective else nullcontext():
            attended = self._core(qk, v, where, store)
        return self.out(attended)

    def _queries_and_keys(self, qk: torch.Tensor, where: Geometry) -> torch.Tensor:
        """``[tokens, heads + key/value heads, width]``, normalised and rotated; else a view of ``qk``."""
        heads, kv_heads = self.heads, self.kv_heads
        qk = qk.view(-1, heads + kv_heads, self.width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([heads, kv_heads], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if where.cos is not None and where.sin is not None:
            qk = rotate(qk, where.cos, where.sin)
        return qk

    def _core(
        self, qk: torch.Tensor, v: torch.Tensor, where: Geometry, store: KeyValueStore | None
    ) -> torch.Tensor:
        """``[tokens, this rank's heads * width]``."""
        q, k = qk.split([self.heads, self.kv_heads], dim=1)
        if where.queries is None:
            return _attend(q, k, v, where, store)
        length = len(q) // where.sequences
        bounds = where.documents or range(0, len(q) + 1, length)
        return dropped_attention(q, k, v, bounds, length, where.queries, self.dropper)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Geometry, store: KeyValueStore | None
) -> torch.Tensor:
    """Causal attention of ``[tokens, heads, width]`` inside each sequence or document; ``[tokens, all]``."""
    if where.documents is None:
        return _attend_sequences(q, k, v, where.sequences, store)
    # One call per document: no mask to build, and no arithmetic between documents.
    lengths = [end - begin for begin, end in zip(where.documents, where.documents[1:])]
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths))
    return torch.cat([_attend_sequences(*part, 1, None) for part in parts])


def _attend_sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: int, store: KeyValueStore | None
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
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).reshape(tokens, -1)
