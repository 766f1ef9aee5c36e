"""Values of weights from the ranks that hold them in one layout to those that need them in another, without a
copy of all on any: each rank receives what it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexad.comm import all_to_all, merged
from hexad.config import HexadError
from hexad.topology.mesh import Axis

from .rectangle import Rectangle

Held = tuple[Rectangle, Tensor]
"""Part of a global tensor, and its values or the place for them, of the same sizes."""
_MESSAGE = 1 << 24
"""Elements that a rank receives at a time, about."""


class _Piece(NamedTuple):
    """Values that one rank needs and another has.

    Attributes:
        source: the rank that has them.
        having: of what they are part of, among what that rank holds.
        place: of what they are part of, among what the receiver needs.
        part: which they are.
    """

    source: int
    having: int
    place: int
    part: Rectangle


def minus(whole: Rectangle, part: Rectangle) -> Iterator[Rectangle]:
    """What is left of a rectangle without a part of it, as rectangles."""
    for dim in range(len(whole.shape)):
        begin, end = whole.offset[dim], whole.offset[dim] + whole.sizes[dim]
        low, high = part.offset[dim], part.offset[dim] + part.sizes[dim]
        for first, last in ((begin, low), (high, end)):
            if first < last:
                yield _cut(whole, dim, first, last)
        whole = _cut(whole, dim, low, high)


def _cut(whole: Rectangle, dim: int, begin: int, end: int) -> Rectangle:
    offset, sizes = list(whole.offset), list(whole.sizes)
    offset[dim], sizes[dim] = begin, end - begin
    return Rectangle(whole.name, whole.shape, tuple(offset), tuple(sizes))


def _view(held: Held, part: Rectangle) -> Tensor:
    rectangle, values = held
    index = (slice(o - b, o - b + n) for o, b, n in zip(part.offset, rectangle.offset, part.sizes))
    return values[tuple(index)]


class Transfer:
    """The way of values from one layout to another, found once. All ranks of an axis construct it together.

    Args:
        held: what this rank has.
        needed: what it needs.
        axis: of the ranks.

    Raises:
        HexadError: a value that no rank has, or a tensor of another shape; on every rank.
    """

    def __init__(self, held: Sequence[Rectangle], needed: Sequence[Rectangle], axis: Axis) -> None:
        self._axis = axis
        # Ranks that differ in the data alone hold the same.
        own: dict[tuple[Rectangle, ...], tuple[int, ...]] = {tuple(held): (axis.rank,)}
        holders = merged(own, axis, _appended)
        pieces, problem = _found(holders, needed, axis.rank)
        problem = merged(problem, axis, lambda a, b: a or b)
        if problem is not None:
            raise HexadError(problem)
        self._local = [piece for piece in pieces if piece.source == axis.rank]
        away = [piece for piece in pieces if piece.source != axis.rank]
        ends = accumulate(piece.part.numel for piece in away)
        wanted: dict[int, list[tuple[int, int, _Piece]]] = {}
        last = 0
        for piece, end in zip(away, ends):
            last = (end - 1) // _MESSAGE
            wanted.setdefault(piece.source, []).append((axis.rank, last, piece))
        self._rounds = merged(last + 1 if away else 0, axis, max)
        everything = merged(wanted, axis, _appended)
        self._sent = everything.get(axis.rank, [])
        self._received = [
            (piece.source, number, piece) for parts in wanted.values() for _, number, piece in parts
        ]

    @property
    def received(self) -> int:
        """Elements that this rank receives from others."""
        return sum(piece.part.numel for _, _, piece in self._received)

    @torch.no_grad()
    def run(self, held: Sequence[Held], needed: Sequence[Held], dtype: torch.dtype) -> None:
        """Copy values to where they are needed; all ranks together, with rectangles as at construction.

        Args:
            held: what this rank has, in any format.
            needed: places for what it needs.
            dtype: of the values, to which those that are held are rounded.
        """
        for _, having, place, part in self._local:
            _view(needed[place], part).copy_(_view(held[having], part).to(dtype))
        size, device = self._axis.size, needed[0][1].device if needed else held[0][1].device
        for turn in range(self._rounds):
            sent, received = (
                sorted(((rank, piece) for rank, number, piece in side if number == turn), key=_order)
                for side in (self._sent, self._received)
            )
            parts = [_view(held[piece.having], piece.part).to(dtype).flatten() for _, piece in sent]
            message = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
            arrived = all_to_all(message, self._axis, _counts(sent, size), _counts(received, size))
            sizes = [piece.part.numel for _, piece in received]
            for (_, piece), values in zip(received, arrived.split(sizes) if sizes else ()):
                _view(needed[piece.place], piece.part).copy_(values.view(piece.part.sizes))


def _order(item: tuple[int, _Piece]) -> tuple[object, ...]:
    """The same order for both sides of a message."""
    rank, piece = item
    return rank, piece.having, piece.place, piece.part.offset


def _appended(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    """Lists or tuples by key, those of both behind each other."""
    return {
        key: one[key] + other[key] if key in one and key in other else (one | other)[key]
        for key in one | other
    }


def _counts(pieces: Sequence[tuple[int, _Piece]], size: int) -> list[int]:
    """Elements of pieces with each rank."""
    counts = [0] * size
    for rank, piece in pieces:
        counts[rank] += piece.part.numel
    return counts


def _found(
    holders: dict[tuple[Rectangle, ...], tuple[int, ...]], needed: Sequence[Rectangle], rank: int
) -> tuple[list[_Piece], str | None]:
    """Where this rank gets what it needs: from itself as far as possible, else from ranks that hold the same
    in turn; and what is wrong, if something is."""
    known: dict[str, list[tuple[int, int, Rectangle]]] = {}
    own_first = sorted(holders.items(), key=lambda item: (rank not in item[1], item[1]))
    for rectangles, ranks in own_first:
        source = rank if rank in ranks else ranks[rank % len(ranks)]
        for index, rectangle in enumerate(rectangles):
            known.setdefault(rectangle.name, []).append((source, index, rectangle))
    pieces: list[_Piece] = []
    for place, wanted in enumerate(needed):
        left = [wanted] if wanted.numel else []
        for source, index, rectangle in known.get(wanted.name, ()):
            if rectangle.shape != wanted.shape:
                return [], f"{wanted.name}: found shape {rectangle.shape}, expected {wanted.shape}"
            rest: list[Rectangle] = []
            for missing in left:
                part = missing.intersection(rectangle)
                if part is None:
                    rest.append(missing)
                else:
                    pieces.append(_Piece(source, index, place, part))
                    rest += minus(missing, part)
            left = rest
        if left:
            return [], f"{wanted.name}: no rank has its elements from {left[0].offset} on"
    return pieces, None
