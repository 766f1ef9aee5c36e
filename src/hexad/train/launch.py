"""Joining the world this process was started in: torchrun's, SLURM's, or a world of one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hexad.comm import gather_objects
from hexad.config import Config, ConfigError, HexadError
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from .checks import check_config

T = TypeVar("T")


@dataclass(frozen=True)
class Environment:
    """This process's place among those that were started together.

    Attributes:
        rank, world: among all processes.
        local_rank, local_world: among those of this host.
        launcher: ``torchrun``, ``slurm`` or ``none``.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launcher: str = "none"


@dataclass(frozen=True)
class Run:
    """What :func:`launch` yields: the mesh and this process's environment."""

    mesh: Mesh
    environment: Environment

    def agreed(self, action: Callable[[], T]) -> T:
        """Do something on every rank; if any rank meets a user's error, all raise it.

        Raises:
            HexadError: the first rank's error, on every rank alike.
        """
        error, result = None, None
        try:
            result = action()
        except HexadError as caught:
            error = str(caught)
        errors = gather_objects(error, self.mesh.world)
        for rank, text in enumerate(errors):
            if text is not None:
                raise HexadError(text if None not in errors else f"rank {rank}: {text}")
        return result  # type: ignore[return-value]


def environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read the launcher's variables.

    Raises:
        HexadError: a variable that is missing or not a number.
    """

    def number(name: str) -> int:
        try:
            return int(variables[name])
        except (KeyError, ValueError):
            found = variables.get(name)
            raise HexadError(f"{name}: found {found!r}, expected a number set by the launcher") from None

    if "TORCHELASTIC_RUN_ID" in variables or ("RANK" in variables and "WORLD_SIZE" in variables):
        local = number("LOCAL_RANK") if "LOCAL_RANK" in variables else 0
        local_world = number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else 1
        return Environment(number("RANK"), number("WORLD_SIZE"), local, local_world, "torchrun")
    if "SLURM_PROCID" in variables and int(variables.get("SLURM_NTASKS", "1")) > 1:
        world, local = number("SLURM_NTASKS"), number("SLURM_LOCALID")
        per_node = variables.get("SLURM_NTASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "1")
        return Environment(number("SLURM_PROCID"), world, local, int(per_node.split("(")[0]), "slurm")
    return Environment()


def pick_device(setting: str, local_rank: int) -> torch.device:
    """The device of ``run.device`` for this local rank.

    Raises:
        ConfigError: ``cuda`` without a GPU, or with fewer GPUs than local ranks.
    """
    available = torch.cuda.is_available()
    if setting == "cpu" or (setting == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("run.device", "found cuda, but no GPU is visible; use auto or cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "run.device",
            f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible; start fewer ranks "
            "per host",
        )
    return torch.device("cuda", local_rank)


@contextmanager
def launch(config: Config) -> Iterator[Run]:
    """Join the world, check the configuration against it, build the mesh; leave the world afterwards.

    Raises:
        ConfigError: settings that do not fit the world, before any process group is made.
        HexadError: the rendezvous failed (a port in use, an unreachable host).
    """
    here = environment()
    layout = Layout.from_settings(config.parallel, here.world)
    check_config(config, layout)
    device = pick_device(config.run.device, here.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here.local_world))
    if here.world > 1:
        _join(here, device, config.run.timeout)
    try:
        yield Run(Mesh.create(layout, device, config.run.timeout), here)
    finally:
        if here.world > 1:
            dist.destroy_process_group()


def _join(here: Environment, device: torch.device, timeout: float) -> None:
    address = os.environ.get("MASTER_ADDR") or _slurm_first_host()
    port = os.environ.get("MASTER_PORT", "29500")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=here.rank,
            world_size=here.world,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise HexadError(
                f"port {port} of {address} is in use; set another with torchrun --master-port or MASTER_PORT"
            ) from error
        raise HexadError(f"no rendezvous at {address}:{port} within {timeout:.0f} s: {text}") from error


def _slurm_first_host() -> str:
    """The first host of a SLURM job (``node[003-010,12]`` -> ``node003``), or this host."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return socket.gethostname() if "SLURM_PROCID" in os.environ else "localhost"
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]
