"""SkyPilot: a task file, and ``sky jobs launch``, which starts a task again after a pre-emption."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shlex import join
from typing import Any

import yaml

from hexad.config import ConfigError

from .engine import Engine, Submitted, dump_yaml, run_command
from .job import Job

_PORT = 29500


def task(job: Job) -> str:
    """A task of a node's torchrun on each node, from SkyPilot's variables.

    Raises:
        ConfigError: the kind of GPU is missing, or the configuration is outside the working directory, which
            SkyPilot copies to the nodes.
    """
    if not Path(job.config).resolve().is_relative_to(job.directory.resolve()):
        problem = f"found {job.config}, outside the working directory {job.directory}, which SkyPilot copies"
        raise ConfigError("run.yaml", f"{problem}; run this in a directory above it")
    resources: dict[str, Any] = {}
    if job.gpus:
        if job.gpu is None:
            raise ConfigError(
                "--gpu", "is missing; --engine skypilot chooses machines by it: use such as H100"
            )
        resources["accelerators"] = f"{job.gpu}:{job.ranks}"
    if job.cpus:
        resources["cpus"] = f"{job.cpus * job.ranks}+"
    if job.image:
        resources["image_id"] = job.image if ":" in job.image.split("/")[0] else f"docker:{job.image}"
    resources |= {name: yaml.safe_load(value or "true") for name, value in job.options.items()}
    launcher = ["torchrun", "--nproc-per-node", str(job.ranks), "--master-port", str(_PORT)]
    launch = (
        f"{join(launcher)} --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK \\\n"
        f'    --master-addr "$(head -n1 <<< "$SKYPILOT_NODE_IPS")" \\\n'
        f"    --no-python {join(_command(job))}\n"
    )
    tree: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "workdir": str(job.directory),
        **({"setup": "\n".join(job.setup) + "\n"} if job.setup else {}),
        **({"volumes": {path: name for name, path in job.volumes.items()}} if job.volumes else {}),
        "run": launch,
    }
    return dump_yaml(tree)


def _command(job: Job) -> tuple[str, ...]:
    """The command of a rank, which starts in the copy of the working directory."""
    config = Path(job.config).resolve().relative_to(job.directory.resolve())
    return ("hexad", "train", str(config), *job.overrides)


def submit(job: Job, path: Path) -> Submitted:
    """Launch a managed job.

    Raises:
        HexadError: sky is not there, or refuses the task.
    """
    run_command("sky", "jobs", "launch", "--yes", "--detach-run", "--name", job.name, str(path))
    log = f"sky jobs logs --name {job.name}"
    return Submitted(job.name, log, f"sky jobs cancel --name {job.name}", lambda: follow(job.name))


def follow(name: str) -> int:
    """Print a job's log until it has ended; returns the exit status, which is that of ``sky jobs logs``."""
    return 0 if subprocess.run(["sky", "jobs", "logs", "--name", name]).returncode == 0 else 1


_USES = frozenset({"setup", "cpus", "image", "volumes", "gpu"})
SKYPILOT = Engine("skypilot", "job.yaml", task, submit, _USES)
