"""Samples of one dataset: documents in random order, joined and cut into pieces of equal length.

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

from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from .indexed import SMALL, IndexedDataset
from .permutation import permute
from .stream import Stream, document_order


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
        self.per_epoch = (len(data.tokens) - 1) // sequence
        if self.per_epoch < 1:
            raise HexadError(
                f"{data.prefix}: holds {len(data.tokens)} tokens, expected at least data.sequence + 1 = "
                f"{sequence + 1}; give more data or a smaller data.sequence"
            )
        self._key = (seed, source)
        places = [Path(f"{data.prefix}.cache"), *([Path(cache_dir)] if cache_dir is not None else [])]
        self._stream = Stream(data, self._key, places, in_memory, patience)
        self._indexes: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def prepare(self, sample: int) -> None:
        """Have the index that a sample needs.

        Raises:
            HexadError: the dataset is damaged, or its index cannot be stored or is not completed in time.
        """
        self._index(sample // self.per_epoch)

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
        stream = self._index(epoch)
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
        shuffled = document_order(documents, self.data.documents, self._key, epoch)
        origin = self.data.starts(shuffled) + (low - begin)
        lengths = high - low
        tokens = self.data.tokens[_ranges(origin, lengths)].astype(np.int64)
        begins = np.zeros(len(tokens), dtype=np.bool_)
        target = rows * width + (low - first[rows])
        begins[target[low == begin]] = True
        return tokens.reshape(-1, width), begins.reshape(-1, width)

    def _index(self, epoch: int) -> NDArray[np.int64]:
        """Where each document of an epoch's order begins in its stream, int64 ``[documents + 1]``."""
        if epoch not in self._indexes:
            self._indexes[epoch] = self._stream.index(epoch)
            # Two: a step may span the end of an epoch, and the next step is read ahead.
            while len(self._indexes) > 2:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(epoch)
        return self._indexes[epoch]


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``start .. start + count - 1`` of each pair, one after another, int64 ``[sum(counts)]``."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
