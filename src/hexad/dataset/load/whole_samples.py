"""Samples of whole documents: none is cut, each is isolated, the rest of a sample is padding without loss.

Documents are placed from the longest to the shortest, each into the sample with the least room in which it
fits (best-fit decreasing: at most 11/9 of the fewest possible samples and a few more, D. S. Johnson, 1974).
Only lengths matter, so that all documents of one length are placed at once (histogram packing, M. M. Krell et
al., arXiv 2107.02027): the work depends on the number of different lengths.

The number of samples follows from the lengths alone. It is the same in every epoch, and which documents of
equal length take which place is drawn anew in each.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from ..indexed import IndexedDataset
from .order import permute
from .samples import OrderSettings, Samples, SampleSource, Source, document_order, ranges


class Placement(NamedTuple):
    """The next ``samples`` documents, all of one length, go to as many samples that have ``room`` tokens
    left, one into each; ``fresh`` samples are empty ones."""

    length: int
    samples: int
    room: int
    fresh: bool


def placements(histogram: NDArray[np.int64], capacity: int) -> Iterator[Placement]:
    """Best-fit decreasing of documents into samples of ``capacity`` tokens. ``histogram``, ``[longest + 1]``:
    how many documents have each length; none is longer than a sample. Of equal documents, all samples with
    the least room get one before any gets a second."""
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
        per_sample = capacity // length
        for samples, documents in (
            (waiting // per_sample, per_sample),
            (min(1, waiting % per_sample), waiting % per_sample),
        ):
            for number in range(documents if samples else 0):
                yield Placement(length, samples, capacity - number * length, number == 0)
            leave(capacity - documents * length, samples)


def assigned(histogram: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The sample of each document, int64 ``[documents of any length]``, from the longest document to the
    shortest."""
    sample_of = np.empty(int(histogram[1:].sum()), dtype=np.int64)
    open_: dict[int, list[NDArray[np.int64]]] = defaultdict(list)  # room left -> samples
    samples = place = 0
    for length, count, room, fresh in placements(histogram, capacity):
        if fresh:
            taken = np.arange(samples, samples + count)
            samples += count
        else:
            taken = _take(open_[room], count)
        sample_of[place : place + count] = taken
        place += count
        if room > length:
            open_[room - length].append(taken)
    return sample_of


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


Packing = Literal["auto", "cut", "whole"]
TooLong = Literal["refuse", "truncate", "skip"]

PADDING = 0
"""Token id of what fills a sample; it is no target, and no document attends to it."""
_CHUNK = 1 << 22
_FORMAT = "hexad-whole-1"
"""Change it when the packing or the orders drawn from a seed change."""


class WholeSamples(Source):
    """Random access to the samples of whole documents of a dataset, over any number of epochs.

    Args:
        sequence: positions of a sample, in tokens. A document takes as many as it has tokens; its last one
            has no target.
        too_long: what to do with documents longer than that: ``refuse`` the data, ``truncate`` them to their
            first ``sequence`` tokens, or ``skip`` them.
        order: see :class:`~.samples.OrderSettings`.

    Raises:
        HexadError: documents are too long, or nothing is left.
    """

    isolated = True

    def __init__(
        self,
        data: IndexedDataset,
        *,
        sequence: int,
        too_long: TooLong = "refuse",
        **order: Unpack[OrderSettings],
    ) -> None:
        self.too_long = too_long
        self._histogram, self.facts = packing_facts(data, sequence, too_long)
        if too_long == "refuse" and self.facts.too_long:
            raise HexadError(
                f"{data.prefix}: {self.facts.too_long:,} of {data.documents:,} documents are longer than "
                f"data.sequence {sequence}, the longest has {self.facts.longest:,} tokens; raise it, or set "
                "data.too_long to truncate or skip (data.packing: cut divides documents among samples)"
            )
        if not self.facts.samples:
            raise HexadError(f"{data.prefix}: no document is left (data.too_long: {too_long})")
        size, words = self.facts.samples + 1 + self.facts.documents, (_FORMAT, sequence, too_long)
        super().__init__(data, sequence, self.facts.samples, size, words, **order)

    @cached_property
    def _slots(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(places in the order from the longest document to the shortest, by sample; where each sample's
        begin among them, and the end)."""
        samples = assigned(self._histogram, self.sequence)
        ends = np.cumsum(np.bincount(samples, minlength=self.per_epoch))
        return np.argsort(samples, kind="stable"), np.concatenate([[0], ends])

    def _parts(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        """``per_epoch + 1`` places where samples begin, then the documents of all samples in order."""
        documents = self.data.documents
        self.data.verify()
        order = document_order(np.arange(documents), documents, self._key, epoch)
        lengths = _positions(self.data, order, self.sequence, self.too_long)
        used = np.flatnonzero(lengths)
        # The longest first; among equals the order of the epoch.
        order = order[used][np.argsort(-lengths[used], kind="stable")]
        slots, begins = self._slots
        yield from (begins, order[slots])

    def _cut(self, epoch: int, numbers: NDArray[np.int64]) -> Samples:
        """Samples of one epoch, all gathered at once."""
        width = self.sequence + 1
        index = self._index(epoch)
        order = permute(numbers, self.per_epoch, *self._key, epoch, "samples")
        counts = index[order + 1] - index[order]
        documents = index[self.per_epoch + 1 + ranges(index[order], counts)]
        lengths = _positions(self.data, documents, self.sequence, self.too_long)
        # Where each document begins in its sample: the lengths before it, less those of earlier samples.
        ends = np.cumsum(lengths)
        firsts = np.cumsum(counts) - counts
        inside = ends - lengths - np.repeat((ends - lengths)[firsts], counts)
        begin = np.repeat(np.arange(len(numbers)), counts) * width + inside
        target, origin = ranges(begin, lengths), ranges(self.data.starts(documents), lengths)
        tokens = np.full(len(numbers) * width, PADDING, dtype=np.int64)
        begins = np.zeros(len(tokens), dtype=np.bool_)
        trained = np.zeros(len(tokens), dtype=np.bool_)
        tokens[target] = self.data.tokens[origin]
        trained[target] = True if self.data.mask is None else self.data.mask.at(origin)
        begins[begin] = True
        filled = np.add.reduceat(lengths, firsts)
        # The padding begins a document too, as does the label after a sample that is full.
        begins[np.arange(len(numbers)) * width + filled] = True
        shape = (len(numbers), width)
        return Samples(tokens.reshape(shape), begins.reshape(shape), trained.reshape(shape))


def source_of(
    data: IndexedDataset, packing: Packing, sequence: int, too_long: TooLong, **order: Unpack[OrderSettings]
) -> Source:
    """The samples of a dataset by ``data.packing``; they are made when they are read.

    Raises:
        HexadError: as for :class:`~hexad.dataset.load.samples.SampleSource` and :class:`WholeSamples`.
    """
    if packing == "whole" or (packing == "auto" and data.mask is not None):
        return WholeSamples(data, sequence=sequence, too_long=too_long, **order)
    return SampleSource(data, sequence=sequence, **order)


def _positions(
    data: IndexedDataset, documents: NDArray[np.int64], sequence: int, too_long: TooLong
) -> NDArray[np.int64]:
    """The positions of a sample that documents take; 0: none. A document that is cut before its first trained
    token takes none: a batch of such documents would have nothing to learn."""
    lengths = data.tokens_in(documents)
    positions = np.where(lengths > sequence, 0 if too_long == "skip" else sequence, lengths)
    if too_long == "truncate" and data.mask is not None:
        for number in np.flatnonzero(lengths > sequence):
            first = int(data.starts(documents[number : number + 1])[0])
            if not data.mask.at(np.arange(first + 1, first + sequence)).any():
                positions[number] = 0
    return positions


def packing_facts(
    data: IndexedDataset, sequence: int, too_long: TooLong
) -> tuple[NDArray[np.int64], PackingFacts]:
    """(how many documents take each number of positions, how they are packed)."""
    histogram = np.zeros(sequence + 1, dtype=np.int64)
    longer = longest = empty = 0
    for start in range(0, data.documents, _CHUNK):
        documents = np.arange(start, min(start + _CHUNK, data.documents))
        lengths, positions = data.tokens_in(documents), _positions(data, documents, sequence, too_long)
        longer, longest = longer + int((lengths > sequence).sum()), max(longest, int(lengths.max()))
        empty += int(((lengths > sequence) & (positions == 0)).sum())
        histogram += np.bincount(positions, minlength=sequence + 1)
    histogram[0] = 0
    return histogram, PackingFacts(
        samples=sum(placed.samples for placed in placements(histogram, sequence) if placed.fresh),
        documents=int(histogram.sum()),
        tokens=int((histogram * np.arange(sequence + 1)).sum()),
        too_long=longer,
        left_out=empty,
        longest=longest,
        sequence=sequence,
    )
