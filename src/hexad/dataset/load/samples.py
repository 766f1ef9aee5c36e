"""Samples of one dataset, or of the part that ``data.split`` names: documents in random order, joined and cut
into pieces of equal length.

An epoch takes every document once, in an order drawn from (seed, source, epoch), joins them into one stream
of ``T`` tokens and cuts it: sample ``j`` is tokens ``j * sequence`` to ``(j + 1) * sequence``, both included,
the last being only the label of the one before and, as in Megatron, the first input of the next sample. There
are ``(T - 1) // sequence`` samples, taken in a second random order. The remainder that fills no sample is
dropped: every token but the last ``T - samples * sequence`` of the stream (1 to ``sequence`` of them; others
in each epoch) is an input exactly once.

Both orders are computed where they are needed (see :mod:`.order`). All that is stored is where each document
of the shuffled order begins in the stream.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Required, TypedDict, Unpack

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


def document_order(
    places: NDArray[np.int64], documents: int, key: tuple[int, int], epoch: int
) -> NDArray[np.int64]:
    """Numbers of the documents at some places of an epoch's order; ``key`` is (seed, source)."""
    return permute(places, documents, *key, epoch, "documents")


class Samples(NamedTuple):
    """Samples, each with one token more than it has inputs: the label of the last one.

    Attributes:
        tokens: int64 ``[n, sequence + 1]``.
        begins: bool of the same shape, where a document (or what pads a sample) begins.
        trained: bool of the same shape, which tokens have a loss as labels; None: all.
    """

    tokens: NDArray[np.int64]
    begins: NDArray[np.bool_]
    trained: NDArray[np.bool_] | None

    @classmethod
    def gather(
        cls, places: NDArray[np.integer[Any]], read: Callable[[int, NDArray[np.int64]], Samples]
    ) -> Samples:
        """Samples from several places, ``[n]``: those of each are read together, given their row numbers."""
        rows = {int(place): np.flatnonzero(places == place) for place in np.unique(places)}
        parts = [read(place, row_numbers) for place, row_numbers in rows.items()]
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(list(rows.values())))
        tokens, begins = (np.concatenate([part[of] for part in parts])[order] for of in (0, 1))
        if all(part.trained is None for part in parts):
            return cls(tokens, begins, None)
        trained = [np.ones_like(part.begins) if part.trained is None else part.trained for part in parts]
        return cls(tokens, begins, np.concatenate(trained)[order])


class OrderSettings(TypedDict, total=False):
    """Arguments that every :class:`Source` has: of its orders, and of its index.

    Attributes:
        seed: of all orders.
        source: number of the dataset in a blend; another number, another order.
        cache_dir: where to keep indexes that are too large for memory if the data's own directory
            (``PREFIX.cache``) cannot be written.
        in_memory: number of documents up to which no file is created.
        patience: seconds to wait for another process that writes such an index.
    """

    seed: Required[int]
    source: int
    cache_dir: str | Path | None
    in_memory: int
    patience: float


class Source(ABC):
    """Random access to the samples of a dataset, over any number of epochs.

    Args:
        sequence: inputs per sample, in tokens.
        per_epoch: samples in an epoch.
        size: entries of an epoch's index.
        words: what an index depends on, beside the data, the key of its order and the epoch.
        order: see :class:`OrderSettings`.

    Attributes:
        isolated: whether the documents of a sample are isolated, independent of ``data.documents``.
    """

    isolated = False

    def __init__(
        self,
        data: IndexedDataset,
        sequence: int,
        per_epoch: int,
        size: int,
        words: tuple[object, ...],
        **order: Unpack[OrderSettings],
    ) -> None:
        self.data, self.sequence, self.per_epoch = data, sequence, per_epoch
        self._size, self._words, self._key = size, words, (order["seed"], order.get("source", 0))
        self._in_memory, self._patience = order.get("in_memory", SMALL), order.get("patience", 600.0)
        places = f"{data.prefix}.cache", order.get("cache_dir")
        self._places = [Path(place) for place in places if place is not None]
        # Two: a step may span the end of an epoch, and the next step is read ahead.
        self._index = lru_cache(maxsize=2)(self._loaded)

    def prepare(self, sample: int) -> None:
        """Build or load the index that a sample needs.

        Raises:
            HexadError: the dataset is damaged, or its index cannot be stored or is not completed in time.
        """
        self._index(sample // self.per_epoch)

    def read(self, samples: NDArray[np.int64]) -> Samples:
        """The samples with these numbers, int64 ``[n]``, counted from 0 over all epochs."""
        epochs, numbers = np.divmod(samples, self.per_epoch)
        return Samples.gather(epochs, lambda epoch, rows: self._cut(epoch, numbers[rows]))

    @abstractmethod
    def _cut(self, epoch: int, numbers: NDArray[np.int64]) -> Samples:
        """Samples of one epoch."""

    @abstractmethod
    def _parts(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        """The index by which an epoch's samples are found, part by part."""

    def _write(self, path: Path, epoch: int) -> None:
        """Write an index to a file by a rename, in NumPy's format."""
        with appearing_whole(path) as stream:
            header = {"descr": "<i8", "fortran_order": False, "shape": (self._size,)}
            np.lib.format.write_array_header_1_0(stream, header)
            for part in self._parts(epoch):
                stream.write(part.astype("<i8", copy=False).tobytes())

    def _loaded(self, epoch: int) -> NDArray[np.int64]:
        """The index: of many documents from a file, which one process per file system creates if it is
        missing; its name is a hash of all that it depends on."""
        if self.data.documents <= self._in_memory:
            return np.concatenate(list(self._parts(epoch)))
        kind, *others = self._words
        words = (kind, self.data.identity(), *self._key, *others, epoch)
        name = blake2b(repr(words).encode(), digest_size=16).hexdigest() + ".npy"
        paths = [place / name for place in self._places]
        for path in paths:
            if (index := self._mapped(path)) is not None:
                return index
        problems = []
        for path in paths:
            read, write = partial(self._mapped, path), partial(self._write, path, epoch)
            try:
                return written_once(path, read, write, self._patience)
            except OSError as error:
                problems.append(f"{path.parent} ({error.strerror or error})")
        raise HexadError(
            f"{self.data.prefix}: the index of {self.data.documents} documents cannot be stored in "
            f"{' or '.join(problems)}; make one of them writable (8 bytes per document and epoch)"
        )

    def _mapped(self, path: Path) -> NDArray[np.int64] | None:
        """The content of an index file if it is complete."""
        try:
            index = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        return np.asarray(index) if index.shape == (self._size,) and index.dtype == np.int64 else None


class SampleSource(Source):
    """The samples of a dataset whose documents are joined and cut.

    Raises:
        HexadError: the dataset is too small for one sample.
    """

    def __init__(self, data: IndexedDataset, *, sequence: int, **order: Unpack[OrderSettings]) -> None:
        per_epoch = (len(data.tokens) - 1) // sequence
        super().__init__(data, sequence, per_epoch, data.documents + 1, (_FORMAT,), **order)
        if self.per_epoch < 1:
            raise HexadError(
                f"{data.prefix}: holds {len(data.tokens)} tokens, expected at least data.sequence + 1 = "
                f"{sequence + 1}; give more data or a smaller data.sequence"
            )

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

    def _parts(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        """The place in its stream where each document of an epoch's order begins, many at a time, and the
        total."""
        self.data.verify()
        documents, threads = self.data.documents, min(_THREADS, os.cpu_count() or 1)

        def lengths(start: int) -> NDArray[np.int64]:
            places = np.arange(start, min(start + _CHUNK, documents))
            return self.data.tokens_in(document_order(places, documents, self._key, epoch))

        ends = np.zeros(1, dtype=np.int64)
        yield ends
        starts = range(0, documents, _CHUNK)
        with ThreadPoolExecutor(threads) as pool:
            groups = (starts[first : first + 2 * threads] for first in range(0, len(starts), 2 * threads))
            for counts in chain.from_iterable(pool.map(lengths, group) for group in groups):
                ends = ends[-1] + np.cumsum(counts)
                yield ends


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``start .. start + count - 1`` of each pair, one after another, int64 ``[sum(counts)]``."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
