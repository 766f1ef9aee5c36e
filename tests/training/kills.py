"""kill -9 at random moments of random ranks, and what became of the run."""

import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from .command import Process, RunFile


@dataclass(frozen=True)
class Kill:
    """One of them.

    Attributes:
        rank: that was killed.
        step: last one in metrics.jsonl before.
        saved: newest complete checkpoint before.
        resumed: the step the restarted run went on after.
        saving: whether a checkpoint was being written.
        seconds: from the kill to new steps in metrics.jsonl.
    """

    rank: int
    step: int
    saved: int
    resumed: int
    saving: bool
    seconds: float


def kill_at_random(
    run: RunFile, process: Process, world: int, chance: random.Random, longest: float, timeout: float = 120.0
) -> Kill:
    """Kill a rank up to ``longest`` seconds from now, in one of three cases while a checkpoint is written,
    and wait until the restarted run trains.

    Raises:
        AssertionError: it does not within ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    rank = chance.randrange(world)
    wanted = chance.random() < 1 / 3
    time.sleep(chance.uniform(0, longest))
    while wanted and not _saving(run) and time.monotonic() < end:
        time.sleep(0.0005)
    victim = process.ranks()[rank]
    saved, saving = max(run.checkpoints, default=0), _saving(run)
    path = run.directory / "metrics.jsonl"
    step, before = _lines(path), len(_resumed(run))
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    # Lines of steps that will be made again are removed. Without one rank the others end at most a step more.
    while len(_resumed(run)) == before or _lines(path) <= step + 2:
        assert process.popen.poll() is None, process.wait().err
        assert time.monotonic() < end, "it did not go on"
        time.sleep(0.01)
    return Kill(rank, step, saved, _resumed(run)[-1], saving, time.monotonic() - began)


def _saving(run: RunFile) -> bool:
    return next((run.directory / "checkpoints").glob(".step-*.partial"), None) is not None


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _resumed(run: RunFile) -> list[int]:
    """The steps that restarts have gone on after."""
    text = (run.directory / "log-rank0.txt").read_text()
    return [int(step) for step in re.findall(r"restart \d+ of \d+: resuming after step (\d+)", text)]
