"""Killed ranks, killed commands, signals: nothing hangs, nothing is lost but what the last save missed."""

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from ..pool import Pool
from .command import FOUR, LONGEST, Process, RunFile, wait_until_gone
from .conftest import MakeRun

Start = Callable[..., Process]
TWO = ("parallel.data=2",)


def running_ranks(run: RunFile, process: Process, world: int) -> dict[int, int]:
    """rank -> process id of a command that has made ten steps."""
    process.wait_for_step(run, 10)
    ranks = process.ranks()
    assert sorted(ranks) == list(range(world))
    return ranks


def kill_the_command(run: RunFile, process: Process, rank: int, world: int) -> None:
    """Kill a running command and see its ranks end."""
    ranks = running_ranks(run, process, world)
    os.killpg(process.popen.pid, signal.SIGKILL)
    assert process.wait().status == -signal.SIGKILL
    wait_until_gone(ranks.values())


def kill_a_rank(run: RunFile, process: Process, rank: int, world: int) -> None:
    """Kill one rank of a running command and see the command end as it should."""
    ranks = running_ranks(run, process, world)
    os.kill(ranks[rank], signal.SIGKILL)
    result = process.wait()
    assert result.status == 1
    assert re.fullmatch(rf"rank {rank} \(process \d+\) was killed by SIGKILL; .*", result.error)
    wait_until_gone(ranks.values())
    assert run.checkpoints and run.newest.is_dir()


LAYOUTS = pytest.mark.parametrize(
    ("world", "layout"),
    [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)],
    ids=["two ranks", "four ranks"],
)
"""Two by default."""


@LAYOUTS
@pytest.mark.parametrize("killed", ["a rank", "the command"])
def test_a_killed_run_leaves_no_rank_behind_and_resumes_exactly(
    make_run: MakeRun, start: Start, pool: Pool, world: int, layout: tuple[str, ...], killed: str
) -> None:
    run, reference = make_run(run={"steps": 10**6}), make_run()  # it is not over before it is killed
    kill = kill_a_rank if killed == "a rank" else kill_the_command
    process = start(run.arguments(*layout), interpreter=killed == "a rank")
    kill(run, process, world // 2, world)
    done = len(run.losses)
    assert done >= 10
    more = (*layout, f"run.steps={done + 4}")
    assert run.world(pool, world, *more) == [(0, "")] * world
    assert reference.world(pool, world, *more) == [(0, "")] * world
    assert run.losses == reference.losses
    last = done + 4
    assert run.checkpoints == sorted({*range(4, last + 1, 4), last})[-3:]
    assert run.newest.name == f"step-{last:08d}"


@pytest.mark.slow
def test_so_it_does_with_synchronous_saves_and_the_same_command(
    make_run: MakeRun, start: Start, pool: Pool
) -> None:
    # Steps long enough for the kill to come before the last one.
    settings = {"run": {"steps": 24}, "batch": {"global": 64}, "checkpoint": {"asynchronous": False}}
    run, reference = make_run(**settings), make_run(**settings)
    arguments = run.arguments("parallel.tensor=2")
    kill_a_rank(run, start(arguments), 0, 2)
    again = start(arguments).wait()
    assert again.status == 0, again.err
    assert "resuming from" in again.err
    assert reference.world(pool, 2, "parallel.tensor=2") == [(0, "")] * 2
    assert run.losses == reference.losses


@pytest.mark.slow
def test_a_rank_of_a_pipeline_killed_in_the_middle_of_a_step(make_run: MakeRun, start: Start) -> None:
    """Its peers wait for activations and gradients that will never come."""
    run = make_run(
        run={"steps": 10**6},
        model={"layers": 4, "hidden": 128, "ffn_hidden": 256},
        batch={"micro": 1, "global": 192},
        parallel={"pipeline": 3, "schedule": "zb_h1"},
    )
    process = start(run.arguments())
    process.wait_for_step(run, 1)
    took = run.metrics[0]["step_seconds"]
    time.sleep(0.3 * took)
    ranks = process.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    result = process.wait()
    assert run.metrics, "the step before is recorded"
    assert result.status == 1
    assert re.fullmatch(r"rank 1 \(process \d+\) was killed by SIGKILL; .*", result.error)
    wait_until_gone(ranks.values())


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_stops_one_rank(
    make_run: MakeRun, start: Start, alone: RunFile, number: signal.Signals
) -> None:
    run = make_run(run={"steps": 2000}, checkpoint={"every": 0})
    process = start(run.arguments())
    process.wait_for_step(run, 3)
    os.killpg(process.popen.pid, number)
    result = process.wait()
    assert result.status == 0, result.err
    assert "Traceback" not in result.err and f"{number.name}: saved step" in result.err
    assert run.state()["reason"] == "signal" and run.state()["step"] == len(run.losses)
    done = len(run.losses)
    assert run.train(f"run.steps={done + 2}").status == 0
    count = min(24, done + 2)
    assert run.losses[:count] == alone.losses[:count]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 4), (signal.SIGINT, 2)])
def test_a_signal_saves_and_stops_all_ranks(
    make_run: MakeRun, start: Start, four: RunFile, pool: Pool, number: signal.Signals, ranks: int
) -> None:
    """And is named once, in one line."""
    layout = FOUR if ranks == 4 else ("parallel.data=2",)
    steps = 24 if ranks == 4 else 2000
    run = make_run(run={"steps": steps}, checkpoint={"every": 0})
    process = start(run.arguments(*layout))
    process.wait_for_step(run, 5)
    processes = process.ranks()
    os.killpg(process.popen.pid, number)  # as the terminal does for Ctrl-C
    result = process.wait()
    assert result.status == 0, result.err
    assert "Traceback" not in result.err and "hexad: error" not in result.err
    named = [line for line in result.err.splitlines() if "SIG" in line or "Interrupt" in line]
    step = len(run.losses)
    assert [line.split(maxsplit=1)[1] for line in named] == [
        f"{number.name}: saved step {step} and stopped; the same command resumes"
    ]
    wait_until_gone(processes.values())
    assert run.checkpoints == [len(run.losses)] and len(run.losses) < steps
    assert run.state()["reason"] == "signal"
    if ranks == 4:
        assert run.world(pool, 4, *layout) == [(0, "")] * 4
        assert run.losses == four.losses


def test_a_signal_before_the_first_step_is_told_in_one_line(make_run: MakeRun, start: Start) -> None:
    run = make_run()
    process = start(run.arguments("parallel.tensor=2"))
    end = time.monotonic() + LONGEST
    while len(process.ranks()) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(process.popen.pid, signal.SIGTERM)
    result = process.wait()
    assert result.status == 128 + signal.SIGTERM
    assert result.error == "stopped by SIGTERM at once, without another save"
    assert not run.checkpoints
