"""Some of a dataset's documents, one after another, as a dataset: what ``data.split`` names."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from ..indexed import IndexedDataset


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
