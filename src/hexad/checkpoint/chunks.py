"""A rank's part of a checkpoint as rectangles of global tensors.

A checkpoint does not depend on the layout that wrote it: it holds global tensors by name, and loads in any
other layout; each rank reads only the rectangles it holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from hexad.parallel.rectangle import Rectangle

_PART_BYTES = 4 * 2**20
"""Copies smaller than this are written by one of the ranks that hold them, larger ones by several."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor, with its values.

    Attributes:
        rectangle: which.
        tensor: its values; saving reads them, loading overwrites them.
        holder: (i, n): this is rank number i of n that hold the same rectangle; None where ranks that are not
            among them write it.
        rounded: loading may round values to the tensor's format; otherwise floats are only widened.
    """

    rectangle: Rectangle
    tensor: torch.Tensor
    holder: tuple[int, int] | None = (0, 1)
    rounded: bool = False

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether values of this format may be loaded."""
        floats = dtype.is_floating_point and self.tensor.dtype.is_floating_point
        return (self.rounded and floats) or torch.promote_types(dtype, self.tensor.dtype) == self.tensor.dtype

    @property
    def name(self) -> str:
        """Of the global tensor."""
        return self.rectangle.name

    def rows(self, begin: int, end: int) -> Chunk:
        """Some of its rows."""
        return replace(self, rectangle=self.rectangle.rows(begin, end), tensor=self.tensor[begin:end])


def to_write(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The parts that this rank writes, so that all holders together write everything once and about the same
    amount each: a large chunk is split by rows, a small one written by one holder. Needs no communication."""
    for chunk in chunks:
        if chunk.holder is None or not chunk.tensor.numel():
            continue
        mine, holders = chunk.holder
        rows = chunk.tensor.shape[0]
        parts = max(1, min(holders, rows, chunk.tensor.nbytes // _PART_BYTES))
        # Holders of small chunks alternate by name and offset (not by Python's hash, which differs by rank).
        first = zlib.crc32(f"{chunk.name}{chunk.rectangle.offset}".encode())
        part = (mine - first) % holders
        if part < parts:
            yield chunk.rows(rows * part // parts, rows * (part + 1) // parts)
