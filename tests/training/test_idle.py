"""Worlds that do not fit the layout: refused, or some ranks stand by."""

import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

from hexad.config import ConfigError
from hexad.model.configuration import load_config
from hexad.planning import working_layout

from ..pool import Pool
from .command import Process, RunFile, alive, wait_until_gone
from .conftest import MakeRun

Start = Callable[..., Process]
IDLE = "faults.idle_ranks=true"


@pytest.mark.parametrize(
    ("world", "overrides", "working"),
    [
        (3, ["parallel.tensor=2"], 2),
        (7, ["parallel.tensor=2"], 4),  # data 3 does not divide the global batch
        (7, ["parallel.tensor=3", "parallel.data=2"], 6),
        (8, [], 8),
        (5, ["batch.global=6", "batch.micro=2"], 3),
        (4, ["batch.global=12", "parallel.replicas=2", "parallel.zero=1"], 4),
        (3, ["batch.global=12", "parallel.replicas=2", "parallel.zero=1"], 2),
    ],
)
def test_how_many_ranks_work(world: int, overrides: list[str], working: int) -> None:
    config = load_config({"batch": {"micro": 1, "global": 8}}, [*overrides, IDLE])
    assert working_layout(config, world).world == working


def test_too_few_ranks_are_refused_all_the_same() -> None:
    config = load_config(None, ["parallel.tensor=4", IDLE])
    with pytest.raises(ConfigError, match="world 3"):
        working_layout(config, 3)


def test_ranks_stand_by_and_leave_with_the_others(make_run: MakeRun, alone: RunFile, pool: Pool) -> None:
    run = make_run()
    refused = run.world(pool, 3, "parallel.tensor=2")
    assert {status for status, _ in refused} == {2}
    for steps, world, layout in (
        (4, 4, ()),
        (8, 3, ("parallel.tensor=2",)),
        (10, 3, ()),
        (12, 2, ("batch.micro=4",)),
    ):
        assert run.world(pool, world, *layout, IDLE, f"run.steps={steps}") == [(0, "")] * world
    np.testing.assert_allclose(run.losses, alone.losses[:12], rtol=1e-9)
    log = (run.directory / "log-rank0.txt").read_text()
    assert "2 of 3 ranks train, 1 idle" in log and "1 of 2 ranks train, 1 idle" in log


def test_ranks_that_stand_by_are_told_of_a_mistake(make_run: MakeRun, pool: Pool) -> None:
    run = make_run()
    outcomes = run.world(pool, 3, "parallel.tensor=2", IDLE, "checkpoint.resume=must")
    assert {status for status, _ in outcomes} == {2} and len({message for _, message in outcomes}) == 1


@pytest.mark.slow
def test_ranks_that_stand_by_end_with_a_crash_and_a_signal(make_run: MakeRun, start: Start) -> None:
    run = make_run(run={"steps": 10**6})
    process = start(["train", *run.arguments("parallel.tensor=2", IDLE)[1:], "--nproc", "3"])
    process.wait_for_step(run, 5)
    ranks = process.ranks()
    assert len(ranks) == 3
    os.kill(ranks[2], signal.SIGTERM)  # alone: the ranks that work have not been asked
    process.wait_for_step(run, len(run.metrics) + 20)
    assert alive(ranks.values()) == list(ranks.values())
    os.kill(process.popen.pid, signal.SIGTERM)
    result = process.wait()
    assert result.status == 0, result.err
    wait_until_gone(ranks.values())
    process = start(["train", *run.arguments("parallel.tensor=2", IDLE)[1:], "--nproc", "3"])
    process.wait_for_step(run, len(run.metrics) + 3)
    ranks = process.ranks()
    os.kill(ranks[0], signal.SIGKILL)
    result = process.wait()
    assert result.status == 1 and "rank 0 " in result.error
    wait_until_gone(ranks.values())
