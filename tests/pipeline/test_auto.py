"""The search: never worse than what has a name, always valid, always within memory."""

import time
from collections.abc import Callable
from random import Random

import pytest

from hexad.parallel.pipeline.schedule import Schedule, ScheduleError, looped, v_shaped
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.schedules.auto import StageRanks, named, placements, search
from hexad.parallel.pipeline.simulate import Costs, peak_memory, simulate
from hexad.parallel.pipeline.validate import validate

Case = tuple[int, int, int, float | None, Callable[[StageRanks], Costs | None]]

PARTS = 6
"""Finest parts of a rank's share in random costs; 1, 2 and 3 stages per rank divide them."""


def random_case(rng: Random) -> Case:
    """Pipeline, microbatches, stages per rank, memory and costs: even or not, with or without messages."""
    pipeline, microbatches = rng.randint(1, 8), rng.choice([rng.randint(1, 8), rng.randint(1, 25)])
    virtual = rng.choice([1, 1, 2, 3])
    memory = rng.choice([None, max(1.7, pipeline), max(1.7, rng.uniform(0.4, 2.2) * pipeline)])
    spread, transfer = rng.choice([0, 0.1, 0.6]), rng.choice([0, 0, 0.2, 0.4])
    times = rng.choice([(1, 1, 1), (1, 1.3, 0.7), [rng.uniform(0.2, 2) for _ in range(3)]])
    parts = [1 + spread * rng.uniform(-1, 1) for _ in range(PARTS * pipeline)]
    uneven_memory, missing = rng.random() < 0.3, rng.random() < 0.1

    def costs(placement: StageRanks) -> Costs | None:
        stages = len(placement)
        if missing and placement == v_shaped(pipeline) != looped(pipeline, 2):
            return None
        count = len(parts) // stages
        shares = [sum(parts[stage * count : (stage + 1) * count]) / PARTS for stage in range(stages)]
        f, b, w = (tuple(seconds * share for share in shares) for seconds in times)
        held = tuple(shares) if uneven_memory else (pipeline / stages,) * stages
        return Costs(f, b, w, transfer, held)

    return pipeline, microbatches, virtual, memory, costs


def check(case: Case, effort: int) -> float | None:
    """Search one case; return how much sooner it ends than the best named one that fits, relatively."""
    pipeline, microbatches, virtual, memory, costs = case
    schedule = search(pipeline, microbatches, virtual, costs, memory, effort=effort)
    validate(schedule)
    planned = costs(schedule.placement)
    assert planned is not None
    assert (schedule.name, schedule.pipeline, schedule.microbatches) == ("auto", pipeline, microbatches)
    assert schedule.placement in placements(pipeline, virtual)
    timeline = simulate(schedule, planned)
    limit = default_memory(case) if memory is None else memory
    assert max(peak_memory(schedule, planned)) <= limit + 1e-6
    best = float("inf")
    for placement in placements(pipeline, virtual):
        if (theirs := costs(placement)) is None:
            continue
        for other in named(pipeline, microbatches, placement):
            if max(peak_memory(other, theirs)) <= limit:
                best = min(best, simulate(other, theirs).makespan)
    assert timeline.makespan <= best * (1 + 1e-8)
    return None if best == float("inf") else 1 - timeline.makespan / best


def default_memory(case: Case) -> float:
    pipeline, _, virtual, _, costs = case
    placement = next(option for option in placements(pipeline, virtual) if costs(option) is not None)
    planned = costs(placement)
    assert planned is not None
    return pipeline * max(
        sum(held for held, owner in zip(planned.activation, placement) if owner == rank)
        for rank in range(pipeline)
    )


def sweep(seed: int, count: int, effort: int) -> None:
    gains = []
    for index in range(count):
        case = random_case(Random(f"{seed} {index}"))
        try:
            gain = check(case, effort)
        except AssertionError as error:
            raise AssertionError(f"case {index} of seed {seed}: {case[:4]}") from error
        if case[0] > 1 and gain is not None:
            gains.append(gain)
    assert sum(gain > 1e-6 for gain in gains) > 0.6 * len(gains)


def test_random_cases() -> None:
    sweep(seed=1, count=100, effort=6_000)


@pytest.mark.slow
def test_many_random_cases() -> None:
    sweep(seed=2, count=2000, effort=10_000)


def test_strictly_better_than_all_with_a_name() -> None:
    """Four ranks, four microbatches, equal costs: ZB-H1 takes 15 and ZB-V 15, the search less."""
    costs = {per_rank: Costs.uniform(4 * per_rank, per_rank) for per_rank in (1, 2)}

    def makespan(schedule: Schedule) -> float:
        return simulate(schedule, costs[schedule.stages // 4]).makespan

    schedule = build_schedule("auto", 4, 4, memory=4)
    named_ones = [
        other
        for placement in placements(4, 1)
        for other in named(4, 4, placement)
        if max(peak_memory(other, costs[len(placement) // 4])) <= 4
    ]
    assert len(named_ones) == 8
    assert min(map(makespan, named_ones)) == 15
    assert makespan(schedule) <= 13.5


def test_one_stage_per_rank_only() -> None:
    schedule = search(4, 9, costs=Costs.uniform(4, 1, 1, 1.5, 0.5), memory=3)
    assert schedule.placement == looped(4, 1)
    assert max(validate(schedule).peak_activations) <= 3
    assert search(4, 9, among=[v_shaped(4)]).placement == v_shaped(4)


def test_memory_is_made_use_of() -> None:
    spans = [
        simulate(search(4, 12, costs=Costs.uniform(4), memory=memory), Costs.uniform(4)).makespan
        for memory in range(1, 8)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > 2 * spans[-1]


def test_every_rank_finds_the_same() -> None:
    case = random_case(Random(5))
    pipeline, microbatches, virtual, memory, costs = case
    schedules = {search(pipeline, microbatches, virtual, costs, memory).ranks for _ in range(3)}
    assert len(schedules) == 1


def test_too_little_memory() -> None:
    with pytest.raises(
        ScheduleError, match=r"found activation memory for 0.9 per rank, expected at least 1:"
    ):
        search(4, 8, memory=0.9)
    assert max(validate(search(4, 8, costs=Costs.uniform(4), memory=1)).peak_activations) == 1
    with pytest.raises(ScheduleError, match="no placement of 3 stages per rank has costs"):
        search(4, 8, 3, Costs.uniform(4))


def test_without_effort_something_is_found_all_the_same() -> None:
    schedule = search(4, 50, memory=1.5, effort=0)
    validate(schedule)
    assert max(peak_memory(schedule, Costs.uniform(schedule.stages, schedule.stages // 4))) <= 1.5


def test_large_steps_take_bounded_time() -> None:
    begin = time.process_time()
    schedule = search(16, 128)
    assert time.process_time() - begin < 10
    validate(schedule)
