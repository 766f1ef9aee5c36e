"""Pieces change places between ranks until work is even, such that few keys more must be sent. No torch.

Of a document, a rank needs all keys before the end of its last piece. What all ranks receive is therefore,
but for a constant, the sum of these ends over ranks and documents.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Pieces(NamedTuple):
    """The tokens in pieces, in their order.

    Attributes:
        size: tokens of each.
        work: keys that its queries see.
        document: number of the document of its first token.
        end: where its part of that document ends, from the document's beginning.
    """

    size: Ints
    work: NDArray[np.float64]
    document: Ints
    end: Ints

    @classmethod
    def of(cls, bounds: Ints, cuts: Ints, work: NDArray[np.float64]) -> Pieces:
        """Of tokens cut at ``cuts``, with documents that begin at ``bounds``."""
        document = np.searchsorted(bounds, cuts[:-1], side="right") - 1
        end = np.minimum(cuts[1:], bounds[document + 1]) - bounds[document]
        return cls(np.diff(cuts), work, np.unique(document, return_inverse=True)[1], end)


def levelled(owner: Ints, pieces: Pieces, ranks: int, tolerance: float, most: int) -> Ints | None:
    """The owners of pieces after swaps between the rank whose work differs most from the mean and others.

    Args:
        owner: the rank of every piece.
        pieces: their sizes and work.
        ranks: their number.
        tolerance: by how much the work of a rank may differ from the mean.
        most: swaps.

    Returns:
        None where so many swaps are not enough.
    """
    owner = owner.copy()
    loads: NDArray[np.float64] = np.bincount(owner, pieces.work, minlength=ranks).astype(np.float64)
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


def _best_swap(
    owner: Ints, pieces: Pieces, loads: NDArray[np.float64], tolerance: float
) -> tuple[int, int] | None:
    """A piece of the rank whose work differs most from the mean and one of another rank: the fewest keys to
    send for the work that then is where it should be. A swap costs a piece's keys more, so that few large
    ones are preferred."""
    mean = loads.mean()

    def beyond(load: NDArray[np.float64]) -> NDArray[np.float64]:
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
    """By how many keys the needs of a piece's rank change where it loses that piece and gets another one."""

    def __init__(self, owner: Ints, pieces: Pieces, ranks: int) -> None:
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
        changed: Ints = np.where(same, 0, less) + np.maximum(self._end[gained], kept) - before
        return changed
