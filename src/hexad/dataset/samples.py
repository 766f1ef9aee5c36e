"""Samples of one dataset: documents in random order, joined and cut into pieces of equal length.

An epoch takes every document once, in an order drawn from (seed, source, epoch), joins them into one stream
of ``T`` tokens and cuts it: sample ``j`` is tokens ``j * sequence`` to ``(j + 1) * sequence``, both included,
the last being only the label of the one before and, as in Megatron, the first input of the next sample. There
are ``(T - 1) // sequence`` samples, taken in a second random order. The remainder that fills no sample is
dropped: every token but the last ``T - samples * sequence`` of the stream (1 to ``sequence`` of them; others
in each epoch) is an input exactly once.

Both orders are computed where they are needed (see :mod:`.permutation`). All that is stored is where each
document of the shuffled order begins in the stream, 8 bytes per document and epoch: in memory for up to a
million documents, where it takes a few tens of milliseconds, else in a memory-mapped file that the processes
of a host share. The file's name is a hash of all it depends on and it is created by a rename, so that any
number of processes and hosts may create it concurrently without synchronisation.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from .files import temporary_name
from .indexed import IndexedDataset
from .permutation import permute

_IN_MEMORY = 1 << 20
_CHUNK = 1 << 20
_FORMAT = "hexad-stream-1"
"""Change it when the orders drawn from a seed change."""


class SampleSource:
    """Random access to the samples of a dataset, over any number of epochs.

    Args:
        data: the dataset.
        sequence: inputs per sample, in tokens.
        seed: of both orders.
        source: number of this dataset in a blend; another number, another order.
        cache_dir: where to keep indexes that are too large for memory if the data's own directory
            (``PREFIX.cache``) cannot be written.
        in_memory: number of documents up to which no file is created.

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
        in_memory: int = _IN_MEMORY,
    ) -> None:
        self.data, self.sequence = data, sequence
        self.per_epoch = (len(data.tokens) - 1) // sequence
        if self.per_epoch < 1:
            raise HexadError(
                f"{data.prefix}: holds {len(data.tokens)} tokens, expected at least data.sequence + 1 = "
                f"{sequence + 1}; give more data or a smaller data.sequence"
            )
        self._key = (seed, source)
        self._places = [Path(f"{data.prefix}.cache"), *([Path(cache_dir)] if cache_dir is not None else [])]
        self._in_memory = in_memory
        self._streams: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def read(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Some samples.

        Args:
            samples: int64 ``[n]``, counted from 0 over all epochs.

        Returns:
            Token ids, int64 ``[n, sequence + 1]``, and, of the same shape, where a document begins.
        """
        epochs, numbers = np.divmod(samples, self.per_epoch)
        if len(samples) and (epochs == epochs[0]).all():
            return self._cut(int(epochs[0]), numbers)
        tokens = np.empty((len(samples), self.sequence + 1), dtype=np.int64)
        begins = np.empty(tokens.shape, dtype=np.bool_)
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            tokens[rows], begins[rows] = self._cut(int(epoch), numbers[rows])
        return tokens, begins

    def _cut(self, epoch: int, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Samples of one epoch, all gathered at once."""
        width = self.sequence + 1
        order = permute(numbers, self.per_epoch, *self._key, epoch, "samples")
        first = order * self.sequence
        stream = self._stream(epoch)
        # Of documents that begin at one position all but the last are empty: side="right" finds that one.
        lowest = np.searchsorted(stream, first, side="right") - 1
        highest = np.searchsorted(stream, first + (width - 1), side="right") - 1
        counts = highest - lowest + 1
        rows = np.repeat(np.arange(len(first)), counts)
        documents = _ranges(lowest, counts)
        begin = stream[documents]
        low = np.maximum(begin, first[rows])
        high = np.minimum(stream[documents + 1], first[rows] + width)
        filled = high > low
        rows, documents, begin, low, high = (a[filled] for a in (rows, documents, begin, low, high))
        shuffled = permute(documents, self.data.documents, *self._key, epoch, "documents")
        origin = self.data.starts(shuffled) + (low - begin)
        lengths = high - low
        tokens = self.data.tokens[_ranges(origin, lengths)].astype(np.int64)
        begins = np.zeros(len(tokens), dtype=np.bool_)
        target = rows * width + (low - first[rows])
        begins[target[low == begin]] = True
        return tokens.reshape(-1, width), begins.reshape(-1, width)

    def _stream(self, epoch: int) -> NDArray[np.int64]:
        """Where each document of an epoch's order begins in its stream, int64 ``[documents + 1]``."""
        if epoch not in self._streams:
            if self.data.documents <= self._in_memory:
                stream = np.empty(self.data.documents + 1, dtype=np.int64)
                self._fill(stream, epoch)
            else:
                stream = self._stored(epoch)
            self._streams[epoch] = stream
            # Two: a step may span the end of an epoch, and the next step is read ahead.
            while len(self._streams) > 2:
                self._streams.popitem(last=False)
        self._streams.move_to_end(epoch)
        return self._streams[epoch]

    def _fill(self, stream: NDArray[np.int64], epoch: int) -> None:
        documents = self.data.documents
        stream[0] = 0
        for start in range(0, documents, _CHUNK):
            stop = min(start + _CHUNK, documents)
            order = permute(np.arange(start, stop), documents, *self._key, epoch, "documents")
            lengths = self.data.starts(order + 1) - self.data.starts(order)
            stream[start + 1 : stop + 1] = stream[start] + np.cumsum(lengths)

    def _stored(self, epoch: int) -> NDArray[np.int64]:
        """The stream's index from a file, which is created if it is missing."""
        words = (_FORMAT, self._lengths_hash(), *self._key, epoch)
        name = blake2b(repr(words).encode(), digest_size=16).hexdigest() + ".npy"
        for place in self._places:
            if (stream := self._mapped(place / name)) is not None:
                return stream
        problems = []
        for place in self._places:
            try:
                self._make(place / name, epoch)
            except OSError as error:
                problems.append(f"{place} ({error.strerror or error})")
                continue
            if (stream := self._mapped(place / name)) is not None:
                return stream
        raise HexadError(
            f"{self.data.prefix}: the index of {self.data.documents} documents cannot be stored in "
            f"{' or '.join(problems)}; make one of them writable (8 bytes per document and epoch)"
        )

    def _mapped(self, path: Path) -> NDArray[np.int64] | None:
        """The file's content if it is complete."""
        try:
            stream: NDArray[Any] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        whole = stream.shape == (self.data.documents + 1,) and stream.dtype == np.int64
        return np.asarray(stream) if whole and stream[-1] == len(self.data.tokens) else None

    def _make(self, path: Path, epoch: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        try:
            stream = np.lib.format.open_memmap(
                temporary, mode="w+", dtype=np.int64, shape=(self.data.documents + 1,)
            )
            self._fill(stream, epoch)
            stream.flush()
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _lengths_hash(self) -> str:
        """A hash of everything the index depends on; about a gigabyte per second."""
        digest = blake2b(digest_size=16)
        for array in (self.data.lengths, self.data.boundaries):
            for start in range(0, len(array), _CHUNK):
                digest.update(array[start : start + _CHUNK].tobytes())
        return digest.hexdigest()


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``start .. start + count - 1`` of each pair, one after another, int64 ``[sum(counts)]``."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
