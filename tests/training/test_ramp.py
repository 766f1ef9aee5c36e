"""Batches that grow (``batch.ramp``): sizes, losses in layouts and after resuming, learning rates."""

from itertools import pairwise

import pytest

from hexad.config.schema import BatchSettings
from hexad.model.configuration import build_config
from hexad.optim.schedule import learning_rate
from hexad.parallel.pipeline.simulate import Costs, peak_memory
from hexad.planning import resolve, training_schedule
from hexad.topology.layout import Layout

from ..pool import Pool
from .conftest import MakeRun

BATCH = {"micro": 1, "global": 12, "ramp": [4, 4, 30]}
SIZES = [4, 4, 4, 4, 8, 8, 12, 12, 12]
"""Of steps that begin after 0, 4, 8, 12, 16, 24, 32, ... samples: 8 is due from 15 on, 12 after 30."""
PIPELINE = ("parallel.data=2", "parallel.pipeline=2")


def sizes_of(metrics: list[dict[str, int]]) -> list[int]:
    """Samples of each step."""
    return [after - before for before, after in pairwise([0, *(line["samples"] for line in metrics)])]


def test_a_run_with_growing_batches(make_run: MakeRun, pool: Pool) -> None:
    """Its samples and losses are the same on data 2 x pipeline 2, and if it resumes in the ramp."""
    rates = {"kind": "wsd", "warmup": 2, "decay_steps": 2, "min_lr": 0.001}
    settings = {"run": {"steps": len(SIZES)}, "batch": BATCH, "model": {"layers": 2}, "lr_schedule": rates}
    alone, divided, resumed = (make_run(**settings) for _ in range(3))
    assert alone.train().status == 0
    assert sizes_of(alone.metrics) == SIZES
    assert divided.world(pool, 4, *PIPELINE) == [(0, "")] * 4
    assert resumed.train("run.steps=5").status == 0  # the sixth step is one of 8 samples
    assert resumed.world(pool, 4, *PIPELINE) == [(0, "")] * 4
    for run in (divided, resumed):
        assert sizes_of(run.metrics) == SIZES
        assert run.losses == pytest.approx(alone.losses, rel=1e-9)
    # Learning rates go by samples: warm-up over 2, and decay over the last 2, times 12 sequences.
    schedule = build_config({"lr_schedule": rates}).lr_schedule
    done = [line["samples"] / 12 for line in alone.metrics]
    wanted = [learning_rate(schedule, 0.01, done[-1], step) for step in done]
    assert [line["lr"] for line in alone.metrics] == pytest.approx(wanted, rel=1e-12)
    assert wanted[0] == pytest.approx(0.01 * 4 / 12 / 2) and wanted[-1] == pytest.approx(0.001)


def test_numbers_of_steps_and_samples() -> None:
    batch = BatchSettings.model_validate(BATCH)
    assert [batch.samples(steps) for steps in range(10)] == [0, 4, 8, 12, 16, 24, 32, 44, 56, 68]
    assert batch.samples(109) == 68 + 100 * 12
    config = build_config({"run": {"steps": 9}, "batch": BATCH, "model": {"vocab": 300}})
    assert config.complete_steps == 68 / 12
    assert resolve(config, Layout(world=1)).config.lr_schedule.decay_steps == 6
    constant = BatchSettings.model_validate({**BATCH, "ramp": None})
    assert (constant.size(3), constant.samples(5), constant.steps(61)) == (12, 60, 5)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2), ("auto", 2)])
def test_a_smaller_step_holds_no_more_than_the_plan(schedule: str, virtual: int) -> None:
    """Memory is planned for the largest batch."""
    parallel = {"pipeline": 4, "schedule": schedule, "virtual_stages": virtual}
    model = {"layers": 8, "hidden": 32, "heads": 4, "vocab": 300}
    tree = {"model": model, "batch": {"micro": 1, "global": 16, "ramp": [1, 1, 99]}, "parallel": parallel}
    resolved = resolve(build_config(tree), Layout(world=4, pipeline=4))
    plan = resolved.plan
    costs = Costs.uniform(plan.schedule.stages, virtual)
    most = peak_memory(plan.schedule, costs)
    for count in range(1, 17):
        smaller = training_schedule(resolved.config, plan, count)
        assert smaller.microbatches == count and smaller.placement == plan.schedule.placement
        assert all(held <= limit for held, limit in zip(peak_memory(smaller, costs), most))
