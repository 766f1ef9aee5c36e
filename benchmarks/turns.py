"""Programs of several ranks that are started together and then alternate, a step each.

A rank runs ``python SCRIPT --worker ...`` with :func:`serve`; all but one program sleep at any time.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Step = Callable[[str], dict[str, Any]]
"""What a rank does at a command; returns figures to be reported."""


def serve(start: Callable[[], Step], world: int) -> None:
    """One rank: a step per line of stdin, a JSON line per step on what was stdout.

    What libraries print goes to stderr.
    """
    import torch
    import torch.distributed as dist

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    step = start()
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        if world > 1:
            dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        seconds = step(line.strip())
        figures = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        figures["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(figures | seconds), file=out, flush=True)


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """The ranks of one program, waiting for their turns.

    Args:
        commands: one per rank.
        environment: additions for all ranks.
        address: of rank 0.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environment: dict[str, str] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        common = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(len(commands)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(free_port()),
            **(environment or {}),
        }
        pipe = subprocess.PIPE
        self.ranks = [
            subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                text=True,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, command in enumerate(commands)
        ]
        self.steps: list[list[dict[str, Any]]] = []

    def wait(self) -> None:
        """Until all ranks have started."""
        for rank in self.ranks:
            if rank.stdout is None or rank.stdout.readline() != "ready\n":
                self.kill()
                raise RuntimeError(f"a rank did not start: {' '.join(map(str, rank.args))}")  # type: ignore

    def step(self, command: str = "step") -> list[dict[str, Any]]:
        """Let all ranks make one step; their figures."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{command}\n")
            rank.stdin.flush()
        lines = [rank.stdout.readline() for rank in self.ranks if rank.stdout]
        if not all(lines):
            self.kill()
            raise RuntimeError(f"a rank died: {' '.join(map(str, self.ranks[0].args))}")  # type: ignore
        self.steps.append([json.loads(line) for line in lines])
        return self.steps[-1]

    def close(self) -> None:
        """Let the ranks end."""
        for rank in self.ranks:
            rank.communicate()

    def kill(self) -> None:
        """End the ranks at once."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def figures(self) -> dict[str, float]:
        """Medians over all steps but the first."""
        steps = self.steps[1:]
        return {
            "step_seconds": median(wall(step) for step in steps),
            "cpu_seconds": median(sum(rank["cpu"] for rank in step) for step in steps),
            "peak_rss_mb": max(rank["rss"] for rank in steps[-1]),
            "first_loss": _loss(self.steps[0]),
            "last_loss": _loss(self.steps[-1]),
        }


def wall(step: Sequence[dict[str, Any]]) -> float:
    """Seconds of the slowest rank."""
    return max(rank["wall"] for rank in step)


def _loss(step: Sequence[dict[str, Any]]) -> float:
    """Of the first rank that knows it."""
    return next(rank["loss"] for rank in step if rank["loss"] is not None)
