"""Lower bounds of the search, beside layouts that are evaluated without them."""

import json
from collections.abc import Iterator
from math import inf
from random import Random
from typing import Any

import pytest

from hexad import Layout
from hexad.config import ConfigError
from hexad.planning import resolve
from hexad.planning.choices import LayerLayout, PipelineLayout, Variant
from hexad.planning.device_memory import device_memory
from hexad.planning.evaluation import Memories, Steps
from hexad.planning.job import Job
from hexad.planning.memory import largest, per_pipeline_rank
from hexad.planning.plan import plan, planned_config, read_cluster
from hexad.planning.search import Search
from hexad.planning.step_time import Predictor


def _search(model: str, gpus: int, sequence: int, sequences: int, gib: int) -> Search:
    target = read_cluster(f"h100:{gpus}")
    numbers = {"data.sequence": sequence, "batch.global": sequences, "precision.dtype": "bf16"}
    config = planned_config(model, [f"{key}={value}" for key, value in numbers.items()], target)
    return Search(config, target.cluster, gib * 2**30)


def _chosen(search: Search, number: int, seed: int) -> Iterator[tuple[LayerLayout, PipelineLayout]]:
    """Layouts, chosen at random."""
    random, grids = Random(seed), list(search.choices.grids())
    while number:
        grid = random.choice(grids)
        pipelines = list(search.choices.pipelines(grid))
        if pipelines:
            yield grid, random.choice(pipelines)
            number -= 1


def _evaluated(
    search: Search, grid: LayerLayout, choice: PipelineLayout
) -> Iterator[tuple[Variant, Memories, float]]:
    """Of every kind of recompute that fits, the variant in which it concerns the fewest layers, and its
    seconds, found without bounds on time."""
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
            assert search.bounds.grid(grid) <= seconds * (1 + 1e-9), (grid, choice)
            for tight in (False, True):
                bound = search.bounds.of(grid, choice, tight=tight)[variant.recompute]
                assert bound.seconds <= seconds * (1 + 1e-9), (grid, choice, variant, tight)
                least = memories.at_least(variant, bound.part).layers
                assert variant.layers is None or (least is not None and least <= variant.layers)
    assert fitting > number // 2


def _by_hand(search: Search, grid: LayerLayout, choice: PipelineLayout) -> float:
    """The fewest seconds of all variants of a pipeline, each resolved and predicted in full."""
    best = inf
    for order in search.choices.orders(search.choices.layout(grid, choice.pipeline)):
        for recompute in search.choices.recomputes:
            most = search.base.model.layers if recompute != "none" and search.choices.some_layers else 0
            for layers in (None, *range(1, most)):
                try:
                    resolved = search.choices.resolved(
                        grid, choice, search.choices.microbatches(grid, choice.pipeline)
                    )
                    variant = search.choices.variant(resolved, Variant(order, recompute, layers))
                    assert variant is not None
                    config = variant.config
                    again = resolve(config, Layout.from_settings(config.parallel, search.choices.world))
                except (ConfigError, AssertionError):
                    continue
                total = device_memory(largest(per_pipeline_rank(again)).total, again).total
                if total <= search.capacity:
                    best = min(best, Predictor(Job.of(again), search.cluster).step.total)
    return best


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "gpipe"])
@pytest.mark.parametrize("percent", [60, 90, 97, 99.9, 100])
def test_little_is_missing(schedule: str, percent: float) -> None:
    """A GPU on which one pipeline just does, or does not, fit without recompute."""
    target = read_cluster("h100:8")
    settings = ["model.layers=6", "model.vocab=32000", "data.sequence=4096", "batch.global=32"]
    config = planned_config("llama3-8b", [*settings, "precision.dtype=bf16"], target)
    fixed = frozenset({"parallel.split", "parallel.tensor_chunks"})
    search = Search(config, target.cluster, 2**40, fixed)
    grid = LayerLayout(1, 1, "ring", 1, 1, 2)
    choice = PipelineLayout(2, 3 if schedule == "interleaved" else 1, schedule, 1)
    whole = search._evaluate(grid, choice, inf)
    assert whole is not None and whole.resolved.config.memory.recompute == "none"
    search = Search(config, target.cluster, int(whole.device.total * percent / 100), fixed)
    candidate = search._evaluate(grid, choice, inf)
    seconds = inf if candidate is None else candidate.step.total
    assert seconds == pytest.approx(_by_hand(search, grid, choice), rel=1e-3)


@pytest.mark.parametrize(
    "fixed",
    [
        {"memory.recompute": "full"},
        {"memory.recompute": "full", "memory.recompute_layers": 1},
        {"memory.recompute_layers": 2},
        {"memory.recompute": "selective", "memory.offload": "optimizer"},
        {"parallel.order": "tensor-context-expert-pipeline-data", "parallel.pipeline": 2},
        {"parallel.replicas": 2},
        {"parallel.replicas": 4, "parallel.zero": 2},
        {"parallel.schedule": "gpipe", "parallel.pipeline": 2},
        {"parallel.data": 2},
        {"memory.recompute_parts": ["norms"]},
    ],
    ids=str,
)
def test_what_is_fixed_holds_and_is_bounded(fixed: dict[str, Any]) -> None:
    """In all listed layouts; and layouts of chosen pipelines take no less than their bounds."""
    settings = [f"{key}={json.dumps(value)}" for key, value in fixed.items()]
    sizes = ["model.layers=6", "model.vocab=32000", "parallel.context=1"]
    result = plan(
        *("llama3-8b", "h100:8"),
        sequence=4096,
        global_batch=32,
        fix=[*settings, "parallel.context=1"],
        overrides=sizes[:2],
    )
    assert result.layouts
    for candidate in result.layouts:
        tree = candidate.resolved.config.model_dump(mode="json", by_alias=True)
        for key, value in fixed.items():
            group, _, name = key.partition(".")
            if name != "recompute_layers" or candidate.resolved.config.memory.recompute != "none":
                assert tree[group][name] == value, key
    target = read_cluster("h100:8")
    numbers = ["data.sequence=4096", "batch.global=32", "precision.dtype=bf16"]
    config = planned_config("llama3-8b", [*sizes, *numbers, *settings], target)
    search = Search(config, target.cluster, target.capacity, frozenset({*fixed, "parallel.context"}))
    best = min(candidate.step.total for candidate in result.layouts)
    for grid, choice in _chosen(search, 10, seed=len(settings)):
        seconds = _by_hand(search, grid, choice)
        bounds = search.bounds.of(grid, choice, tight=True).values()
        least = min((bound.seconds for bound in bounds), default=inf)
        assert least <= seconds * (1 + 1e-9), (grid, choice)
        assert best <= seconds * (1 + 1e-3)
