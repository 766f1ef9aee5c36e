"""A layout bound to live process groups for this rank."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from .layout import CHANNELS, FAN_OUT, Layout, Level, Tree, tree_groups

TRAINING_AXES = ("tensor", "context", "pipeline", "data", "expert")
"""Axes that a step's traffic is counted for."""


@dataclass(eq=False)
class Axis:
    """One dimension of the device grid as this rank sees it.

    Attributes:
        name: ``tensor``, ``data``, ...
        ranks: global ranks of this rank's group along the axis, in order.
        rank: this rank's place among them.
        group: the process group; None where the axis has size 1.
        sent: bytes this rank has sent, by operation (filled by :mod:`hexad.comm`).
        calls: number of collectives, by operation.
        tree: the connections by which all ranks agree, of the axis of all ranks, see
            :mod:`hexad.comm.agreement`; None of others, and in a world of one.
        trace: what this rank's collectives are doing, if something watches: a
            :class:`hexad.comm.trace.Trace`, of all axes of a mesh.
        kinds: names of its calls (filled by :mod:`hexad.comm`).
        parts: the axes that this one is the product of, slowest first, where weights may be divided over one
            of them alone, see :meth:`Mesh.factored`.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: dist.ProcessGroup | None = None
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    trace: Any = None
    tree: Tree | None = None
    kinds: dict[tuple[str, int | None], Any] = field(default_factory=dict)
    parts: tuple[Axis, ...] = ()

    @property
    def size(self) -> int:
        """The axis's degree."""
        return len(self.ranks)

    @cached_property
    def on_host(self) -> bool:
        """Whether the host carries its collectives out (gloo): they are complete once they were waited for.
        Others are queued on a device."""
        return self.group is not None and dist.get_backend(self.group) == "gloo"


class Mesh:
    """This rank's axes. Built once and passed on; there is no global mesh.

    Attributes:
        layout: the arithmetic behind it.
        rank: this process's global rank.
        device: where this rank computes.
        tensor, context, pipeline, data: the axes of the dense layers.
        world: all ranks. Its process group connects every rank with every other, on a CPU: agreements use its
            tree.
    """

    def __init__(
        self, layout: Layout, rank: int, device: torch.device, axes: dict[str, Axis], timeout: timedelta
    ) -> None:
        self.layout = layout
        self.timeout = timeout
        self.rank = rank
        self.device = device
        self.axes = axes
        self.world = axes["world"]
        self.tensor = axes["tensor"]
        self.context = axes["context"]
        self.pipeline = axes["pipeline"]
        self.data = axes["data"]

    def gradient_axis(self, grid: str = "dense") -> Axis:
        """The ranks over which the gradients of a grid's weights are summed: those that have other tokens."""
        return self.combined("data", "context") if grid == "dense" else self._expert_axis("expert_data")

    def model_axes(self, grid: str = "dense") -> tuple[Axis, ...]:
        """The axes that may divide the weights of a grid."""
        if grid == "dense":
            return (self.tensor,)
        return (self._expert_axis("expert_tensor"), self._expert_axis("expert"))

    def combined(self, *names: str) -> Axis:
        """Combine several axes of the dense grid into one. Its traffic counts as the first one's, and does
        not queue with that of the others.

        Every rank of the default process group calls this together. Where the others have one rank each, the
        first axis stands for itself.
        """
        if all(self.axes[name].size == 1 for name in names[1:]):
            return self.axes[names[0]]
        together = "-".join(names)
        if together not in self.axes:
            ranks = tuple(self.layout.group(self.rank, *names))
            self.axes[together] = self._part(self.axes[names[0]], ranks)
        return self.axes[together]

    def _expert_axis(self, name: str) -> Axis:
        """An axis of the expert grid, made on first use; every rank calls this together. Its
        traffic counts as that of the dense grid's counterpart."""
        if name not in self.axes:
            counted = self.axes[{"expert_data": "data", "expert_tensor": "tensor"}[name]]
            self.axes[name] = replace(
                self._part(counted, tuple(self.layout.group(self.rank, name))), name=name
            )
        return self.axes[name]

    def some(self, axis: Axis, *places: int) -> Axis:
        """Make an axis of some places of another, whose traffic counts as that one's.

        Every rank of the default process group calls this together; those of other places get an axis of
        size 1.
        """
        members = tuple(axis.ranks[place] for place in sorted(set(places)))
        if members == axis.ranks:
            return axis
        if self.rank in members:
            return self._part(axis, members)
        if len(members) > 1:  # torch names a group after how many a process has made before: as many here
            _new_group(axis.name, (self.rank,), self.device, self.timeout, f"apart from {axis.name}")
        return self._part(axis, (self.rank,))

    def split(self, axis: Axis, size: int) -> tuple[Axis, Axis]:
        """Split an axis into two: runs of ``size`` neighbouring places, and the places across those runs.

        Their traffic counts as the whole axis's. Runs have a process group of their own even where there is
        only one, so that what is moved inside them does not queue with what goes over the axis. Every rank of
        the default process group calls this together.
        """
        if size == 1:
            return Axis(axis.name, (self.rank,)), axis
        run, place = divmod(axis.rank, size)
        return (
            self._part(axis, axis.ranks[run * size : (run + 1) * size]),
            self._part(axis, axis.ranks[place::size]),
        )

    def factored(self, name: str, parts: tuple[str, str], size: int) -> Mesh:
        """The same mesh, one axis of which is also known as the product of two: of the runs of ``size``
        neighbouring places, and of the places of a run.

        Their traffic counts as the whole axis's. Nothing is sent from run to run, so that the first part has
        no process group. Every rank of the default process group calls this together.
        """
        whole = self.axes[name]
        run, place = divmod(whole.rank, size)
        inside = whole
        if size < whole.size:
            inside = self._part(whole, whole.ranks[run * size : (run + 1) * size])
        known = (Axis(parts[0], whole.ranks[place::size], run), replace(inside, name=parts[1]))
        axes = {**self.axes, name: replace(whole, parts=known), **dict(zip(parts, known))}
        return Mesh(self.layout, self.rank, self.device, axes, self.timeout)

    def grouped_context(self, size: int) -> Mesh:
        """The same mesh, whose context axis is also known as the product of two: of the axis ``ring``, and of
        ``ulysses``, runs of ``size`` neighbouring places.

        Their traffic counts as the context axis's. Every rank of the default process group calls this
        together.
        """
        whole, alone = self.context, Axis("context", (self.rank,))
        ulysses, ring = (whole, alone) if size == whole.size else self.split(whole, size)
        axes = {**self.axes, "ring": ring, "ulysses": ulysses}
        return Mesh(self.layout, self.rank, self.device, axes, self.timeout)

    def _part(self, axis: Axis, members: tuple[int, ...]) -> Axis:
        """Some ranks of an axis, this one among them, with a group of their own; its traffic counts as the
        axis's."""
        group = None
        if len(members) > 1:
            group = _new_group(axis.name, members, self.device, self.timeout, f"part of {axis.name}")
        return Axis(axis.name, members, members.index(self.rank), group, axis.sent, axis.calls, axis.trace)

    @classmethod
    def create(cls, layout: Layout, device: torch.device, timeout: float = 600.0, trace: Any = None) -> Mesh:
        """Build the groups in use, and only those.

        Every rank of the default process group calls this together; a world of one needs no process group.
        ``timeout`` is in seconds; for ``trace`` see :class:`Axis`.
        """
        limit = timedelta(seconds=timeout)
        rank = dist.get_rank() if layout.world > 1 else 0
        everyone = dist.group.WORLD if layout.world > 1 else None
        tree = _make_tree(rank, layout.world, limit) if layout.world > 1 else None
        axes = {"world": Axis("world", tuple(range(layout.world)), rank, everyone, trace=trace, tree=tree)}
        for name in TRAINING_AXES:
            ranks = tuple(layout.group(rank, name))
            group = _new_group(name, ranks, device, limit, name) if len(ranks) > 1 else None
            axes[name] = Axis(name, ranks, ranks.index(rank), group, trace=trace)
        return cls(layout, rank, device, axes, limit)

    def background(self, name: str, timeout: timedelta | None = None, trace: Any = None) -> Axis:
        """All ranks, for agreements that are made beside others: each of :data:`CHANNELS` by its name."""
        world = self.world
        tree, channel = world.tree, CHANNELS.index(name)
        if tree is not None:  # the same connections
            tree = replace(tree, channel=channel, timeout=timeout or tree.timeout)
        return Axis(name, world.ranks, world.rank, trace=trace, tree=tree)

    @property
    def trace(self) -> Any:
        """What this rank's collectives are doing, if something watches."""
        return self.world.trace

    def sent_bytes(self) -> dict[str, int]:
        """Bytes this rank has sent so far, per axis that a step's traffic is counted for."""
        return {name: self.axes[name].sent.total() for name in TRAINING_AXES}


def _new_group(
    name: str, ranks: tuple[int, ...], device: torch.device, timeout: timedelta, description: str
) -> Any:
    """A process group of ranks of an axis. Only members take part, so that the cost does not grow with the
    world."""
    return dist.new_group(
        list(ranks),
        timeout=timeout,
        use_local_synchronization=True,
        group_desc=description,
        pg_options=_urgent(name, device, timeout),
    )


def _urgent(name: str, device: torch.device, timeout: timedelta) -> Any:
    """NCCL's options of an axis: layers wait for tensor, context and pipeline ranks, so that their kernels go
    before those of gradients and parameters, which run beside layers."""
    if device.type != "cuda" or name not in ("tensor", "context", "pipeline"):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout  # new_group warns if it differs from its own
    return options


def _gloo_devices() -> list[Any]:
    """The interfaces that ``GLOO_SOCKET_IFNAME`` names, as for PyTorch's own groups; else the host name's."""
    # Connections that are made only when used do not notice a peer that is lost before (gloo issue 520).
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    return [dist.ProcessGroupGloo.create_device(interface=n, lazy_init=False) for n in names.split(",")]


def _make_tree(rank: int, world: int, timeout: timedelta) -> Tree:
    """Connect this rank with the others of its groups; all ranks of the default process group together."""
    # Not by new_group, which every rank must call equally often.
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"hexad/tree/{rank}", 1)  # the groups of another mesh have other names
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
    options._timeout = timeout
    options._devices = _gloo_devices()
    levels = []
    for ranks in tree_groups(rank, world, FAN_OUT):
        place = ranks.index(rank)
        # The first two ranks tell a group from those of other levels.
        named = dist.PrefixStore(f"hexad/tree/{number}/{ranks[0]}-{ranks[1]}", store)
        levels.append(Level(ranks, place, dist.ProcessGroupGloo(named, place, len(ranks), options)))
    return Tree(tuple(levels), 0, timeout)
