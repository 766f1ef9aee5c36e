"""Division of documents of any lengths among context ranks: as many tokens and as much work for each. No
torch.

Pieces change places between ranks until work is even, such that few keys more must be sent. Of a document, a
rank needs all keys before the end of its last piece. What all ranks receive is therefore, but for a constant,
the sum of these ends over ranks and documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .slice import TokenRun

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class BalancePieces(NamedTuple):
    """The tokens in pieces, in their order.

    Attributes:
        size: tokens of each.
        work: keys that its queries see.
        document: number of the document of its first token.
        end: where its part of that document ends, from the document's beginning.
    """

    size: Ints
    work: Floats
    document: Ints
    end: Ints

    @classmethod
    def of(cls, bounds: Ints, cuts: Ints, work: Floats) -> BalancePieces:
        """Pieces of tokens cut at ``cuts``, with documents that begin at ``bounds``."""
        document = np.searchsorted(bounds, cuts[:-1], side="right") - 1
        end = np.minimum(cuts[1:], bounds[document + 1]) - bounds[document]
        return cls(np.diff(cuts), work, np.unique(document, return_inverse=True)[1], end)


def levelled(owner: Ints, pieces: BalancePieces, ranks: int, tolerance: float, most: int) -> Ints | None:
    """The ranks of pieces after swaps between the rank whose work differs most from the mean and others,
    until none differs by more than ``tolerance``; None where ``most`` swaps are not enough."""
    owner = owner.copy()
    loads: Floats = np.bincount(owner, pieces.work, minlength=ranks).astype(np.float64)
    mean = float(loads.mean())
    for _ in range(most):
        if abs(loads - mean).max() <= tolerance * mean:
            return owner
        swap = _best_swap(owner, pieces, loads, tolerance)
        if swap is None:
            return None
        first, second = swap
        moved = pieces.work[first] - pieces.work[second]
        loads[owner[first]] -= moved
        loads[owner[second]] += moved
        owner[first], owner[second] = owner[second], owner[first]
    return None


def _best_swap(owner: Ints, pieces: BalancePieces, loads: Floats, tolerance: float) -> tuple[int, int] | None:
    """A piece of the rank whose work differs most from the mean and one of another rank: the fewest keys to
    send for the work that then is where it should be. A swap costs a piece's keys more, so that few large
    ones are preferred."""
    mean = loads.mean()

    def beyond(load: Floats) -> Floats:
        return np.maximum(abs(load - mean) - tolerance * mean, 0.0)

    worst = int(abs(loads - mean).argmax())
    mine, others = np.flatnonzero(owner == worst), np.flatnonzero(owner != worst)
    moved = pieces.work[mine][:, None] - pieces.work[others]
    theirs = loads[owner[others]]
    gain = beyond(loads[worst : worst + 1]) + beyond(theirs)
    gain = gain - beyond(loads[worst] - moved) - beyond(theirs + moved)
    possible = (gain > 1e-9 * mean) & (pieces.size[mine][:, None] == pieces.size[others])
    if not possible.any():
        return None
    change = _Change(owner, pieces, len(loads))
    cost = change(mine[:, None], others[None]) + change(others[None], mine[:, None])
    cost = np.maximum(cost + int(pieces.size[0]), 1)
    score = np.where(possible, cost / np.where(possible, gain, 1.0), np.inf)
    row, column = divmod(int(score.argmin()), len(others))
    return int(mine[row]), int(others[column])


class _Change:
    """The change in the number of keys that a piece's rank needs if it swaps the piece for another one."""

    def __init__(self, owner: Ints, pieces: BalancePieces, ranks: int) -> None:
        self._owner, self._document, self._end = owner, pieces.document, pieces.end
        self._last = np.zeros((ranks, int(pieces.document.max()) + 1), dtype=np.int64)
        self._last[owner, pieces.document] = pieces.end  # of several the last one's
        earlier = self._last[owner, pieces.document] != pieces.end
        second = np.zeros_like(self._last)
        second[owner[earlier], pieces.document[earlier]] = pieces.end[earlier]
        here = owner, pieces.document
        self._without = np.where(earlier, self._last[here], second[here])

    def __call__(self, lost: Ints, gained: Ints) -> Ints:
        rank = self._owner[lost]
        same = self._document[lost] == self._document[gained]
        less = self._without[lost] - self._last[rank, self._document[lost]]
        before = self._last[rank, self._document[gained]]
        kept = np.where(same, self._without[lost], before)
        return np.where(same, 0, less) + np.maximum(self._end[gained], kept) - before


TOLERANCE = 0.04
"""Part by which the work of a rank may differ from the mean before tokens are divided more finely."""
_MOST_PIECES = 1 << 14
"""Pieces of a microbatch at most."""
_ALIKE = (np.inf, 1.0, 0.5, 0.25, 0.1, 0.0)
"""Pieces whose work differs by less than this, of the mean, may be swapped."""
_SWAPPED = (2.0, 1.0)
"""Likewise for divisions that are too uneven without swaps."""
_SWAPPED_PIECES = 8
"""Pieces of a rank that may be swapped."""
_MOST_SWAPS = 128
"""Swaps at most; each takes some 50 us."""
_FEWER = 0.9
"""Swaps trade even work for messages: they must leave less than this part of the tokens to receive."""


def work_before(bounds: Sequence[int], tokens: Ints, window: int | None) -> Floats:
    """Keys that all queries before each of the ``tokens`` see: a query sees those of its document up to
    itself, and no more than ``window``."""
    starts = np.asarray(bounds, dtype=np.int64)
    totals = np.concatenate(([0.0], np.cumsum(_seen(np.diff(starts), window))))
    document = np.searchsorted(starts, tokens, side="right") - 1
    return totals[document] + _seen(tokens - starts[document], window)


def _seen(tokens: Ints, window: int | None) -> Floats:
    """Keys that the first ``tokens`` queries of a document see."""
    count = tokens.astype(np.float64)
    if window is None:
        return count * (count + 1) / 2
    first = np.minimum(count, window)
    return first * (first + 1) / 2 + (count - first) * window


def work_of(bounds: Sequence[int], runs: Sequence[TokenRun], window: int | None = None) -> float:
    """Keys that the queries of some runs see."""
    ends = np.asarray(runs, dtype=np.int64).reshape(-1, 2)
    before = work_before(bounds, ends.reshape(-1), window).reshape(-1, 2)
    return float((before[:, 1] - before[:, 0]).sum())


def by_work(bounds: Sequence[int], ranks: int, window: int | None = None) -> list[list[TokenRun]]:
    """Every rank gets as many tokens, and attention work as even as :data:`TOLERANCE` says, or as even as
    :data:`_MOST_PIECES` pieces allow.

    The tokens are cut into pieces of one size (or two sizes, one token apart), the same number for every
    rank. In the order of their work, pieces are dealt in rounds: of each round, the rank with the least work
    so far gets the largest. Pieces of similar work are then swapped, so that neighbours come to one rank and
    less must be sent. Few pieces are tried before many; of the divisions that are even enough, the one with
    the fewest keys to send is taken. It is compared with divisions that leave more neighbours together and
    become even by single swaps (:mod:`hexad.parallel.context.balance`).

    Args:
        bounds: where documents begin, and the total, a multiple of ``ranks``.
        ranks: to divide among.
        window: keys that a query sees; None for all before it.

    Returns:
        the runs of each rank, ascending.
    """
    dealt = _by_dealing(bounds, ranks, window)
    most = _FEWER * sum(received(bounds, run, window) for run in dealt)
    swapped = [swap for swap in _by_swaps(bounds, ranks, window) if swap[0] < most] if most else []
    return min(swapped)[1] if swapped else dealt


def _by_dealing(bounds: Sequence[int], ranks: int, window: int | None) -> list[list[TokenRun]]:
    tokens = bounds[-1]
    pieces, best = 1, None
    while True:
        cuts = tokens * np.arange(ranks * pieces + 1, dtype=np.int64) // (ranks * pieces)
        work = np.diff(work_before(bounds, cuts, window))
        owners = [_dealt(work, np.diff(cuts), ranks, alike) for alike in (_ALIKE if pieces > 1 else (0.0,))]
        divisions = [(_imbalance(work, owner, ranks), owner) for owner in owners]
        even = [owner for imbalance, owner in divisions if imbalance <= TOLERANCE]
        if even:
            candidates = [_runs(cuts, owner, ranks) for owner in even]
            return min(candidates, key=lambda runs: sum(received(bounds, run, window) for run in runs))
        imbalance, owner = min(divisions, key=lambda division: division[0])
        if best is None or imbalance < best[0]:
            best = imbalance, _runs(cuts, owner, ranks)
        if pieces == tokens // ranks or 2 * pieces * ranks > _MOST_PIECES:
            return best[1]
        pieces = min(2 * pieces, tokens // ranks)


def _by_swaps(
    bounds: Sequence[int], ranks: int, window: int | None
) -> Iterator[tuple[int, list[list[TokenRun]]]]:
    """Divisions with even work, and the tokens that their ranks receive."""
    tokens = bounds[-1]
    count = ranks * min(_SWAPPED_PIECES, tokens // ranks)
    cuts = tokens * np.arange(count + 1, dtype=np.int64) // count
    work = np.diff(work_before(bounds, cuts, window))
    pieces = BalancePieces.of(np.asarray(bounds, dtype=np.int64), cuts, work)
    for alike in _SWAPPED:
        start = _dealt(work, pieces.size, ranks, alike)
        owner = levelled(start, pieces, ranks, TOLERANCE, _MOST_SWAPS)
        if owner is not None:
            runs = _runs(cuts, owner, ranks)
            yield sum(received(bounds, run, window) for run in runs), runs


def _dealt(work: Floats, sizes: Ints, ranks: int, alike: float) -> Ints:
    """The rank of every piece."""
    owner = np.empty(len(work), dtype=np.int64)
    loads = np.zeros(ranks)
    for size in np.unique(sizes)[::-1]:
        pieces = np.flatnonzero(sizes == size)
        pieces = pieces[np.argsort(-work[pieces], kind="stable")]
        for dealt in pieces.reshape(-1, ranks):
            order = np.argsort(loads, kind="stable")
            owner[dealt] = order
            loads[order] += work[dealt]
        if alike:
            width = alike * work.mean()
            kinds = np.zeros(len(pieces)) if np.isinf(width) else np.floor(work[pieces] / width)
            for kind in np.unique(kinds):
                members = pieces[kinds == kind]
                owner[np.sort(members)] = np.sort(owner[members])
    return owner


def _imbalance(work: Floats, owner: Ints, ranks: int) -> float:
    loads = np.bincount(owner, work, minlength=ranks)
    return float(abs(loads / loads.mean() - 1).max())


def _runs(cuts: Ints, owner: Ints, ranks: int) -> list[list[TokenRun]]:
    """The runs of each rank, those that touch joined."""
    changes = np.concatenate(([0], np.flatnonzero(np.diff(owner)) + 1, [len(owner)]))
    runs: list[list[TokenRun]] = [[] for _ in range(ranks)]
    for first, last in pairwise(changes.tolist()):
        runs[owner[first]].append((int(cuts[first]), int(cuts[last])))
    return runs


def received(bounds: Sequence[int], runs: Sequence[TokenRun], window: int | None = None) -> int:
    """Tokens of other ranks whose keys the queries of some ascending runs need."""
    starts = np.asarray(bounds, dtype=np.int64)
    firsts = np.asarray([begin for begin, _ in runs], dtype=np.int64)
    begins = starts[np.searchsorted(starts, firsts, side="right") - 1]  # of each run's first document
    if window is not None:
        begins = np.maximum(begins, firsts - window + 1)
    needed, before = 0, 0  # from the end of the run before on, keys are another rank's
    for (begin, end), first in zip(runs, begins.tolist()):
        needed += begin - min(begin, max(before, first))
        before = end
    return needed
