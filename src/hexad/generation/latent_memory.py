"""Attention of some tokens of several sequences over paged latent vectors (multi-head latent attention),
those of the tokens before them included. What is kept of a token is one vector, the same on every tensor
rank. The methods that :mod:`hexad.parallel.attention_choice` chooses:

- ``SDPA``: the latent vectors that new tokens see are expanded to keys and values.
- ``ABSORBED``: queries are multiplied by what would make keys (DeepSeek-V2: arXiv 2405.04434, section 2.1.2),
  so that latent vectors themselves are keys and values, of one head that all query heads share; several
  sequences together.
- ``EXACT``: expanded, as training computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from hexad.comm import streams
from hexad.model.attention_kernels import AttentionKernel
from hexad.model.exact_attention import TokenRange, attend_run, on_grid
from hexad.model.positions import LatentHeads
from hexad.parallel.attention_choice import AttentionMethod, choose_attention
from hexad.parallel.pointwise import widened

from .paged_attention import Arrangement, Queries, alike, slots_of


class LatentMemory:
    """The latent vectors of one layer.

    Attributes:
        latents: ``[slots, width]``.
        exact: attention is computed in exact arithmetic.
    """

    exact = False

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.latents = torch.empty((slots, width), dtype=dtype, device=device)

    def attend(
        self,
        q: Tensor,
        latents: Tensor,
        arrangement: Arrangement,
        heads: LatentHeads,
        kernel: AttentionKernel,
    ) -> Tensor:
        """Keep new latent vectors, and compute attention over all that are kept.

        Args:
            q: ``[rows, heads, width]``.
            latents: ``[tokens of the batch, width]``.
            arrangement: where they are.
            heads: of the layer.
            kernel: the layer's.

        Returns:
            ``[rows, heads * value width]``; zeros for padding.
        """
        self.latents.index_copy_(0, arrangement.slots, latents)
        parts: list[Tensor] = []
        for alone, group in groupby(arrangement.queries, key=lambda queries: queries.tokens == 1):
            facts = kernel.cached_facts(q, q.device.type == "cpu", "latents", arrangement.end, alone)
            method = choose_attention(facts._replace(exact=self.exact))
            parts += self._computed(q, list(group), method, heads, kernel)
        rows = arrangement.queries[-1].rows[1] if arrangement.queries else 0
        if rows < arrangement.rows or not parts:
            parts.append(heads.joined(heads.padded(q.new_zeros((arrangement.rows - rows, *q.shape[1:])))))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _computed(
        self,
        q: Tensor,
        sequences: list[Queries],
        method: AttentionMethod,
        heads: LatentHeads,
        kernel: AttentionKernel,
    ) -> list[Tensor]:
        """The attention of neighbouring runs of rows."""
        if method is AttentionMethod.ABSORBED:
            groups = alike(sequences, self.latents.shape[1])
            return [self._absorbed(q, group, heads, kernel) for group in groups]
        compute = self._exactly if method is AttentionMethod.EXACT else self._expanded
        return [compute(q, queries, heads, kernel) for queries in sequences]

    def _expanded(self, q: Tensor, queries: Queries, heads: LatentHeads, kernel: AttentionKernel) -> Tensor:
        """Attention of several tokens, over keys and values of all heads."""
        limit = queries.end if kernel.window is None else kernel.window
        begin = max(queries.origin, queries.position + 1 - limit)
        k, v = heads.expanded(self._gathered(slots_of(queries, begin)))
        seen = None
        if begin < queries.position or limit < queries.end:
            position = torch.arange(queries.position, queries.end, device=q.device)[:, None]
            key = torch.arange(begin, queries.end, device=q.device)
            seen = (key <= position) & (key > position - limit)
        rows = heads.padded(q.narrow(0, queries.rows[0], queries.tokens))
        rows, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (rows, k, v))
        out = kernel.dense(rows, k, v, causal=seen is None, mask=seen)
        return heads.joined(out[0].transpose(0, 1))

    def _exactly(self, q: Tensor, queries: Queries, heads: LatentHeads, kernel: AttentionKernel) -> Tensor:
        """Attention of one or several tokens in exact arithmetic, over keys and values of all heads."""
        limit = queries.end if kernel.window is None else kernel.window
        begin = max(queries.origin, queries.position + 1 - limit)
        kept = on_grid(*heads.expanded(self._gathered(slots_of(queries, begin))))
        rows = heads.padded(q.narrow(0, queries.rows[0], queries.tokens)).contiguous()
        run = TokenRange(queries.position, begin, kernel.window)
        return heads.joined(attend_run(rows, kept, run, kernel.scale))

    def _absorbed(
        self, q: Tensor, sequences: Sequence[Queries], heads: LatentHeads, kernel: AttentionKernel
    ) -> Tensor:
        """Attention of neighbouring sequences' single tokens, over latent vectors."""
        seen = [
            queries.end - max(queries.origin, queries.end - (kernel.window or queries.end))
            for queries in sequences
        ]
        slots = np.empty((len(sequences), max(seen)), dtype=np.int64)
        for line, queries, count in zip(slots, sequences, seen):
            places = slots_of(queries, queries.end - count)
            line[:count], line[count:] = places, places[-1]  # of padding any that are numbers
        kept = self._gathered(slots.ravel()).unflatten(0, slots.shape)
        rows = heads.absorbed(q.narrow(0, sequences[0].rows[0], len(sequences)))
        scores = widened(torch.bmm(rows, kept.transpose(1, 2))) * kernel.scale
        if min(seen) < max(seen):
            counts = streams.of(q.device).moved(torch.tensor(seen), q.device)
            hidden = torch.arange(max(seen), device=q.device) >= counts[:, None]
            scores.masked_fill_(hidden[:, None], -torch.inf)
        weights = scores.softmax(-1).to(kept.dtype)
        return heads.restored(torch.bmm(weights, kept[..., : heads.kv_rank]))

    def _gathered(self, slots: np.ndarray) -> Tensor:
        device = self.latents.device
        return self.latents.index_select(0, streams.of(device).moved(torch.from_numpy(slots), device))


class ExactLatentMemory(LatentMemory):
    """Latent vectors in exact arithmetic: keys and values are those of training, to the last bit."""

    exact = True
