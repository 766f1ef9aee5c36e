"""Attention of some tokens of several sequences over paged keys, those of the tokens before them included.

- CPUs: PyTorch's flash attention, once for each run of keys that are neighbours, and once for a sequence's
  own new tokens; outputs are put together by their log-sum-exp. The query heads that share a key head are
  computed as so many queries of one head, so that each key is read once.
- GPUs, 16-bit formats: PyTorch's ``varlen_attn`` reads the blocks by their table, where its version can.
- Everything else: keys are gathered, and a call made for each sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hexad.parallel.context.attention import merge_

from .blocks import Run


class Queries(NamedTuple):
    """Consecutive tokens of one sequence whose attention this rank computes.

    Attributes:
        rows: theirs among the queries, first and end.
        place: the row of the first among the new keys.
        position: of the first in the sequence.
        runs: where the keys from position ``origin`` on are, up to those of the last one at least.
        origin: position of the first key.
    """

    rows: tuple[int, int]
    place: int
    position: int
    runs: tuple[Run, ...]
    origin: int

    @property
    def tokens(self) -> int:
        """How many tokens these are."""
        return self.rows[1] - self.rows[0]

    def before(self, begin: int, end: int) -> list[Run]:
        """Where the keys of positions from ``begin`` to ``end`` are."""
        found, at = [], self.origin
        for slot, tokens in self.runs:
            low, high = max(begin, at), min(end, at + tokens)
            if low < high:
                found.append(Run(slot + low - at, high - low))
            at += tokens
        return found


@dataclass(frozen=True, eq=False)
class Pages:
    """The cache of one layer, and its new keys.

    Attributes:
        keys, values: ``[slots, key/value heads, width]``.
        new_keys, new_values: those of the step's tokens, which are in the cache already.
    """

    keys: Tensor
    values: Tensor
    new_keys: Tensor
    new_values: Tensor


def over_runs(
    q: Tensor, pages: Pages, queries: Sequence[Queries], scale: float, window: int | None
) -> Tensor:
    """Attention on a CPU: ``[tokens, heads, width]`` -> the same; rows of no queries are zero."""
    out = torch.zeros_like(q)
    groups = pages.keys.shape[1]
    for one in queries:
        rows = slice(*one.rows)
        end = one.position + one.tokens
        if window is not None and end > window and one.tokens > 1:
            out[rows] = _windowed(q[rows], pages, one, scale, window)
            continue
        begin = one.origin if window is None else max(one.origin, end - window)
        if one.tokens == 1:
            # [1, key/value heads, heads of a group, width]
            grouped = q[rows].view(1, groups, -1, q.shape[2])
            parts = [_flash(grouped, *_keys(pages, run), scale) for run in one.before(begin, end)]
            out[rows] = _together(parts).reshape(1, *q.shape[1:])
            continue
        own = slice(one.place, one.place + one.tokens)
        mine = q[rows].transpose(0, 1).unsqueeze(0)
        parts = [_flash(mine, _batch(pages.new_keys[own]), _batch(pages.new_values[own]), scale, True)]
        parts += [_flash(mine, *_keys(pages, run), scale) for run in one.before(begin, one.position)]
        out[rows] = _together(parts)[0].transpose(0, 1)
    return out


def _keys(pages: Pages, run: Run) -> tuple[Tensor, Tensor]:
    slots = slice(run.slot, run.slot + run.tokens)
    return _batch(pages.keys[slots]), _batch(pages.values[slots])


def _batch(x: Tensor) -> Tensor:
    """``[tokens, heads, width]`` -> ``[1, heads, tokens, width]``."""
    return x.transpose(0, 1).unsqueeze(0)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output ``[1, heads, queries, width]`` and log-sum-exp ``[1, heads, queries]``; ``k`` and ``v`` may have
    fewer heads."""
    out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    return out


def _together(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The output over all keys of outputs over some."""
    out, lse = parts[0]
    if len(parts) > 1:
        wide = torch.promote_types(out.dtype, torch.float32)
        out, lse = out.to(wide), lse.to(wide).clone()
        for other, other_lse in parts[1:]:
            merge_(out, lse, other, other_lse)
    return out


def _windowed(q: Tensor, pages: Pages, one: Queries, scale: float, window: int) -> Tensor:
    """``[tokens, heads, width]`` of queries of which each sees ``window`` keys at most."""
    begin, end = max(one.origin, one.position + 1 - window), one.position + one.tokens
    k, v = _gathered(pages, one, begin, end)
    position = torch.arange(one.position, end, device=q.device)[:, None]
    key = torch.arange(begin, end, device=q.device)
    return _masked(q, k, v, (key <= position) & (key > position - window), scale)


def _gathered(pages: Pages, one: Queries, begin: int, end: int) -> tuple[Tensor, Tensor]:
    runs = one.before(begin, end)
    k, v = (
        torch.cat([cache[run.slot : run.slot + run.tokens] for run in runs])
        for cache in (pages.keys, pages.values)
    )
    return k, v


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """``[tokens, heads, width]`` of all three, with the keys that each query sees; None: all."""
    if (repeated := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(repeated, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(_batch(q), _batch(k), _batch(v), attn_mask=seen, scale=scale)
    return out[0].transpose(0, 1)


def gathered(q: Tensor, pages: Pages, queries: Sequence[Queries], scale: float, window: int | None) -> Tensor:
    """Attention on any device, a call for each sequence; as :func:`over_runs`."""
    out = torch.zeros_like(q)
    for one in queries:
        end = one.position + one.tokens
        rows = slice(*one.rows)
        limit = end if window is None else window
        begin = max(one.origin, one.position + 1 - limit)
        k, v = _gathered(pages, one, begin, end)
        seen = None
        if one.tokens > 1:
            position = torch.arange(one.position, end, device=q.device)[:, None]
            key = torch.arange(begin, end, device=q.device)
            seen = (key <= position) & (key > position - limit)
        out[rows] = _masked(q[rows], k, v, seen, scale)
    return out
