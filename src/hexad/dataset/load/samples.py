"""Samples of one dataset, or of the part that ``data.split`` names: documents in random order, joined and cut
into pieces of equal length.

An epoch takes every document once, in an order drawn from (seed, source, epoch), joins them into one stream
of ``T`` tokens and cuts it: sample ``j`` is tokens ``j * sequence`` to ``(j + 1) * sequence``, both included,
the last being only the label of the one before and, as in Megatron, the first input of the next sample. There
are ``(T - 1) // sequence`` samples, taken in a second random order. The remainder that fills no sample is
dropped: every token but the last ``T - samples * sequence`` of the stream (1 to ``sequence`` of them; others
in each epoch) is an input exactly once.

Both orders are computed where they are needed (see :mod:`.permutation`). All that is stored is where each
document of the shuffled order begins in the stream (see :mod:`.stream`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from ..indexed import SMALL, IndexedDataset
from .permutation import permute
from .stream import Stream, document_order, index_places


class DocumentPart(IndexedDataset):
    """The documents between two fractions of a dataset, rounded to complete documents as in Megatron-LM.

    Nothing is copied: tokens and index remain those of the complete dataset.

    Args:
        data: the complete dataset.
        begin, end: fractions of its documents, from 0 to 1.

    Raises:
        HexadError: there is no document, or no token, between them.
    """

    def __init__(self, data: IndexedDataset, begin: float, end: float) -> None:
        self._whole = data
        self.prefix, self.dtype = data.prefix, data.dtype
        self._first, last = (round(fraction * data.documents) for fraction in (begin, end))
        self._documents = last - self._first
        self._origin, stop = (int(each) for each in data.starts(np.array([self._first, last])))
        if stop <= self._origin:
            raise HexadError(
                f"{data.prefix}: data.split takes {self._documents} of its {data.documents} documents, which "
                f"have {stop - self._origin} tokens; give more data or another data.split"
            )
        self.tokens = data.tokens[self._origin : stop]
        self.mask = None if data.mask is None else data.mask.after(self._origin)

    @property
    def documents(self) -> int:
        return self._documents

    def verify(self) -> None:
        self._whole.verify()

    def identity(self) -> tuple[object, ...]:
        return (*self._whole.identity(), self._first, self._documents)

    def starts(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._whole.starts(documents + self._first) - self._origin

    def tokens_in(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._whole.tokens_in(documents + self._first)


def part_of(data: IndexedDataset, part: tuple[float, float] | None) -> IndexedDataset:
    """The documents between two fractions of a dataset; all of it for None."""
    return data if part is None else DocumentPart(data, *part)


class Samples(NamedTuple):
    """Some samples, each with one token more than it has inputs: the label of the last one.

    Attributes:
        tokens: int64 ``[n, sequence + 1]``.
        begins: bool of the same shape, where a document (or what pads a sample) begins.
        trained: bool of the same shape, which tokens have a loss as labels; None: all.
    """

    tokens: NDArray[np.int64]
    begins: NDArray[np.bool_]
    trained: NDArray[np.bool_] | None


class Source(ABC):
    """Random access to the samples of a dataset, over any number of epochs.

    Args:
        key: (seed, number of the dataset in a blend), of all orders.
        per_epoch: samples in an epoch.

    Attributes:
        isolated: whether the documents of a sample never see each other, whatever ``data.documents`` is.
    """

    isolated = False
    sequence: int

    def __init__(self, key: tuple[int, int], per_epoch: int) -> None:
        self._key, self.per_epoch = key, per_epoch
        self._indexes: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def prepare(self, sample: int) -> None:
        """Have the index that a sample needs.

        Raises:
            HexadError: the dataset is damaged, or its index cannot be stored or is not completed in time.
        """
        self._index(sample // self.per_epoch)

    def read(self, samples: NDArray[np.int64]) -> Samples:
        """Some samples.

        Args:
            samples: int64 ``[n]``, counted from 0 over all epochs.
        """
        epochs, numbers = np.divmod(samples, self.per_epoch)
        if len(samples) and (epochs == epochs[0]).all():
            return self._cut(int(epochs[0]), numbers)
        shape = (len(samples), self.sequence + 1)
        tokens, begins = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.bool_)
        trained = None
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            found = self._cut(int(epoch), numbers[rows])
            tokens[rows], begins[rows] = found.tokens, found.begins
            if found.trained is not None:
                trained = np.empty(shape, dtype=np.bool_) if trained is None else trained
                trained[rows] = found.trained
        return Samples(tokens, begins, trained)

    @abstractmethod
    def _cut(self, epoch: int, numbers: NDArray[np.int64]) -> Samples:
        """Samples of one epoch."""

    @abstractmethod
    def _make_index(self, epoch: int) -> NDArray[np.int64]:
        """What an epoch's samples are found by."""

    def _index(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._indexes:
            self._indexes[epoch] = self._make_index(epoch)
            # Two: a step may span the end of an epoch, and the next step is read ahead.
            while len(self._indexes) > 2:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(epoch)
        return self._indexes[epoch]


class SampleSource(Source):
    """The samples of a dataset whose documents are joined and cut.

    Args:
        data: the dataset.
        sequence: inputs per sample, in tokens.
        seed: of both orders.
        source: number of this dataset in a blend; another number, another order.
        cache_dir: where to keep indexes that are too large for memory if the data's own directory
            (``PREFIX.cache``) cannot be written.
        in_memory: number of documents up to which no file is created.
        patience: seconds to wait for another process that writes such an index.

    Attributes:
        per_epoch: samples in an epoch.

    Raises:
        HexadError: the dataset is too small for one sample.
    """

    def __init__(
        self,
        data: IndexedDataset,
        *,
        sequence: int,
        seed: int,
        source: int = 0,
        cache_dir: str | Path | None = None,
        in_memory: int = SMALL,
        patience: float = 600.0,
    ) -> None:
        self.data, self.sequence = data, sequence
        super().__init__((seed, source), (len(data.tokens) - 1) // sequence)
        if self.per_epoch < 1:
            raise HexadError(
                f"{data.prefix}: holds {len(data.tokens)} tokens, expected at least data.sequence + 1 = "
                f"{sequence + 1}; give more data or a smaller data.sequence"
            )
        places = index_places(data, cache_dir)
        self._stream = Stream(data, self._key, places, in_memory, patience)

    def _cut(self, epoch: int, numbers: NDArray[np.int64]) -> Samples:
        """Samples of one epoch, all gathered at once."""
        width = self.sequence + 1
        order = permute(numbers, self.per_epoch, *self._key, epoch, "samples")
        first = order * self.sequence
        stream = self._index(epoch)
        # Of documents that begin at one position all but the last are empty: side="right" finds that one.
        lowest = np.searchsorted(stream, first, side="right") - 1
        highest = np.searchsorted(stream, first + (width - 1), side="right") - 1
        counts = highest - lowest + 1
        rows = np.repeat(np.arange(len(first)), counts)
        documents = ranges(lowest, counts)
        begin = stream[documents]
        low = np.maximum(begin, first[rows])
        high = np.minimum(stream[documents + 1], first[rows] + width)
        filled = high > low
        rows, documents, begin, low, high = (a[filled] for a in (rows, documents, begin, low, high))
        shuffled = document_order(documents, self.data.documents, self._key, epoch)
        origin = self.data.starts(shuffled) + (low - begin)
        lengths = high - low
        positions = ranges(origin, lengths)
        tokens = self.data.tokens[positions].astype(np.int64)
        begins = np.zeros(len(tokens), dtype=np.bool_)
        target = rows * width + (low - first[rows])
        begins[target[low == begin]] = True
        trained = None if self.data.mask is None else self.data.mask.at(positions).reshape(-1, width)
        return Samples(tokens.reshape(-1, width), begins.reshape(-1, width), trained)

    def _make_index(self, epoch: int) -> NDArray[np.int64]:
        """Where each document of an epoch's order begins in its stream, int64 ``[documents + 1]``."""
        return self._stream.index(epoch)


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``start .. start + count - 1`` of each pair, one after another, int64 ``[sum(counts)]``."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
