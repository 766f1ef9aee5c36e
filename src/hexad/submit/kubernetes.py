"""Kubernetes: a ``TrainJob`` of Kubeflow Trainer, or a plain ``JobSet``, and ``kubectl``.

Schemas: ``trainer.kubeflow.org/v1alpha1`` of Kubeflow Trainer 2.2 and later (``runtimePatches``), and
``jobset.x-k8s.io/v1alpha2``."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from shlex import join, quote
from typing import Any

import yaml

from hexad.config import ConfigError

from .engine import Engine, Submitted, dump_yaml, run_command
from .job import Job

RUNTIME = "torch-distributed"
"""The runtime that Kubeflow Trainer installs for PyTorch; ``--option runtime=NAME`` names another one."""
GRACE = 300
"""Seconds between SIGTERM and SIGKILL: a step and a save."""
RESTARTS = 10
"""Restarts of all pods after a failure, where the user does not say."""
_SETTINGS = "/etc/hexad"
_PORT = 29400
_POLL = 2.0
_ENDED = {"Complete": 0, "Completed": 0, "Failed": 1}
"""Exit status by the condition with which a TrainJob or a JobSet ends."""


def train_job(job: Job) -> str:
    """A ``ConfigMap`` with the run's configuration, and a ``TrainJob`` that trains by it.

    The runtime gives each pod its rank and the first pod's address (``PET_NODE_RANK``, ``PET_MASTER_ADDR``,
    ...), which torchrun reads.
    """
    container = {"name": "node", "volumeMounts": _mounts(job)}
    pod = {
        "containers": [container],
        "volumes": _volumes(job),
        "terminationGracePeriodSeconds": GRACE,
        **({"nodeSelector": _selector(job)} if _selector(job) else {}),
    }
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    trainer = {
        **({"image": job.image} if job.image else {}),
        "numNodes": job.nodes,
        "command": ["bash", "-c", _shell(job, ["torchrun", "--nproc-per-node", str(job.ranks)])],
        "resourcesPerNode": _resources(job),
    }
    spec = {
        "runtimeRef": {"name": job.options.get("runtime", RUNTIME)},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "hexad.submit/run", "trainingRuntimeSpec": {"template": {"spec": patch}}}
        ],
    }
    return _documents(job, {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": spec})


def job_set(job: Job) -> str:
    """A ``ConfigMap`` with the run's configuration, and a ``JobSet`` of one pod per node.

    Raises:
        ConfigError: no image is named.
    """
    if job.image is None:
        raise ConfigError("--image", "is missing; --engine jobset has no runtime that names one")
    first = f"{job.name}-node-0-0.{job.name}"  # JobSet's names: JOBSET-REPLICATEDJOB-INDEX-POD.SUBDOMAIN
    launcher = ["torchrun", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-id", job.name, "--rdzv-endpoint", f"{first}:{_PORT}"]
    container = {
        "name": "node",
        "image": job.image,
        "command": ["bash", "-c", _shell(job, launcher)],
        "resources": {kind: dict(sizes) for kind, sizes in _resources(job).items()},
        "volumeMounts": _mounts(job),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "containers": [container],
        "volumes": _volumes(job),
        **({"nodeSelector": _selector(job)} if _selector(job) else {}),
    }
    pods = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": int(job.options.get("max_restarts", RESTARTS))},
        "replicatedJobs": [
            {"name": "node", "replicas": 1, "template": {"spec": {**pods, "template": {"spec": pod}}}}
        ],
    }
    return _documents(job, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": spec})


def _documents(job: Job, resource: dict[str, Any]) -> str:
    """The manifest: the configuration beside the resource that reads it."""
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-run"},
        "data": {"run.yaml": Path(job.config).read_text(encoding="utf-8")},
    }
    head = {"apiVersion": resource["apiVersion"], "kind": resource["kind"], "metadata": {"name": job.name}}
    return dump_yaml(settings, {**head, "spec": resource["spec"]})


def _shell(job: Job, launcher: list[str]) -> str:
    """The lines of a pod. torchrun ends with a failure's status after a graceful stop, so that the pod does
    not count as complete; the run resumes from the checkpoint that it has saved."""
    command = ["hexad", "train", f"{_SETTINGS}/run.yaml", *job.overrides]
    lines = ["set -e", f"cd {quote(_directory(job))}", *job.setup]
    lines.append(f"exec {join([*launcher, '--no-python', *command])}")
    return "\n".join(lines) + "\n"


def _directory(job: Job) -> str:
    """The working directory of a pod: the first shared volume."""
    return next(iter(job.volumes.values()), "/")


def _resources(job: Job) -> dict[str, dict[str, Any]]:
    sizes: dict[str, Any] = {"cpu": job.cpus * job.ranks} if job.cpus else {}
    if job.gpus:
        sizes[job.options.get("resource", "nvidia.com/gpu")] = job.ranks
    return {"limits": sizes, "requests": sizes}


def _mounts(job: Job) -> list[dict[str, Any]]:
    shared = [{"name": name, "mountPath": path} for name, path in job.volumes.items()]
    return [{"name": "run", "mountPath": _SETTINGS}, {"name": "shm", "mountPath": "/dev/shm"}, *shared]


def _volumes(job: Job) -> list[dict[str, Any]]:
    """The configuration, memory in which the GPUs of a node exchange data, and the shared volumes."""
    claims = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in job.volumes]
    settings = {"name": "run", "configMap": {"name": f"{job.name}-run"}}
    return [settings, {"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims]


def _selector(job: Job) -> dict[str, str]:
    """Labels of nodes: options whose names have a slash, and the kind of GPU."""
    labels = {name: value for name, value in job.options.items() if "/" in name}
    return {**labels, **({"nvidia.com/gpu.product": job.gpu} if job.gpu else {})}


def check(job: Job) -> None:
    """Refuse what cannot work in pods.

    Raises:
        ConfigError: there is no volume that all pods share, or an option is unknown.
    """
    if not job.volumes:
        problem = (
            "is missing; name a claim that all pods mount for writing (ReadWriteMany), such as shared=/work"
        )
        raise ConfigError("--volume", problem)
    known = ("runtime", "resource", "max_restarts")
    for name in job.options:
        if name not in known and "/" not in name:
            problem = f"found {name!r}, expected {', '.join(known)}, or a label of nodes (which has a slash)"
            raise ConfigError("--option", problem)


def submit(job: Job, path: Path) -> Submitted:
    """Create the resources.

    Raises:
        HexadError: kubectl is not there, or the cluster refuses them.
    """
    kind = {"TrainJob": "trainjob", "JobSet": "jobset"}[_kind(path)]
    run_command("kubectl", "apply", "--filename", str(path))
    selector = f"jobset.sigs.k8s.io/jobset-name={job.name}"
    log = f"kubectl logs --selector {selector}"
    cancel = f"kubectl delete --filename {path}"
    return Submitted(job.name, log, cancel, lambda: follow(kind, job.name, selector))


def _kind(path: Path) -> str:
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    return str(documents[-1]["kind"])


def follow(kind: str, name: str, selector: str) -> int:
    """Print the first pod's log, again after restarts, until the job has ended; returns the exit status."""
    first = f"{selector},batch.kubernetes.io/job-completion-index=0"
    command = ["kubectl", "logs", "--follow", "--selector", first, "--tail", "-1"]
    while True:
        subprocess.run(command, stderr=subprocess.DEVNULL)
        status = json.loads(run_command("kubectl", "get", kind, name, "--output", "json")).get("status", {})
        for condition in status.get("conditions", []):
            if condition["type"] in _ENDED and condition["status"] == "True":
                return _ENDED[condition["type"]]
        time.sleep(_POLL)


_USES = frozenset({"setup", "cpus", "image", "volumes", "gpu"})
KUBERNETES = Engine("kubernetes", "job.yaml", train_job, submit, _USES, check)
JOBSET = Engine("jobset", "job.yaml", job_set, submit, _USES, check)
