"""Running the real command: in this process, as a process of its own, or as one rank of a pool's world."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hexad.checkpoint.manifest import read_manifest
from hexad.cli.main import run

from ..forks import Program
from ..pool import Pool

# Saves at 4, 8, ...; the learning rate does not depend on where a test stops.
SETTINGS: dict[str, Any] = {
    "run": {"steps": 12, "device": "cpu", "timeout": 60},
    "model": {"layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 32},
    "data": {"sequence": 16},
    "batch": {"micro": 1, "global": 4},
    "precision": {"dtype": "fp64"},
    "optimizer": {"lr": 0.01},
    "lr_schedule": {"warmup": 2, "decay_steps": 40},
    "checkpoint": {"every": 4, "keep": 3},
}
LONGEST = 240.0
"""Seconds after which a process is taken to hang: only a failing test waits for so long."""
FOUR = ("parallel.data=2", "parallel.tensor=2")


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a user's error; fails where there is more or less than one, or a traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("hexad: error: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("hexad: error: ")


@dataclass(frozen=True)
class RunFile:
    """A run.yaml and its run directory."""

    path: Path
    directory: Path

    def arguments(self, *overrides: str) -> list[str]:
        return ["train", str(self.path), *overrides]

    def train(self, *overrides: str) -> Result:
        """Train in this process, on one rank."""
        return call(*self.arguments(*overrides))

    def world(self, pool: Pool, ranks: int, *overrides: str) -> list[tuple[int, str]]:
        """Train as the ranks of a world that some launcher has started; (status, message) of each."""
        return pool.apart(ranks, _rank, [str(self.path), *overrides], free_port())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def losses(self) -> list[float]:
        """One loss per step, the steps being 1, 2, 3, ..."""
        metrics = self.metrics
        assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
        return [line["loss"] for line in metrics]

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return sorted(int(p.name.removeprefix("step-")) for p in self.directory.glob("checkpoints/step-*"))

    @property
    def newest(self) -> Path:
        """What ``latest`` names."""
        folder = self.directory / "checkpoints"
        return folder / (folder / "latest").read_text().strip()

    def state(self) -> dict[str, Any]:
        """What the newest checkpoint says of its progress and where it comes from."""
        manifest = read_manifest(self.newest)
        return manifest.origin | manifest.progress


def write_run(directory: Path, prefix: str, /, **groups: dict[str, Any]) -> RunFile:
    """A run.yaml of :data:`SETTINGS`, with some replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    tree = {name: dict(group) for name, group in SETTINGS.items()}
    tree["run"]["dir"] = str(directory / "run")
    tree["data"]["train"] = prefix
    for name, group in groups.items():
        tree.setdefault(name, {}).update(group)
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return RunFile(path, directory / "run")


def call(*arguments: str) -> Result:
    """The command in this process: what it costs is not one more import of torch."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(list(arguments))
    return Result(status, out.getvalue(), err.getvalue())


def _rank(rank: int, world: int, arguments: list[str], port: int) -> tuple[int, str]:
    """One rank as torchrun would start it."""
    with rank_variables(rank, world, port):
        return train_rank(arguments)


def train_rank(arguments: list[str]) -> tuple[int, str]:
    """Train as one rank of the world that the variables name; returns exit status and message.

    Args:
        arguments: a configuration and overrides.
    """
    from hexad.cli.outcome import attempt
    from hexad.cli.train import train_here
    from hexad.config import worded

    path, *overrides = arguments
    request = {"path": path, "overrides": overrides, "as_json": False}
    status, message, _ = attempt(lambda: train_here(request))
    return status, worded(message, lambda name: name)


@contextlib.contextmanager
def rank_variables(rank: int, world: int, port: int) -> Iterator[None]:
    """The variables that torchrun gives a rank."""
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}
    try:
        yield
    finally:
        for name in ("MASTER_ADDR", *names):
            del os.environ[name]


def listening(processes: Iterable[int]) -> dict[str, set[str]]:
    """The addresses at which processes listen, in hexadecimal as the kernel writes them, by version of IP."""
    addresses: dict[str, set[str]] = {"tcp": set(), "tcp6": set()}
    for process in processes:
        links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()]
        for version, known in addresses.items():
            for line in Path(f"/proc/{process}/net/{version}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in links:
                    known.add(local.partition(":")[0])
    return addresses


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1, as :func:`listening` has them."""


def free_port() -> int:
    """A port nobody listens on, below those that the kernel gives away: it is still free a moment later."""
    while True:
        port = random.SystemRandom().randrange(12_000, 28_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Process:
    """The command as a process of its own, leader of its process group.

    Args:
        interpreter: start Python anew, for the command and its ranks, where a fork would do.
    """

    def __init__(
        self,
        command: Sequence[str],
        where: Path,
        environment: dict[str, str] | None = None,
        interpreter: bool = False,
    ) -> None:
        self._out, self._err = where / "stdout", where / "stderr"
        start = subprocess.Popen if interpreter else Program
        with self._out.open("w") as out, self._err.open("w") as err:
            self.popen = start(
                command,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=os.environ | (environment or {}),
            )

    @classmethod
    def hexad(
        cls, arguments: Iterable[str], where: Path, interpreter: bool = False, **environment: str
    ) -> Process:
        command = [sys.executable, "-m", "hexad.cli.main", *arguments]
        return cls(command, where, environment, interpreter)

    def wait_for_step(self, run_file: RunFile, step: int, timeout: float = LONGEST) -> None:
        """Until metrics.jsonl has a line of ``step``."""
        path, end = run_file.directory / "metrics.jsonl", time.monotonic() + timeout
        while not path.exists() or len(path.read_bytes().splitlines()) < step:
            assert self.popen.poll() is None, self._err.read_text()
            assert time.monotonic() < end, f"no step {step} within {timeout:.0f} s"
            time.sleep(0.01)

    def ranks(self) -> dict[int, int]:
        """rank -> process id of the ranks this command has started."""
        processes = {}
        for process in children(self.popen.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                processes |= {rank: process for rank in [rank_of(process)] if rank is not None}
        return processes

    def wait(self, timeout: float = LONGEST) -> Result:
        status = self.popen.wait(timeout)
        return Result(status, self._out.read_text(), self._err.read_text())

    def end(self) -> None:
        """Whatever is left, at the end of a failed test."""
        for process in (*children(self.popen.pid), self.popen.pid):
            with contextlib.suppress(ProcessLookupError):
                if self.popen.poll() is None:
                    os.kill(process, signal.SIGKILL)
        self.popen.wait()


def children(process: int) -> list[int]:
    """Direct child processes."""
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


def rank_of(process: int) -> int | None:
    """Its rank; None of one that is being started."""
    name = Path(f"/proc/{process}/comm").read_text()
    if name.startswith("rank "):  # a fork
        return int(name.removeprefix("rank "))
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), None)


def alive(processes: Iterable[int]) -> list[int]:
    """Those that still run: not a zombie, all of whose threads have ended and with them its locks."""
    running = []
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" or len(os.listdir(f"/proc/{process}/task")) > 1:
                running.append(process)
    return running


def wait_until_gone(processes: Iterable[int], timeout: float = LONGEST) -> None:
    """Wait until none of them runs; fails after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    processes = list(processes)
    while alive(processes):
        assert time.monotonic() < end, f"still running after {timeout:.0f} s: {alive(processes)}"
        time.sleep(0.05)
