"""A run of a flattened parameter as rectangles of global tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..sharding import Piece


def overlap(
    piece: Piece, shape: torch.Size, low: int, values: torch.Tensor
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """What of ``piece`` lies in a run of its flattened parameter.

    Args:
        piece: rows ``start`` to ``start + sizes[0]`` of the parameter.
        shape: of the local parameter, of 1 or 2 dims.
        low: where the run begins in the flattened parameter, in elements.
        values: the run.

    Yields:
        (a smaller piece, its view of ``values``): a first row in part, whole rows, a last row in part.
    """
    width = shape[1:].numel()
    begin = max(low, piece.start * width)
    end = min(low + values.numel(), (piece.start + piece.sizes[0]) * width)
    while begin < end:
        row, column = divmod(begin, width)
        if column or end - begin < width:
            count = min(width - column, end - begin)
            rows, columns = 1, count
        else:
            rows, columns = (end - begin) // width, width
            count = rows * width
        offset = (piece.offset[0] + row - piece.start, *(o + column for o in piece.offset[1:]))
        sizes = (rows, columns)[: len(shape)]
        view = values[begin - low : begin - low + count].view(sizes)
        yield replace(piece, offset=offset, sizes=sizes, start=row), view
        begin += count
