"""``hexad submit --engine ray`` on a real Ray of two nodes: a killed worker, and a node that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..training.command import call, write_run

pytest.importorskip("ray", reason="not found: ray; install hexad[ray]")
pytestmark = pytest.mark.slow
LONG = 600.0
"""Seconds after which something is taken never to happen."""
HEAD = ("ray", "start", "--head", "--port", "0", "--num-cpus", "2", "--include-dashboard=true")


@pytest.fixture
def second_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A cluster of two nodes with two workers each; the process of the second one."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    subprocess.run(HEAD, check=True, capture_output=True)
    try:
        first = set(processes("raylet/raylet"))
        subprocess.run(
            ["ray", "start", "--address", "auto", "--num-cpus", "2"], check=True, capture_output=True
        )
        (other,) = set(processes("raylet/raylet")) - first
        yield other
    finally:
        subprocess.run(["ray", "stop", "--force"], capture_output=True)


def processes(words: str) -> list[int]:
    """Processes whose command line has some words."""
    found = subprocess.run(["pgrep", "-f", words], capture_output=True, text=True).stdout.split()
    return [int(number) for number in found if int(number) != os.getpid()]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it has not become true"
        time.sleep(0.5)


def test_a_killed_worker_and_a_lost_node_change_no_loss(tmp_path: Path, second_node: int) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"line {n}: {n * n}" for n in range(300)))
    build = (
        "--input",
        str(tmp_path / "text.txt"),
        "--output",
        str(tmp_path / "train"),
        "--tokenizer",
        "byte",
    )
    assert call("data", "build", *build, "--workers", "1").status == 0
    run = tmp_path / "runs/job"
    settings = {"run": {"dir": str(run), "steps": 1500}, "checkpoint": {"every": 50}}
    path = write_run(tmp_path, str(tmp_path / "train"), **settings).path
    words = ("submit", "--engine", "ray", str(path), "--nodes", "2:4", "--per-node", "1", "parallel.zero=1")
    command = subprocess.Popen(
        [sys.executable, "-m", "hexad.cli.main", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def steps() -> int:
        metrics = run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    wait_for(lambda: steps() > 60)
    os.kill(processes("ray::RayTrainWorker")[-1], signal.SIGKILL)
    wait_for(lambda: steps() > 160)
    os.kill(second_node, signal.SIGKILL)
    output, _ = command.communicate(timeout=LONG)
    assert command.returncode == 0, output
    assert "worker group of size 4" in output and "worker group of size 2" in output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 1501))
    alone = tmp_path / "alone"
    assert call("train", str(path), f"run.dir={alone}").status == 0
    expected = [json.loads(line)["loss"] for line in (alone / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(expected, abs=1e-9)
