"""Attention in ``precision.exact``: a query's result is the same bits whichever tokens are computed beside
it, whether keys come from a cache, and however tokens and heads are divided over ranks.

Scores and weighted sums are products of :mod:`hexad.parallel.exact`. Keys are rounded once, before they are
kept; queries that share a key head are rows of one product; scores exist for a few queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hexad.comm import all_gather
from hexad.parallel import exact
from hexad.parallel.context.exchange import numbers_of
from hexad.parallel.context.rounds import segments
from hexad.parallel.context.slice import Slice
from hexad.parallel.exact_inventory import Blocks, blocks, parts_of
from hexad.topology.mesh import Axis

_WEIGHT_UNIT = 2.0**-31
"""The unit of the exponentials of scores, of which the highest is 1: no query sees ``2^22`` keys."""


class RoundedKeys(NamedTuple):
    """Keys and values as attention uses them, rounded relative to the largest element of each token and head;
    in their format, which has all digits that remain.

    Attributes:
        keys: ``[..., width]``.
        values: ``[..., width]``, divided by ``tops``.
        tops: float32 ``[...]``, powers of two: of the largest element of each value.
    """

    keys: Tensor
    values: Tensor
    tops: Tensor

    def part(self, *index: slice | None) -> RoundedKeys:
        """The keys and values at an index."""
        return RoundedKeys(*(tensor[index] for tensor in self))


def on_grid(k: Tensor, v: Tensor) -> RoundedKeys:
    """Round keys and values ``[tokens, key/value heads, width]``."""

    def rounded_keys(part: Tensor) -> Tensor:
        wide = part.double()
        return exact.rounded(wide, exact.top(wide) * 2.0 ** (1 - _score_digits(part))).to(part.dtype)

    def relative_values(part: Tensor, tops: Tensor) -> Tensor:
        return exact.rounded(part.double() / tops, 2.0 ** (1 - _value_digits(part.dtype))).to(part.dtype)

    tops = exact.top(v)
    # A value of zeros has any.
    tops = torch.where(tops == 0, 2.0**-100, tops)
    keys, values = exact.by_rows(rounded_keys, k), exact.by_rows(relative_values, v, tops)
    return RoundedKeys(keys, values, tops.squeeze(-1).float())


def _score_digits(k: Tensor) -> int:
    """Binary digits of queries and keys."""
    return (exact.DIGITS - exact.digits_of(k.shape[-1])) // 2


def _value_digits(dtype: torch.dtype) -> int:
    return 24 if dtype == torch.float32 else 16


class Visible(NamedTuple):
    """The keys that queries see.

    Attributes:
        begin, end: int64 ``[sequences, queries]``: places of the first, and after the last.
        keys: the number of those that a query sees.
        complete: whether every query sees all.
    """

    begin: Tensor
    end: Tensor
    keys: Tensor
    complete: bool

    def hidden(self, keys: int) -> Tensor | None:
        """float32 ``[sequences, queries, keys]``, -inf where a query does not see a key; None: all see
        all."""
        if self.complete:
            return None
        places = torch.arange(keys, device=self.begin.device)
        hidden = (places < self.begin[..., None]) | (places >= self.end[..., None])
        return torch.zeros(hidden.shape, device=places.device).masked_fill_(hidden, -torch.inf)

    def units(self, digits: int) -> Tensor:
        """float64 ``[sequences, queries]``: ``2^-n`` for weights of ``n`` digits, where values have so
        many."""
        # The least power of two that is not below the number of keys.
        count = exact.power((2 * self.keys - 1).double())
        return (count * 2.0 ** (digits + 1 - exact.DIGITS)).clamp(min=2.0**-exact.MOST_DIGITS)


class Wide(NamedTuple):
    """Keys and values in float64, as products read them.

    Attributes:
        keys, values: ``[sequences * key/value heads, keys, width]``.
        tops: float32 ``[sequences * key/value heads, keys]``.
    """

    keys: Tensor
    values: Tensor
    tops: Tensor

    @classmethod
    def of(cls, kept: RoundedKeys) -> Wide:
        """Convert the keys and values of some sequences, ``[sequences, keys, key/value heads, ...]``."""
        keys, values = (
            x.permute(0, 2, 1, 3).to(torch.float64, memory_format=torch.contiguous_format).flatten(0, 1)
            for x in kept[:2]
        )
        return cls(keys, values, kept.tops.permute(0, 2, 1).flatten(0, 1))


def attend(q: Tensor, kept: Wide, visible: Visible, scale: float) -> Tensor:
    """Attention of some sequences' queries.

    Args:
        q: ``[sequences, queries, heads, width]``.
        kept: of these sequences, and the key/value heads of these heads; finite.
        visible: which keys each query sees: at least one.
        scale: of the scores.

    Returns:
        ``[sequences, queries, heads, width]``.
    """
    (sequences, queries, heads, width), keys = q.shape, kept.keys.shape[1]
    groups = len(kept.keys) // sequences
    several = sequences, groups, heads // groups, queries
    # [sequences * groups, heads of a group * queries, ...]
    rows = (
        q.view(sequences, queries, groups, -1, width)
        .permute(0, 2, 3, 1, 4)
        .reshape(len(kept.keys), -1, width)
    )
    rows = exact.rounded(rows.double(), exact.top(rows) * 2.0 ** (1 - _score_digits(q)))
    scores = torch.bmm(rows, kept.keys.transpose(1, 2)).float().mul_(scale)
    hidden = visible.hidden(keys)
    if hidden is not None:
        scores.view(*several, keys).add_(hidden[:, None, None])
    weights = exact.exp(scores.sub_(scores.amax(-1, keepdim=True)))
    # Larger ones become multiples of larger units, which are multiples of this one too.
    weights = exact.rounded(weights, _WEIGHT_UNIT)
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    # Values are relative to their largest elements, which weights are multiplied by.
    weights.mul_(kept.tops[:, None])
    unit = visible.units(_value_digits(q.dtype))
    unit = unit[:, None, None, :, None].expand(*several, 1).reshape(len(weights), -1, 1)
    highest = exact.power(weights.amax(-1, keepdim=True).double())
    pieces = exact.split(weights, highest * (2 * unit), unit, parts_of(q.itemsize))
    out, *more = (torch.bmm(piece.double(), kept.values) for piece in pieces)
    for part in more:
        out += part
    out = (out / total).to(q.dtype)
    return out.view(*several, width).permute(0, 3, 1, 2, 4).flatten(2, 3)


class TokenRange(NamedTuple):
    """Consecutive tokens of a sequence whose attention is computed.

    Attributes:
        position: of the first.
        origin: position of the first key that there is.
        window: keys that a query sees; None: all before it.
    """

    position: int
    origin: int = 0
    window: int | None = None


def attend_run(q: Tensor, kept: RoundedKeys, run: TokenRange, scale: float) -> Tensor:
    """``q [tokens, heads, width]`` of a run, and ``kept [keys, ...]`` from :func:`on_grid`, up to those of
    the last token at least -> ``[tokens, heads, width]``."""
    kv_heads = kept.keys.shape[1]
    wide, heads, out = Wide.of(kept.part(None)), q.shape[1] // kv_heads, torch.empty_like(q)
    for begin, end, first, last in _tiles(len(q), heads, kv_heads, run, blocks(q.device.type == "cpu")):
        position = torch.arange(run.position + begin, run.position + end, device=q.device)[None]
        seen = position + 1 if run.window is None else (position + 1).clamp(max=run.window)
        low = run.origin if run.window is None else max(run.origin, run.position + begin + 1 - run.window)
        keys = slice(low - run.origin, run.position + end - run.origin)
        visible = Visible(position + 1 - seen - low, position + 1 - low, seen, end == begin + 1)
        query_heads, groups = slice(first * heads, last * heads), slice(first, last)
        part = Wide(wide.keys[groups, keys], wide.values[groups, keys], wide.tops[groups, keys])
        rows = q[None, begin:end, query_heads].contiguous()
        out[begin:end, query_heads] = attend(rows, part, visible, scale)[0]
    return out


def _tiles(
    tokens: int, heads: int, groups: int, run: TokenRange, sizes: Blocks
) -> Iterator[tuple[int, int, int, int]]:
    """Queries, first and end, and key/value heads with ``heads`` heads each, such that there are about
    :attr:`Blocks.scores`: of many queries, which share the work of a key, before several heads."""
    begin = 0
    while begin < tokens:
        seen = run.position + begin + 1
        keys = seen if run.window is None else min(seen, run.window)
        # The last of n queries sees n - 1 keys more than the first.
        queries = (math.isqrt(keys * keys + 4 * (sizes.scores // heads)) - keys) // 2
        end = min(tokens, begin + min(sizes.rows, max(1, queries)))
        several = max(1, sizes.scores // (heads * (keys + end - begin) * (end - begin)))
        for first in range(0, groups, several):
            yield begin, end, first, min(groups, first + several)
        begin = end


def attention(
    q: Tensor, k: Tensor, v: Tensor, slice_: Slice, axis: Axis, scale: float, window: int | None
) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks, which every rank receives.

    Args:
        q: ``[this rank's tokens, heads, width]``.
        k, v: ``[this rank's tokens, key/value heads, width]``.
        slice_: which rank of the axis holds which tokens.
        axis: of the ranks.
        scale: of the scores.
        window: keys that a query sees; None for all before it.

    Returns:
        ``[this rank's tokens, heads * width]``.
    """
    kept = on_grid(k, v)
    if axis.size > 1:
        order = None
        if not slice_.whole:
            numbers = torch.cat([numbers_of(slice_, rank) for rank in range(axis.size)])
            order = numbers.argsort().to(q.device)
        gathered = (all_gather(tensor.contiguous(), axis) for tensor in kept)
        kept = RoundedKeys(*(tensor if order is None else tensor[order] for tensor in gathered))
    outputs = []
    for segment in segments(slice_, axis.rank):
        start, rows = slice_.bounds[segment.document], segment.end - segment.begin
        run = TokenRange(segment.begin - start, 0, window)
        queries = q[segment.row : segment.row + rows]
        outputs.append(attend_run(queries, kept.part(slice(start, segment.end)), run, scale))
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).flatten(1)
