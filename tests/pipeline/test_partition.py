"""Layers to stages: the optimum against every possible division, coverage, errors."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexad.config import ConfigError
from hexad.parallel.pipeline.partition import LayerCosts, partition


def divisions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every allowed number of layers per stage."""

    def rest(left: int, stage: int) -> Iterator[tuple[int, ...]]:
        least = 0 if stage in (0, stages - 1) else 1
        if stage == stages - 1:
            if left >= least:
                yield (left,)
            return
        for size in range(least, left + 1):
            for others in rest(left - size, stage + 1):
                yield (size, *others)

    return rest(layers, 0)


def times(sizes: Sequence[int], costs: LayerCosts) -> list[Fraction]:
    """Exact time of every stage."""
    exact = [Fraction(cost) for cost in costs.layers]
    bounds = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    sums = [sum(exact[begin:end], Fraction()) for begin, end in pairwise(bounds)]
    sums[0] += Fraction(costs.embedding)
    sums[-1] += Fraction(costs.head)
    return sums


def uniform(layers: int, layer: float = 1.0, embedding: float = 0.0, head: float = 0.0) -> LayerCosts:
    return LayerCosts(embedding, (layer,) * layers, head)


def sizes_of(*arguments: Any) -> list[int]:
    return [len(part) for part in partition(*arguments)]


cost = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 0.1, 0.2, 0.3]),
    st.floats(0, 100, allow_nan=False, allow_subnormal=False),
)


@given(st.lists(cost, min_size=1, max_size=7), st.integers(1, 6), cost, cost)
def test_no_division_is_better(layers: list[float], stages: int, embedding: float, head: float) -> None:
    costs = LayerCosts(embedding, tuple(layers), head)
    if stages > len(layers) + 2:
        with pytest.raises(ConfigError):
            partition("cost", len(layers), stages, costs)
        return
    sizes = tuple(sizes_of("cost", len(layers), stages, costs))

    def badness(sizes: tuple[int, ...]) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        stages = times(sizes, costs)
        later = tuple(-size for size in reversed(sizes))
        return max(stages), sum((time * time for time in stages), Fraction()), later

    assert sizes in set(divisions(len(layers), stages))
    assert badness(sizes) == min(map(badness, divisions(len(layers), stages)))


@given(st.integers(1, 131), st.integers(1, 67), st.sampled_from(["cost", "even"]), cost, cost)
def test_every_layer_stands_once_in_order(
    layers: int, stages: int, split: Any, embedding: float, head: float
) -> None:
    costs = uniform(layers, 1.0, embedding, head)
    if stages > 1 and stages > layers + (2 if split == "cost" else 0):
        with pytest.raises(ConfigError, match=r"parallel\.pipeline: found \d+ stages"):
            partition(split, layers, stages, costs)
        return
    parts = partition(split, layers, stages, costs)
    assert len(parts) == stages
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert all(parts[1:-1])
    assert partition([len(part) for part in parts], layers, stages, costs) == parts
    if split == "even":
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[-1] == min(sizes) and (sizes[0] == min(sizes) or min(sizes[:-1]) == max(sizes))


def test_the_ends_make_room_for_embedding_and_head() -> None:
    assert sizes_of("cost", 16, 4, uniform(16)) == [4, 4, 4, 4]
    assert sizes_of("cost", 14, 4, uniform(14, 1.0, 0.0, 2.0)) == [4, 4, 4, 2]
    assert sizes_of("cost", 8, 4, uniform(8, 1.0, 4.0, 4.0)) == [0, 4, 4, 0]
    assert sizes_of("cost", 2, 4, uniform(2)) == [0, 1, 1, 0]
    assert sizes_of("cost", 5, 4, uniform(5)) == [1, 1, 1, 2]
    assert sizes_of("even", 13, 4, uniform(13)) == [3, 3, 4, 3]
    assert sizes_of("even", 14, 4, uniform(14)) == [3, 4, 4, 3]
    assert sizes_of("even", 15, 4, uniform(15)) == [4, 4, 4, 3]
    assert sizes_of([0, 3, 2, 0], 5, 4, uniform(5)) == [0, 3, 2, 0]


@pytest.mark.parametrize("split", ["cost", "even", [3]])
def test_one_stage_holds_all(split: Any) -> None:
    assert partition(split, 3, 1, uniform(3)) == (range(3),)


@pytest.mark.parametrize(
    ("split", "layers", "stages", "message"),
    [
        ("even", 3, 4, "parallel.pipeline: found 4 stages .* for 3 layers, .* use at most 3 stages"),
        ("cost", 3, 6, "parallel.pipeline: found 6 stages .* for 3 layers, .* use at most 5 stages"),
        ("cost", 3, 0, "parallel.pipeline: found 0 stages"),
        ([2, 2], 4, 3, r"parallel.split: found \[2, 2\]: it has 2 entries, expected one for each of 3"),
        ([2, 0, 2], 4, 3, r"parallel.split: found \[2, 0, 2\]: stage 1 has 0 layers, expected at least 1"),
        ([5, -1], 4, 2, r"parallel.split: found \[5, -1\]: stage 1 has -1 layers"),
        ([2, 2, 1], 4, 3, r"parallel.split: found \[2, 2, 1\]: its sum is 5, .* which is 4"),
        ([3], 4, 1, "parallel.split: .* its sum is 3"),
        ("evn", 4, 2, "parallel.split: found 'evn', .*did you mean 'even'"),
    ],
)
def test_mistakes_are_named(split: Any, layers: int, stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        partition(split, layers, stages, uniform(layers))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_are_times(bad: float) -> None:
    with pytest.raises(ValueError, match="expected finite numbers from 0"):
        partition("cost", 2, 2, LayerCosts(0.0, (1.0, bad), 0.0))


def test_many_layers_and_stages_are_divided() -> None:
    """Far more divisions than could be tried one by one; no stage can take less than the longest layer."""
    costs = LayerCosts(0.2, tuple(1.0 + 0.37 * (layer % 7) for layer in range(128)), 9.3)
    parts = partition("cost", 128, 64, costs)
    assert [layer for part in parts for layer in part] == list(range(128))
    longest = max(times(sizes_of("cost", 128, 64, costs), costs))
    assert longest == Fraction(costs.head)  # the head has a stage to itself


def test_the_division_needs_no_torch() -> None:
    code = "import sys, hexad.parallel.pipeline.partition; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
