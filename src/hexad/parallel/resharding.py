"""Values of weights from the ranks that hold them in one layout to those that need them in another, without a
copy of all on any: each rank receives what it lacks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexad.comm import all_to_all, merged
from hexad.config import HexadError
from hexad.topology.mesh import Axis

from .rectangle import Rectangle

StoredPart = tuple[Rectangle, Tensor]
"""Part of a global tensor, and its values or the place for them, of the same sizes."""
_MESSAGE = 1 << 24
"""Elements that a rank receives at a time, about; one that many ask sends as many more."""


class _TransferredPart(NamedTuple):
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
    """A rectangle without a part of it, as rectangles."""
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


def _view(source: StoredPart, part: Rectangle) -> Tensor:
    rectangle, values = source
    index = (slice(o - b, o - b + n) for o, b, n in zip(part.offset, rectangle.offset, part.sizes))
    return values[tuple(index)]


class Resharding:
    """The way of values from one layout to another, found once. All ranks of an axis construct it together.

    Args:
        stored: what this rank has.
        needed: what it needs.
        axis: of the ranks.

    Raises:
        HexadError: a value that no rank has, or a tensor of another shape; on every rank.
    """

    def __init__(self, stored: Sequence[Rectangle], needed: Sequence[Rectangle], axis: Axis) -> None:
        self._axis = axis
        # Ranks that differ in the data alone hold the same.
        local_holder: dict[tuple[Rectangle, ...], tuple[int, ...]] = {tuple(stored): (axis.rank,)}
        holders = merged(local_holder, axis, _appended)
        pieces, problem = _found(holders, needed, axis.rank)
        problem = merged(problem, axis, lambda a, b: a or b)
        if problem is not None:
            raise HexadError(problem)
        self._local = [piece for piece in pieces if piece.source == axis.rank]
        away = [short for piece in pieces if piece.source != axis.rank for short in _short(piece)]
        ends = [*accumulate(piece.part.numel for piece in away)]
        numbers = [(end - 1) // _MESSAGE for end in ends]  # of the messages that they come in
        count = merged(numbers[-1] + 1 if numbers else 0, axis, max)
        requests: list[list[tuple[int, _TransferredPart]]] = [[] for _ in range(axis.size)]
        for number, piece in zip(numbers, away):
            requests[piece.source].append((number, piece))
        asked = _exchanged(requests, axis)
        # By message: rank and piece, in an order that is the same on both sides.
        self._sent, self._received = (
            [
                [(rank, piece) for rank, side in enumerate(sides) for n, piece in side if n == number]
                for number in range(count)
            ]
            for sides in (asked, requests)
        )

    @property
    def received(self) -> int:
        """Elements that this rank receives from others."""
        return sum(piece.part.numel for message in self._received for _, piece in message)

    @torch.no_grad()
    def run(self, sources: Sequence[StoredPart], needed: Sequence[StoredPart], dtype: torch.dtype) -> None:
        """Copy values to where they are needed; all ranks together, with rectangles as at construction.

        Args:
            sources: what this rank has, in any format.
            needed: places for what it needs.
            dtype: of the values, to which those that are held are rounded.
        """
        for _, having, place, part in self._local:
            _view(needed[place], part).copy_(_view(sources[having], part).to(dtype))
        size, device = self._axis.size, needed[0][1].device if needed else sources[0][1].device
        for sent, received in zip(self._sent, self._received):
            parts = [_view(sources[piece.having], piece.part).to(dtype).flatten() for _, piece in sent]
            message = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
            arrived = all_to_all(message, self._axis, _counts(sent, size), _counts(received, size))
            sizes = [piece.part.numel for _, piece in received]
            for (_, piece), values in zip(received, arrived.split(sizes) if sizes else ()):
                _view(needed[piece.place], piece.part).copy_(values.view(piece.part.sizes))


def _short(piece: _TransferredPart) -> Iterator[_TransferredPart]:
    """A piece in runs of rows with about :data:`_MESSAGE` elements at most."""
    part = piece.part
    rows = max(1, _MESSAGE * part.sizes[0] // part.numel)
    for begin in range(0, part.sizes[0], rows):
        yield piece._replace(part=part.rows(begin, min(begin + rows, part.sizes[0])))


def _exchanged(values: Sequence[Any], axis: Axis) -> list[Any]:
    """Exchange values between all ranks: returns what every rank has for this one, given what this one has
    for each."""
    contents = [pickle.dumps(value) for value in values]
    sizes = torch.tensor([len(content) for content in contents], device=axis.device)
    arriving = all_to_all(sizes, axis).tolist()
    message = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8).to(axis.device)
    arrived = all_to_all(message, axis, sizes.tolist(), arriving).cpu()
    return [pickle.loads(part.numpy().tobytes()) for part in arrived.split(arriving)]


def _appended(first: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    """Tuples by key, those of both behind each other."""
    both = dict(first)
    for key, value in other.items():
        both[key] = both[key] + value if key in both else value
    return both


def _counts(pieces: Sequence[tuple[int, _TransferredPart]], size: int) -> list[int]:
    """Elements of pieces with each rank."""
    counts = [0] * size
    for rank, piece in pieces:
        counts[rank] += piece.part.numel
    return counts


def _found(
    holders: dict[tuple[Rectangle, ...], tuple[int, ...]], needed: Sequence[Rectangle], rank: int
) -> tuple[list[_TransferredPart], str | None]:
    """The sources of what this rank needs: from itself as far as possible, else from the nearest of the ranks
    that hold the same; and what is wrong, if something is."""
    known: dict[str, list[tuple[int, int, Rectangle]]] = {}
    own_first = sorted(holders.items(), key=lambda item: (rank not in item[1], item[1]))
    for rectangles, ranks in own_first:
        source = min(ranks, key=lambda other: (abs(other - rank), other))
        for index, rectangle in enumerate(rectangles):
            known.setdefault(rectangle.name, []).append((source, index, rectangle))
    pieces: list[_TransferredPart] = []
    for place, target in enumerate(needed):
        left = [target] if target.numel else []
        for source, index, rectangle in known.get(target.name, ()):
            if rectangle.shape != target.shape:
                return [], f"{target.name}: found shape {rectangle.shape}, expected {target.shape}"
            rest: list[Rectangle] = []
            for missing in left:
                part = missing.intersection(rectangle)
                if part is None:
                    rest.append(missing)
                else:
                    pieces.append(_TransferredPart(source, index, place, part))
                    rest += minus(missing, part)
            left = rest
        if left:
            return [], f"{target.name}: no rank has its elements from {left[0].offset} on"
    return pieces, None
