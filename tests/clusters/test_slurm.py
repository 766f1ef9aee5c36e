"""``hexad submit --engine slurm`` on a real SLURM: stopped and requeued, a node lost, an array, a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..training.command import call, write_run
from .slurm import CONTROLLER, Slurm, why_not

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
LONG = 600.0
"""Seconds after which something is taken never to happen."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm"), nodes=5) as cluster:
        yield cluster


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a data set and a ``run.yaml`` for CPUs."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {n}: {n * n}" for n in range(300)))
    build = ("--input", "text.txt", "--output", "train", "--tokenizer", "byte", "--workers", "1")
    subprocess.run([*HEXAD, "data", "build", *build], cwd=tmp_path, check=True, capture_output=True)
    write_run(tmp_path, "train", run={"dir": "runs/job", "steps": 300}, checkpoint={"every": 10, "keep": 2})
    return tmp_path


HEXAD = (sys.executable, "-m", "hexad.cli.main")


def submit(slurm: Slurm, project: Path, *words: str) -> subprocess.Popen[str]:
    """The command, which follows the job's log."""
    command = slurm.on(CONTROLLER, *HEXAD, "submit", "--engine", "slurm", "run.yaml", *words)
    variables = {
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        command,
        cwd=project,
        env=slurm.environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(run: Path) -> dict[int, float]:
    """Losses by step; a step that stands twice fails."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["loss"] for line in lines}


def test_a_job_is_requeued_after_a_signal_and_after_the_loss_of_a_node(slurm: Slurm, project: Path) -> None:
    command = submit(slurm, project, "--nodes", "4", "--per-node", "1", "parallel.pipeline=2")
    run = project / "runs/job"

    def steps() -> int:
        metrics = run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    slurm.wait_for(lambda: steps() > 3, LONG)
    job = slurm.run("squeue", "-h", "-o", "%i").strip()
    slurm.run("scancel", "--signal=USR1", job)
    slurm.wait_for(lambda: slurm.field(job, "Restarts") == "1" and slurm.state(job) == "RUNNING", LONG)
    before = steps()
    slurm.wait_for(lambda: steps() > before, LONG)
    lost = slurm.field(job, "NodeList").removeprefix("node[")[0]
    slurm.lose_node(int(lost))
    output, _ = command.communicate(timeout=LONG)
    assert command.returncode == 0, output
    assert slurm.field(job, "Restarts") == "2"
    assert f"node{lost}" not in slurm.field(job, "NodeList")
    assert "SIGUSR1: saved step" in output
    assert output.count("resuming from") == 2
    assert f"job {job}: COMPLETED" in output
    alone = project / "alone"
    assert (
        call("train", str(project / "run.yaml"), f"run.dir={alone}", f"data.train={project}/train").status
        == 0
    )
    expected = losses(alone)
    assert losses(run) == pytest.approx(expected, abs=1e-9) and len(expected) == 300
    slurm.recover_node(int(lost))


def test_a_sweep_is_an_array_of_jobs_with_directories_of_their_own(slurm: Slurm, project: Path) -> None:
    command = submit(
        slurm, project, "--nodes", "2", "--per-node", "1", "--sweep", "optimizer.lr=0.01,0.02", "run.steps=3"
    )
    output, _ = command.communicate(timeout=LONG)
    assert command.returncode == 0, output
    job = output.split("submitted job ")[1].split(";")[0]
    slurm.wait_for(lambda: not slurm.run("squeue", "-h", "-j", job, check=False).strip(), LONG)
    runs = {path.name: losses(path) for path in sorted((project / "runs/job").glob("lr=*"))}
    assert list(runs) == ["lr=0.01", "lr=0.02"]
    assert all(len(run) == 3 for run in runs.values())
    assert runs["lr=0.01"][3] != runs["lr=0.02"][3]


def test_a_run_that_fails_is_not_requeued(slurm: Slurm, project: Path) -> None:
    command = submit(slurm, project, "--nodes", "2", "--per-node", "1", "data.train=missing")
    output, _ = command.communicate(timeout=LONG)
    assert command.returncode == 1, output
    assert "FAILED" in output
    assert "hexad: error: data.train" in output
    assert "Requeue" not in output
