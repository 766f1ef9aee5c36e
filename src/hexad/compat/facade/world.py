"""The process group that a script has joined, and its meshes: state that all of ``compat`` shares.

Scripts written for other systems join the world themselves (``torch.distributed.init_process_group``), or
call a function that does so. Process groups are created once per layout.
"""

import atexit
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from hexad.comm import Trace
from hexad.config import HexadError
from hexad.launching.environment import environment
from hexad.launching.launch import let_threads_finish, pick_device, start_on
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh, new_group

_TIMEOUT = timedelta(minutes=30)


@dataclass
class _World:
    """What belongs to a default process group."""

    group: dist.ProcessGroup | None
    meshes: dict[Layout, Mesh] = field(default_factory=dict)
    current: Mesh | None = None  # that was used last
    alone: dist.ProcessGroup | None = None  # this rank


_last = [_World(None)]
atexit.register(let_threads_finish)  # scripts end as they like


def join(timeout: timedelta | None = None, backend: str | None = None) -> torch.device:
    """Join the world that torchrun or SLURM has started, unless the script has; returns this rank's device.

    Args:
        timeout: of collectives; 30 minutes by default.
        backend: of ``torch.distributed``; by default NCCL on GPUs and gloo on CPUs.

    Raises:
        HexadError: the rendezvous failed.
    """
    here = environment()
    if dist.is_initialized():
        if "nccl" not in dist.get_backend():
            return torch.device("cpu")
        if torch.cuda.current_device() == 0 and here.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(here.local_rank)  # the script has not selected one
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device("cpu") if backend == "gloo" else pick_device("auto", here)
    if device.type == "cuda":
        start_on(device)
    alone: dict[str, Any] = {"store": dist.HashStore()} if here.launcher == "none" else {}
    try:
        dist.init_process_group(
            backend or ("nccl" if device.type == "cuda" else "gloo"),
            rank=here.rank,
            world_size=here.world,
            timeout=timeout or _TIMEOUT,
            **alone,
        )
        if dist.get_backend() == "gloo":
            dist.barrier()  # a script that fails at once would leave while other ranks still connect to it
    except (RuntimeError, ValueError) as error:
        raise HexadError(f"the process group could not be set up: {error}") from error
    return device


def world_size() -> int:
    """Ranks of the world that was joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _world() -> _World:
    """The state of the default process group that exists now; that of a former one is forgotten."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if _last[0].group is not group:
        _last[0] = _World(group)
    return _last[0]


def mesh_of(device: torch.device, pipeline: int = 1, tensor: int = 1) -> Mesh:
    """The mesh of so many pipeline and tensor ranks and else data ranks; as :func:`mesh_in`."""
    return mesh_in(Layout(world=world_size(), pipeline=pipeline, tensor=tensor), device)


def mesh_in(layout: Layout, device: torch.device) -> Mesh:
    """The mesh of a layout; created on first use, by all ranks together."""
    meshes = _world().meshes
    if layout not in meshes:
        meshes[layout] = Mesh.create(layout, device, _timeout(device).total_seconds(), Trace())
    return use(meshes[layout])


def _timeout(device: torch.device) -> timedelta:
    """How long the default process group waits, as the script has chosen it."""
    # A group without a backend for the device, or with one that is written in Python, tells nothing.
    with suppress(AttributeError, RuntimeError):
        return cast(timedelta, dist.group.WORLD._get_backend(device).options._timeout)  # type: ignore[union-attr]
    return _TIMEOUT


def use(mesh: Mesh) -> Mesh:
    """Make a mesh the current one; returns it."""
    _world().current = mesh
    return mesh


def last_mesh() -> Mesh | None:
    """The mesh that was used last; None before the first."""
    return _world().current


def current_mesh() -> Mesh:
    """The mesh that was used last; by default one of data ranks only."""
    return _world().current or mesh_of(join())


def group_of(axis: Axis) -> dist.ProcessGroup:
    """The process group of an axis, also of one rank."""
    if axis.group is not None:
        return axis.group
    world = _world()
    if world.alone is None:
        # Not split off another group, which all its ranks would have to do together.
        world.alone = new_group("alone", (dist.get_rank(),), None, join(), _TIMEOUT, "alone")
    return world.alone


FACTS: dict[str, Callable[[Axis], Any]] = {
    "group": group_of,
    "ranks": lambda axis: list(axis.ranks),
    "size": lambda axis: axis.size,
    "rank": lambda axis: axis.rank,
    "first": lambda axis: axis.ranks[0],
}
"""What scripts ask about an axis, under the names of their system."""
