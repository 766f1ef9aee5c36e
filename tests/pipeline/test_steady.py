"""A schedule with most of its steady state left out stands for the complete one."""

from collections.abc import Iterator
from random import Random

import pytest

from hexad.config import ConfigError, HexadError
from hexad.model.configuration import load_config
from hexad.parallel.pipeline.schedule import Schedule, Shortened, shortened
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.transfers import transfers
from hexad.parallel.pipeline.validate import validate
from hexad.planning import Resolved, memory, resolve, smallest_world
from hexad.topology.layout import Layout

MESSAGE = 16 * 64
"""Elements of a boundary tensor."""
NAMES = ["1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]


def unshortened(schedule: Schedule) -> Shortened:
    return Shortened(schedule, (0,) * schedule.pipeline, (0,) * schedule.pipeline)


def resolved(*overrides: str) -> Resolved:
    small = ["model.hidden=64", "model.vocab=300", "data.sequence=16", "batch.micro=1"]
    config = load_config(None, [*small, *overrides])
    return resolve(config, Layout.from_settings(config.parallel, smallest_world(config)))


def cases(seed: int) -> Iterator[list[str]]:
    """Settings of random pipelines with long steps."""
    rng = Random(seed)
    while True:
        pipeline, name = rng.choice([1, 2, 3, 4, 6, 8]), rng.choice([*NAMES, "gpipe"])
        virtual = rng.choice([1, 2, 3]) if name in ("interleaved", "gpipe") else 1
        stages = pipeline * max(virtual, 2)
        data = rng.choice([1, 2, 4])
        yield [
            f"parallel.pipeline={pipeline}",
            f"parallel.schedule={name}",
            f"parallel.virtual_stages={virtual}",
            f"parallel.data={data}",
            f"parallel.zero={rng.randrange(4)}",
            f"parallel.bucket_mb={rng.choice([0.01, 25])}",
            f"model.layers={rng.randint(stages, 3 * stages)}",
            f"batch.global={data * rng.randint(1, 12 * pipeline + 120)}",
            f"memory.recompute={rng.choice(['none', 'selective', 'full'])}",
            f"run.device={rng.choice(['cpu', 'auto'])}",
            *([f"parallel.schedule_group={rng.randint(1, 9)}"] if name == "interleaved" else []),
        ]


def compare(seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions from shortened and from complete schedules, of many cases, are the same where all stages
    cost the same (every second case). Else ranks whose stages cost less may get ahead for longer than what is
    kept, by a message."""
    shorter = 0
    for number, overrides in zip(range(count), cases(seed)):
        run = resolved(*overrides)
        with monkeypatch.context() as patch:
            if number % 2:
                patch.setattr(memory, "transfers", lambda schedule, costs: transfers(schedule))
            plans = memory.per_pipeline_rank(run)
            patch.setattr(memory, "shortened", unshortened)
            whole = memory.per_pipeline_rank(run)
        message = MESSAGE * memory.execution(run.config, run.layout).byte
        assert all(abs(plan.total - other.total) <= message for plan, other in zip(plans, whole)), overrides
        assert plans == whole or not number % 2, overrides
        shorter += shortened(run.plan.schedule).schedule.microbatches < run.plan.schedule.microbatches
    assert shorter > count / 3


def test_the_memory_plan_is_that_of_all_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(1, 20, monkeypatch)


@pytest.mark.slow
def test_the_memory_plan_is_that_of_all_microbatches_in_many_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(2, 3000, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pipeline", [1, 4])
def test_what_is_kept_is_valid_and_the_same_actions(name: str, pipeline: int) -> None:
    virtual = 2 if name == "interleaved" else 1
    whole = build_schedule(name, pipeline, 203, virtual)
    short = shortened(whole, keep=12)
    assert short.schedule.microbatches < 100
    validate(short.schedule)
    assert short.schedule.placement == whole.placement
    left_out = whole.microbatches - short.schedule.microbatches
    for rank, actions in enumerate(short.schedule.ranks):
        for position, action in enumerate(actions):
            original = whole.ranks[rank][short.original(rank, position)]
            assert original[:2] == action[:2]
            assert original.microbatch - action.microbatch in (0, left_out)
        assert short.original(rank, len(actions) - 1) == len(whole.ranks[rank]) - 1


def test_a_schedule_without_a_steady_state_stays() -> None:
    whole = build_schedule("gpipe", 2, 300)
    assert shortened(whole).schedule is whole


def test_schedules_and_worlds_that_nobody_can_list_are_refused() -> None:
    with pytest.raises(HexadError, match="found 100000000 microbatches on 4 stage"):
        build_schedule("zb_v", 2, 100_000_000)
    with pytest.raises(ConfigError, match="world: found 1000000000 ranks, expected at most 4194304"):
        Layout(world=10**9)


@pytest.mark.parametrize(("override", "says"), [
    ("batch.global=1048577", "makes 1048577 microbatches in a step on 1 stage, more than 1048576 in all"),
    ("parallel.pipeline=60000", "found 60000 stages"),
])  # fmt: skip
def test_what_would_take_minutes_is_refused_at_once(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(override)
