"""Ray: a program with Ray Train's ``TorchTrainer``, submitted by ``ray job submit``."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hexad.config import HexadError

from .engine import Engine, Submitted, run_command
from .job import Job

RESTARTS = 10
"""Failures of workers after which Ray gives up, where the user does not say."""

PROGRAM = '''\
"""Trains {config} on Ray: ray job submit --working-dir . -- python THIS_FILE"""

import sys

import ray.train
from ray.train.torch import TorchTrainer

from hexad.submit.ray_worker import train_in_worker

CONFIG = {config!r}
SETTINGS = {overrides!r}
DIRECTORY = {directory!r}  # which all nodes share


def worker():
    return train_in_worker(CONFIG, SETTINGS, DIRECTORY)


trainer = TorchTrainer(
    worker,
    scaling_config=ray.train.ScalingConfig(
        num_workers={workers},
        use_gpu={gpus},{resources}
    ),
    run_config=ray.train.RunConfig(
        name={name!r},
        storage_path={storage!r},
        failure_config=ray.train.FailureConfig(max_failures={failures}),
    ),
)
outcome = trainer.fit().return_value
print(outcome)
if "error" in outcome:
    sys.exit(f"hexad: error: {{outcome['error']}}")
'''


def program(job: Job) -> str:
    """The program of a job. A worker is a rank; those of lost nodes are started again on others, and with a
    range of nodes on as many as there are. The run resumes from its newest checkpoint."""
    known = {"max_failures", "accelerator_type"}
    resources: dict[str, float] = {"CPU": job.cpus} if job.cpus else {}
    resources |= {name: _number(value) for name, value in job.options.items() if name not in known}
    scaling = [f"resources_per_worker={resources!r},"] if resources else []
    kind = job.options.get("accelerator_type", job.gpu)
    scaling += [f"accelerator_type={kind!r},"] if kind else []
    least = job.least_nodes * job.ranks
    world = job.nodes * job.ranks
    return PROGRAM.format(
        config=job.config,
        overrides=list(job.overrides),
        directory=str(job.directory),
        workers=world if least == world else (least, world),
        gpus=job.gpus,
        resources="".join(f"\n        {line}" for line in scaling),
        name=job.name,
        storage=str(job.run_dir / "ray"),
        failures=int(job.options.get("max_failures", RESTARTS)),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise HexadError(
            f"--option: found {text!r}, expected the number of a resource for each worker"
        ) from None


def submit(job: Job, path: Path) -> Submitted:
    """Submit a program to the cluster of ``RAY_ADDRESS``, or of this machine.

    Raises:
        HexadError: ray is not there, or does not answer.
    """
    words = (
        "--submission-id",
        f"{job.name}-{path.stat().st_mtime_ns}",
        "--no-wait",
        "--",
        "python",
        str(path),
    )
    run_command("ray", "job", "submit", *words)
    number = words[1]
    return Submitted(number, f"ray job logs {number}", f"ray job stop {number}", lambda: follow(number))


def follow(number: str) -> int:
    """Print a job's log until it has ended; returns the exit status."""
    subprocess.run(["ray", "job", "logs", "--follow", number])
    return 0 if "SUCCEEDED" in run_command("ray", "job", "status", number).upper() else 1


RAY = Engine("ray", "job.py", program, submit, uses=frozenset({"cpus", "gpu", "least_nodes"}))
