"""Samples of one dataset, or of the part that ``data.split`` names: documents in random order, joined and cut
into pieces of equal length.

An epoch takes every document once, in an order drawn from (seed, source, epoch), joins them into one stream
of ``T`` tokens and cuts it: sample ``j`` is tokens ``j * sequence`` to ``(j + 1) * sequence``, both included,
the last being only the label of the one before and, as in Megatron, the first input of the next sample. There
are ``(T - 1) // sequence`` samples, taken in a second random order. The remainder that fills no sample is
dropped: every token but the last ``T - samples * sequence`` of the stream (1 to ``sequence`` of them; others
in each epoch) is an input exactly once.

Both orders are computed where they are needed (see :mod:`.order`). All that is stored is where each document
of the shuffled order begins in the stream (:class:`Stream`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from ..files import appearing_whole, written_once
from ..indexed import SMALL, IndexedDataset
from .order import permute

_CHUNK = 1 << 20
_THREADS = 8
_FORMAT = "hexad-stream-2"
"""Change it when the orders drawn from a seed change."""


class Stream:
    """The indexes of one dataset's epochs.

    Args:
        data: the dataset.
        key: of the order of documents, see :func:`document_order`.
        places: directories to store indexes in, the first that can be written.
        in_memory: number of documents up to which no file is created.
        patience: seconds to wait for another process that writes the file.
    """

    def __init__(
        self,
        data: IndexedDataset,
        key: tuple[int, int],
        places: Sequence[Path],
        in_memory: int,
        patience: float,
    ) -> None:
        self.data, self.key, self.places = data, key, places
        self.in_memory, self.patience = in_memory, patience

    def index(self, epoch: int) -> NDArray[np.int64]:
        """Where each document of an epoch's order begins, int64 ``[documents + 1]``, ending with the total.

        Raises:
            HexadError: the dataset is damaged, or its index cannot be stored or is not completed in time.
        """
        if self.data.documents > self.in_memory:
            return self._stored(epoch)
        self.data.verify()
        index = np.zeros(self.data.documents + 1, dtype=np.int64)
        for start in range(0, self.data.documents, _CHUNK):
            lengths = self._lengths(start, epoch)
            index[start + 1 : start + 1 + len(lengths)] = index[start] + np.cumsum(lengths)
        return index

    def _lengths(self, start: int, epoch: int) -> NDArray[np.int64]:
        """Tokens of the documents at some places of an epoch's order."""
        documents = self.data.documents
        places = np.arange(start, min(start + _CHUNK, documents))
        return self.data.tokens_in(document_order(places, documents, self.key, epoch))

    def _stored(self, epoch: int) -> NDArray[np.int64]:
        """The index from a file, which is created if it is missing."""
        words = (_FORMAT, self.data.identity(), *self.key, epoch)
        what = f"{self.data.prefix}: the index of {self.data.documents} documents"
        write = partial(self._write, epoch=epoch)
        return stored(words, self.places, self._mapped, write, self.patience, what)

    def _mapped(self, path: Path) -> NDArray[np.int64] | None:
        """The file's content if it is complete."""
        try:
            index: NDArray[Any] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        complete = index.shape == (self.data.documents + 1,) and index.dtype == np.int64
        return np.asarray(index) if complete and index[-1] == len(self.data.tokens) else None

    def _write(self, path: Path, epoch: int) -> None:
        self.data.verify()
        documents = self.data.documents
        threads = min(_THREADS, os.cpu_count() or 1)
        starts = range(0, documents, _CHUNK)
        with appearing_whole(path) as stream, ThreadPoolExecutor(threads) as pool:
            header = {"descr": "<i8", "fortran_order": False, "shape": (documents + 1,)}
            np.lib.format.write_array_header_1_0(stream, header)
            total = np.zeros(1, dtype="<i8")
            stream.write(total.tobytes())
            groups = (starts[first : first + 2 * threads] for first in range(0, len(starts), 2 * threads))
            lengths = (pool.map(lambda start: self._lengths(start, epoch), group) for group in groups)
            for each in chain.from_iterable(lengths):
                ends = total + np.cumsum(each)
                stream.write(ends.astype("<i8", copy=False).tobytes())
                total = ends[-1:]


def index_places(data: IndexedDataset, cache_dir: str | Path | None) -> list[Path]:
    """Directories for a dataset's indexes: beside it, else ``cache_dir`` (``data.cache_dir``)."""
    return [Path(f"{data.prefix}.cache"), *([Path(cache_dir)] if cache_dir is not None else [])]


def stored(
    words: tuple[object, ...],
    places: Sequence[Path],
    read: Callable[[Path], NDArray[np.int64] | None],
    write: Callable[[Path], None],
    patience: float,
    what: str,
) -> NDArray[np.int64]:
    """An index from a file, which one process per file system creates if it is missing.

    Args:
        words: all it depends on; the file's name is their hash.
        places: directories to store it in, the first that can be written.
        read: the content of a path if it is complete.
        write: creates a path.
        patience: seconds to wait for another process.
        what: it is, for messages.

    Raises:
        HexadError: it cannot be stored, or is not completed in time.
    """
    name = blake2b(repr(words).encode(), digest_size=16).hexdigest() + ".npy"
    for place in places:
        if (index := read(place / name)) is not None:
            return index
    problems = []
    for path in (place / name for place in places):
        try:
            return written_once(path, partial(read, path), partial(write, path), patience)
        except OSError as error:
            problems.append(f"{path.parent} ({error.strerror or error})")
    raise HexadError(
        f"{what} cannot be stored in {' or '.join(problems)}; make one of them writable (8 bytes per "
        "document and epoch)"
    )


def document_order(
    places: NDArray[np.int64], documents: int, key: tuple[int, int], epoch: int
) -> NDArray[np.int64]:
    """Which documents stand at some places of an epoch's order; ``key`` is (seed, source)."""
    return permute(places, documents, *key, epoch, "documents")


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
