"""A rectangle of a global tensor: what shards, checkpoints and published files have in common. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from operator import add


@dataclass(frozen=True)
class Rectangle:
    """Part of a global tensor.

    Attributes:
        name: of the global tensor.
        shape: of the global tensor, without padding.
        offset: first index of the rectangle in every dim.
        sizes: its extent in every dim; 0 where a shard is padding only.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Rectangle:
        """All of a tensor."""
        return cls(name, shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its index in the global tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.sizes))

    def named(self, name: str) -> Rectangle:
        """This rectangle of a tensor with another name."""
        return replace(self, name=name)

    def rows(self, begin: int, end: int) -> Rectangle:
        """Its rows ``begin`` to ``end - 1``, counted from its own first row."""
        offset, sizes = (self.offset[0] + begin, *self.offset[1:]), (end - begin, *self.sizes[1:])
        return replace(self, offset=offset, sizes=sizes)

    def intersection(self, other: Rectangle) -> Rectangle | None:
        """The intersection of two rectangles of one tensor, or None."""
        low = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.sizes, other.offset, other.sizes)
        high = tuple(min(o + s, p + t) for o, s, p, t in ends)
        if any(begin >= end for begin, end in zip(low, high)):
            return None
        return replace(self, offset=low, sizes=tuple(end - begin for begin, end in zip(low, high)))

    def flat_range(self, low: int, high: int) -> Iterator[tuple[int, Rectangle]]:
        """The elements ``low`` to ``high - 1`` of the flattened rectangle, as rectangles.

        Yields:
            (position of its first element, rectangle): of a matrix part of a first row, complete rows, part
            of a last row.
        """
        for position, offset, sizes in _flat_range(self.sizes, low, high):
            yield position, replace(self, offset=tuple(map(add, self.offset, offset)), sizes=sizes)


def _flat_range(
    sizes: tuple[int, ...], low: int, high: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(position, offset, sizes) of rectangles that make up elements of a flattened tensor."""
    width = prod(sizes[1:])
    while low < high:
        row, first = divmod(low, width)
        if first or high - low < width:
            end = min(high - row * width, width)
            for position, offset, part in _flat_range(sizes[1:], first, end):
                yield row * width + position, (row, *offset), (1, *part)
            low = row * width + end
        else:
            rows = (high - low) // width
            yield low, (row, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
            low += rows * width
