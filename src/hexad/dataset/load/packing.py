"""Which documents share a sample where none is cut: best-fit decreasing, computed on the lengths' histogram.

Documents are placed from the longest to the shortest, each into the sample with the least room in which it
fits (best-fit decreasing: at most 11/9 of the fewest possible samples and a few more, D. S. Johnson, 1974).
Only lengths matter, so that all documents of one length are placed at once (histogram packing, M. M. Krell et
al., arXiv 2107.02027): the work depends on the number of different lengths.

The number of samples follows from the lengths alone. It is the same in every epoch, and which documents of
equal length take which place is drawn anew in each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Placement(NamedTuple):
    """The next ``samples`` documents, all of one length, go to as many samples that have ``room`` tokens
    left, one into each; ``fresh`` samples are empty ones."""

    length: int
    samples: int
    room: int
    fresh: bool


def placements(histogram: NDArray[np.int64], capacity: int) -> Iterator[Placement]:
    """Best-fit decreasing of documents into samples.

    Args:
        histogram: ``[longest + 1]``, how many documents have each length; none is longer than ``capacity``.
        capacity: tokens of a sample.
    """
    room: dict[int, int] = defaultdict(int)  # room left -> samples that have it
    sizes: list[int] = []  # the rooms of which there are samples, ascending

    def leave(left: int, count: int) -> None:
        if left and count:
            if not room[left]:
                insort(sizes, left)
            room[left] += count

    for length in np.flatnonzero(histogram)[::-1].tolist():
        if not length:
            break
        waiting = int(histogram[length])
        while waiting and (at := bisect_left(sizes, length)) < len(sizes):
            best = sizes[at]
            count = min(waiting, room[best])
            yield Placement(length, count, best, False)
            waiting -= count
            room[best] -= count
            if not room[best]:
                del sizes[at]
            leave(best - length, count)
        # What fits nowhere fills new samples, one after another.
        each = capacity // length
        for samples, documents in ((waiting // each, each), (min(1, waiting % each), waiting % each)):
            for number in range(documents if samples else 0):
                yield Placement(length, samples, capacity - number * length, number == 0)
            leave(capacity - documents * length, samples)


def count_samples(histogram: NDArray[np.int64], capacity: int) -> int:
    """How many samples the documents fill."""
    return sum(placement.samples for placement in placements(histogram, capacity) if placement.fresh)


def assigned(histogram: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The sample of each document, int64 ``[documents of any length]``, from the longest document to the
    shortest."""
    found = np.empty(int(histogram[1:].sum()), dtype=np.int64)
    open_: dict[int, list[NDArray[np.int64]]] = defaultdict(list)  # room left -> samples
    samples = place = 0
    for length, count, room, fresh in placements(histogram, capacity):
        if fresh:
            taken = np.arange(samples, samples + count)
            samples += count
        else:
            taken = _take(open_[room], count)
        found[place : place + count] = taken
        place += count
        if room > length:
            open_[room - length].append(taken)
    return found


def _take(chunks: list[NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    """Remove and return the last ``count`` of some chunks."""
    parts = []
    while count:
        last = chunks.pop()
        if len(last) > count:
            chunks.append(last[:-count])
            last = last[-count:]
        parts.append(last)
        count -= len(last)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class PackingFacts:
    """How a dataset is packed into samples of whole documents.

    Attributes:
        samples: per epoch.
        documents: those that are in them.
        tokens: of these documents; the rest of the samples' positions is padding.
        too_long: documents longer than a sample.
        left_out: those of them that are not used.
        longest: tokens of the longest document.
        sequence: positions of a sample.
    """

    samples: int
    documents: int
    tokens: int
    too_long: int
    left_out: int
    longest: int
    sequence: int

    @property
    def efficiency(self) -> float:
        """Part of the positions that is not padding."""
        return self.tokens / max(1, self.samples * self.sequence)
