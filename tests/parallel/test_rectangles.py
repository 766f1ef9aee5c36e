"""A flattened parameter's share as rectangles of global tensors."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from hexad.parallel.data.rectangles import overlap
from hexad.parallel.sharding import Piece


@given(
    parts=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    width=st.integers(1, 7),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    first=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    vector=st.booleans(),
)
def test_every_element_is_in_one_rectangle(
    parts: list[int], width: int, cuts: list[int], first: tuple[int, int], vector: bool
) -> None:
    """A fused parameter, cut anywhere: put together again, its pieces hold what they held."""
    rows = sum(parts)
    shape = torch.Size((rows,) if vector else (rows, width))
    local = torch.arange(shape.numel(), dtype=torch.float64)
    bounds = sorted({0, local.numel(), *(min(cut, local.numel()) for cut in cuts)})
    start = 0
    for index, part in enumerate(parts):
        sizes = (part, *shape[1:])
        offset = first[: len(shape)]
        whole = torch.full([size + 4 for size in sizes], -1.0, dtype=torch.float64)
        piece = Piece(f"piece{index}", tuple(whole.shape), offset, sizes, start)
        covered = torch.zeros_like(whole)
        for low, high in pairwise(bounds):
            found = list(overlap(piece, shape, low, local[low:high]))
            assert len(found) <= 3
            for smaller, values in found:
                assert tuple(values.shape) == smaller.sizes
                assert values.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
                smaller.slice_of(whole).copy_(values)
                smaller.slice_of(covered).add_(1)
        wanted = piece.local(local.view(shape))
        assert torch.equal(piece.slice_of(whole), wanted)
        assert covered.sum() == wanted.numel() and covered.max(dim=0).values.max() <= 1
        start += part
