"""A run of a flattened parameter as rectangles of global tensors."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from hexad.parallel.rectangle import Rectangle


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    offset=st.tuples(*[st.integers(0, 4)] * 4),
    cuts=st.lists(st.integers(0, 1296), max_size=4),
)
def test_every_element_is_in_one_rectangle(
    sizes: list[int], offset: tuple[int, ...], cuts: list[int]
) -> None:
    """A rectangle, cut anywhere: its parts hold what it held, and of a matrix no more than three per
    run."""
    shape = tuple(size + 4 for size in sizes)
    rectangle = Rectangle("weight", shape, offset[: len(sizes)], tuple(sizes))
    local = torch.arange(rectangle.numel, dtype=torch.float64)
    whole, covered = torch.full(shape, -1.0, dtype=torch.float64), torch.zeros(shape)
    for low, high in pairwise(sorted({0, local.numel(), *(min(cut, local.numel()) for cut in cuts)})):
        pieces = list(rectangle.flat_range(low, high))
        assert len(pieces) <= 2 * len(sizes) - 1
        for position, part in pieces:
            assert part.name == "weight" and part.shape == shape
            whole[part.slices] = local[position : position + part.numel].view(part.sizes)
            covered[part.slices] += 1
    assert torch.equal(whole[rectangle.slices], local.view(tuple(sizes)))
    assert covered.sum() == rectangle.numel and covered.max() <= 1


@given(
    rows=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)),
    columns=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)),
)
def test_intersections(rows: tuple[int, ...], columns: tuple[int, ...]) -> None:
    shape = (10, 10)
    one = Rectangle("weight", shape, (rows[0], columns[0]), (rows[1], columns[1]))
    other = Rectangle("weight", shape, (rows[2], columns[2]), (rows[3], columns[3]))
    seen = torch.zeros(shape)
    seen[one.slices] += 1
    seen[other.slices] += 1
    common = one.intersection(other)
    assert common == other.intersection(one)
    assert (seen == 2).sum() == (0 if common is None else prod(common.sizes))
    if common is not None:
        assert (seen[common.slices] == 2).all()
