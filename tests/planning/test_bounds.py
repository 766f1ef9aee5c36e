"""Lower bounds of the search, beside layouts that are evaluated without them."""

from collections.abc import Iterator
from random import Random

import pytest

from hexad.config import ConfigError
from hexad.planning.bounds import Bound
from hexad.planning.choices import Grid, Pipeline, Variant
from hexad.planning.evaluation import Memories, Steps
from hexad.planning.plan import planned_config, read_cluster
from hexad.planning.search import Search


def _search(model: str, gpus: int, sequence: int, sequences: int, gib: int) -> Search:
    target = read_cluster(f"h100:{gpus}")
    numbers = {"data.sequence": sequence, "batch.global": sequences, "precision.dtype": "bf16"}
    config = planned_config(model, [f"{key}={value}" for key, value in numbers.items()], target)
    return Search(config, target.cluster, gib * 2**30)


def _chosen(search: Search, number: int, seed: int) -> Iterator[tuple[Grid, Pipeline]]:
    """Layouts, chosen at random."""
    random, grids = Random(seed), list(search.choices.grids())
    while number:
        grid = random.choice(grids)
        pipelines = list(search.choices.pipelines(grid))
        if pipelines:
            yield grid, random.choice(pipelines)
            number -= 1


def _evaluated(search: Search, grid: Grid, choice: Pipeline) -> Iterator[tuple[Variant, Memories, float]]:
    """Of every kind of recompute that fits, the variant in which it concerns the fewest layers, and its
    seconds, found without any bound."""
    try:
        steps = Steps(search.choices, search.predicted, grid, choice)
    except ConfigError:
        return
    memories = Memories(search.choices, search.room, steps.resolved)
    for order in search.choices.orders(steps.resolved.layout):
        for recompute in search.choices.recomputes:
            variant = memories.fewest(memories.at_least(Variant(order, recompute), 0.0))
            if variant is not None:
                yield variant, memories, steps.of(memories.planned(variant)[0])[1].total
                if recompute == "none":
                    break


CASES = [
    ("llama3-8b", 64, 8192, 256, 40),
    ("qwen3-30b-a3b", 64, 4096, 512, 60),
    ("llama3-70b", 256, 8192, 512, 79),
]
SLOW = [
    *CASES,
    ("gpt2-xl", 16, 1024, 128, 20),
    ("deepseek-v3", 512, 4096, 4096, 140),
    ("mixtral-8x7b", 64, 4096, 256, 79),
]


@pytest.mark.parametrize(
    ("case", "number"),
    [
        *((case, 20) for case in CASES[:2]),
        *(pytest.param(case, 100, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_nothing_is_below_its_bounds(case: tuple[str, int, int, int, int], number: int) -> None:
    search, fitting = _search(*case), 0
    for grid, choice in _chosen(search, number, seed=sum(case[1:])):
        for variant, memories, seconds in _evaluated(search, grid, choice):
            fitting += 1
            for tight in (False, True):
                bounds = search.bounds.of(grid, choice, tight=tight)
                bound = bounds.get(variant.recompute)
                if bound is None:  # something may fit that recomputes less, which takes less time
                    bound = Bound(min(one.seconds for one in bounds.values() if not one.part), 0.0)
                assert bound.seconds <= seconds * (1 + 1e-9), (grid, choice, variant, tight)
                least = memories.at_least(variant, bound.part).layers
                assert variant.layers is None or (least is not None and least <= variant.layers)
    assert fitting > number // 2
