"""Attention in ``precision.exact``: a query's result is the same bits whichever tokens are computed beside
it, whether keys come from a cache, and however tokens and heads are divided over ranks.

Scores and weighted sums are products of :mod:`hexad.parallel.exact`. Keys are rounded once, before they are
kept; queries that share a key head are rows of one product; scores exist for a few queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hexad.comm import all_gather
from hexad.parallel import exact
from hexad.parallel.context.exchange import numbers_of
from hexad.parallel.context.rounds import segments
from hexad.parallel.context.slice import Slice
from hexad.topology.mesh import Axis

_SCORES = 1 << 18
"""Scores that exist at a time, in the processor's caches."""
_MOST_KEYS = 20
"""Of a query, as a power of two."""


def _value_digits(dtype: torch.dtype) -> int:
    return 24 if dtype == torch.float32 else 16


def on_grid(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[tokens, key/value heads, width]`` as attention uses them, rounded relative to the
    largest element of each token and head; in their format, which has all digits that remain."""
    digits = (exact.DIGITS - exact.digits_of(k.shape[-1])) // 2, _value_digits(v.dtype)
    grids = (exact.rounded(x.double(), exact.top(x) * 2.0 ** (1 - n)) for x, n in zip((k, v), digits))
    k, v = (grid.to(k.dtype) for grid in grids)
    return k, v


class Visible(NamedTuple):
    """Which keys queries see.

    Attributes:
        begin, end: int64 ``[sequences, queries]``: places of the first, and after the last.
        keys: the number of those that a query could see, in the cache or not.
    """

    begin: Tensor
    end: Tensor
    keys: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """Attention of some sequences' queries.

    Args:
        q: ``[sequences, queries, heads, width]``.
        k, v: from :func:`on_grid`, ``[sequences, keys, key/value heads, width]``; finite.
        visible: which keys each query sees: at least one.
        scale: of the scores.

    Returns:
        ``[sequences, queries, heads, width]``.
    """
    _, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    wide = q.double()
    digits = (exact.DIGITS - exact.digits_of(width)) // 2
    wide = exact.rounded(wide, exact.top(q) * 2.0 ** (1 - digits))
    # [sequences, groups, heads of a group * queries, width]
    wide = wide.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (wide @ k.double().permute(0, 2, 3, 1)).mul_(scale).float()
    places = torch.arange(keys, device=q.device)
    hidden = (places < visible.begin[..., None]) | (places >= visible.end[..., None])
    by_query = scores.unflatten(2, (-1, queries))
    by_query.masked_fill_(hidden[:, None, None], -torch.inf)
    weights = exact.exp(scores.sub_(scores.amax(-1, keepdim=True))).double()
    total = exact.row_sum(weights, 2.0 ** (_MOST_KEYS + 1 - exact.DIGITS))
    # Each value relative to its largest element, which its weight is multiplied by.
    tops = exact.top(v).permute(0, 2, 3, 1)  # [sequences, groups, 1, keys]
    values = v.double().permute(0, 2, 1, 3) / torch.where(tops == 0, 1.0, tops).transpose(2, 3)
    weights *= tops
    room = 2.0 ** (_value_digits(v.dtype) + 1 - exact.DIGITS)
    count = exact.power((2 * visible.keys - 1).double())  # the least power of two that is not below it
    count = (count * room)[:, None, None, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(2, 3)
    unit = exact.top(weights) * count * 2
    part = exact.rounded(weights, unit)
    out = part @ values
    if v.dtype == torch.float32:
        out += exact.rounded(weights.sub_(part), unit * count) @ values
    out = (out / total).to(q.dtype)
    return out.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


class Run(NamedTuple):
    """Neighbouring tokens of a sequence whose attention is computed.

    Attributes:
        position: of the first.
        origin: position of the first key that there is.
        window: keys that a query sees; None: all before it.
    """

    position: int
    origin: int = 0
    window: int | None = None


def attend_run(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float) -> Tensor:
    """``q [tokens, heads, width]`` of a run; ``k`` and ``v`` from :func:`on_grid`, ``[keys, key/value heads,
    width]``, up to those of the last token at least -> ``[tokens, heads, width]``."""
    outputs = []
    for begin, end in _tiles(q.shape[0], q.shape[1], run):
        position = torch.arange(run.position + begin, run.position + end, device=q.device)[None]
        seen = position + 1 if run.window is None else (position + 1).clamp(max=run.window)
        first = run.position + begin + 1
        low = max(run.origin, 0 if run.window is None else first - run.window)
        keys = slice(low - run.origin, run.position + end - run.origin)
        visible = Visible(position + 1 - seen - low, position + 1 - low, seen)
        outputs.append(attend(q[None, begin:end], k[None, keys], v[None, keys], visible, scale)[0])
    return torch.cat(outputs) if outputs else q


def _tiles(tokens: int, heads: int, run: Run) -> Iterator[tuple[int, int]]:
    """Runs of queries with about :data:`_SCORES` scores."""
    begin = 0
    while begin < tokens:
        keys = run.position + begin + 1
        rows = max(1, _SCORES // (heads * (keys if run.window is None else min(keys, run.window))))
        yield begin, (begin := min(tokens, begin + min(rows, 256)))


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
    k, v = on_grid(k, v)
    if axis.size > 1:
        both = all_gather(torch.cat((k, v), dim=1), axis)
        if not slice_.whole:
            numbers = torch.cat([numbers_of(slice_, rank) for rank in range(axis.size)])
            both = both[numbers.argsort().to(both.device)]
        k, v = both.chunk(2, dim=1)
    outputs = []
    for segment in segments(slice_, axis.rank):
        start, rows = slice_.bounds[segment.document], segment.end - segment.begin
        keys = slice(start, segment.end)
        run = Run(segment.begin - start, 0, window)
        outputs.append(attend_run(q[segment.row : segment.row + rows], k[keys], v[keys], run, scale))
    return torch.cat(outputs).flatten(1)
