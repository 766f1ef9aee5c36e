"""Ranks that are killed, and runs that go on by themselves."""

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..pool import Pool
from .command import LOOPBACK, Process, listening, wait_until_gone
from .conftest import MakeRun
from .kills import kill_at_random

Start = Callable[..., Process]


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_ranks_restart_and_lose_nothing_but_steps(
    make_run: MakeRun, start: Start, pool: Pool, kills: int
) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    chance = random.Random(seed)
    run, reference = make_run(run={"steps": 10**6}), make_run()
    process = start(run.arguments("parallel.data=2", f"faults.restarts={kills}", "checkpoint.resume=never"))
    process.wait_for_step(run, 5)
    for _ in range(kills):
        kill = kill_at_random(run, process, 2, chance, longest=1.0)
        assert kill.resumed >= kill.saved
    ranks = process.ranks()
    os.kill(process.popen.pid, signal.SIGUSR1)  # pre-empted
    result = process.wait()
    assert result.status == 0, result.err
    assert "SIGUSR1: saved step" in result.err and "Traceback" not in result.err
    assert len(re.findall(r"rank \d \(process \d+\) was killed by SIGKILL; .*; restart", result.err)) == kills
    wait_until_gone(ranks.values())
    steps = len(run.losses)
    assert run.state()["step"] == steps
    assert reference.world(pool, 2, "parallel.data=2", f"run.steps={steps}") == [(0, "")] * 2
    assert run.losses == reference.losses


@pytest.mark.slow
def test_restarts_are_used_up(make_run: MakeRun, start: Start) -> None:
    run = make_run(run={"steps": 10**6})
    process = start(run.arguments("faults.restarts=1"))  # one rank is started by the agent too
    process.wait_for_step(run, 5)
    kill_at_random(run, process, 1, random.Random(0), longest=0.0)
    os.kill(process.ranks()[0], signal.SIGSEGV)
    result = process.wait()
    assert result.status == 1
    assert re.fullmatch(
        r"rank 0 \(process \d+\) was killed by SIGSEGV; .*, after 1 restarts? .*", result.error
    )
    assert "Segmentation fault" in (run.directory / "log-rank0.txt").read_text()


@pytest.mark.slow
def test_a_mistake_is_not_tried_again(make_run: MakeRun, start: Start) -> None:
    run = make_run(run={"steps": 10**6}, checkpoint={"every": 0})
    process = start(run.arguments("parallel.data=2", "faults.restarts=5"))
    process.wait_for_step(run, 2)
    (run.directory / "checkpoints").write_text("in the way")
    process.popen.send_signal(signal.SIGTERM)
    result = process.wait()
    assert result.status == 2 and "restart" not in result.err
    assert re.match(r"checkpoint of step \d+: cannot be written", result.error)


@pytest.mark.slow
def test_usr1_to_one_rank_stops_all(make_run: MakeRun, start: Start) -> None:
    run = make_run(run={"steps": 10**6}, checkpoint={"every": 0})
    process = start(run.arguments("parallel.tensor=2"))
    process.wait_for_step(run, 3)
    os.kill(process.ranks()[1], signal.SIGUSR1)
    result = process.wait()
    assert result.status == 0, result.err
    assert "SIGUSR1: saved step" in result.err and run.checkpoints == [len(run.losses)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at once", "in a rank"])
def test_usr1_before_the_first_step(make_run: MakeRun, start: Start, moment: str) -> None:
    """It waits until the run can save, or ends it in one line."""
    run = make_run(run={"steps": 10**6})
    layout = () if moment == "at once" else ("parallel.data=2",)
    process = start(run.arguments(*layout), interpreter=True)  # before it has imported anything
    if moment == "in a rank":
        while len(process.ranks()) < 2:
            assert process.popen.poll() is None
        os.kill(process.ranks()[1], signal.SIGUSR1)
    else:
        while b"hexad.cli.main" not in Path(f"/proc/{process.popen.pid}/cmdline").read_bytes():
            assert process.popen.poll() is None
        while not _blocks(process.popen.pid, signal.SIGUSR1):
            assert process.popen.poll() is None
        os.kill(process.popen.pid, signal.SIGUSR1)
    result = process.wait()
    assert result.status == 0 and "SIGUSR1: saved step 1 " in result.err, result.err
    assert "Traceback" not in result.err and run.checkpoints == [1]


def _blocks(process: int, number: signal.Signals) -> bool:
    """Whether a process holds a signal back."""
    match = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("moment", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
def test_ranks_end_with_a_command_that_is_killed_while_they_start(
    make_run: MakeRun, start: Start, moment: float
) -> None:
    run = make_run(run={"steps": 10**6})
    process = start(run.arguments("parallel.tensor=2"), interpreter=True)  # imports take longer than a moment
    while len(ranks := process.ranks()) < 2:
        assert process.popen.poll() is None
    time.sleep(moment)
    os.kill(process.popen.pid, signal.SIGKILL)
    wait_until_gone(ranks.values())
    assert not run.metrics


def test_ranks_of_one_host_listen_to_it_only_and_leave_nothing_behind(
    make_run: MakeRun, start: Start, tmp_path: Path
) -> None:
    """Stores take pickles: another host's bytes must not reach them. A launcher that is killed cannot remove
    its files."""
    run, scratch = make_run(run={"steps": 10**6}), tmp_path / "scratch"
    scratch.mkdir()
    process = start(run.arguments("parallel.data=2"), TMPDIR=str(scratch))
    process.wait_for_step(run, 2)
    ranks = process.ranks()
    assert len(ranks) == 2 and list(scratch.iterdir())
    heard = listening([process.popen.pid, *ranks.values()])
    assert heard["tcp"] | heard["tcp6"] <= LOOPBACK and heard["tcp"]
    assert not any(listening([process.popen.pid]).values())
    os.kill(process.popen.pid, signal.SIGKILL)
    wait_until_gone(ranks.values())
    assert not [path for path in scratch.iterdir() if path.name.startswith("hexad-launch-")]


def test_a_run_directory_in_use_is_refused(make_run: MakeRun, start: Start) -> None:
    run = make_run(run={"steps": 10**6})
    process = start(run.arguments())
    process.wait_for_step(run, 1)
    result = run.train()
    assert result.status == 2
    assert re.fullmatch(rf"run.dir: found .*, locked by process {process.popen.pid} on \S+; .*", result.error)
    os.kill(process.popen.pid, signal.SIGKILL)
    process.wait()
    assert run.train(f"run.steps={len(run.metrics) + 2}").status == 0


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["0", "1"])
def test_under_torchrun_too(make_run: MakeRun, tmp_path: Path, pool: Pool, shared: str) -> None:
    """Whether or not torchrun lends its store to the ranks (pytorch issue 135712)."""
    run, reference = make_run(run={"steps": 10**6}), make_run()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "3", "-m", "hexad.cli.main", *run.arguments("parallel.data=2")]
    process = Process(command, tmp_path, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared})
    try:
        process.wait_for_step(run, 5)
        for number in range(3):
            kill = kill_at_random(run, process, 2, random.Random(number), longest=0.5)
            assert kill.resumed >= kill.saved
        os.kill(process.ranks()[0], signal.SIGTERM)
        result = process.wait()
    finally:
        process.end()
    assert result.status == 0, result.err
    steps = len(run.losses)
    assert reference.world(pool, 2, "parallel.data=2", f"run.steps={steps}") == [(0, "")] * 2
    assert run.losses == reference.losses
