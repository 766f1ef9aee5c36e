"""A layout bound to live process groups for this rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .layout import AXES, CHANNELS, FAN_OUT, Layout, Level, Tree, goes_to_next, tree_groups

T = TypeVar("T")

TRAINING_AXES = ("tensor", "context", "pipeline", "data", "expert")
"""Axes that a step's traffic is counted for."""
URGENT_AXES = ("tensor", "context", "pipeline")
"""Axes whose ranks layers wait for: their kernels go before those of gradients and parameters, which run
beside layers."""


@dataclass(eq=False)
class Axis:
    """One dimension of the device grid as this rank sees it.

    Attributes:
        name: ``tensor``, ``data``, ...
        ranks: global ranks of this rank's group along the axis, in order.
        size: how many these are: the axis's degree.
        rank: this rank's place among them.
        group: the process group; None where the axis has size 1.
        device: of the tensors that are sent.
        sent: bytes this rank has sent, by operation (filled by :mod:`hexad.comm`).
        calls: number of collectives, by operation.
        tree: the connections by which all ranks agree, of the axis of all ranks, see
            :mod:`hexad.comm.agreement`; None of others, and in a world of one.
        trace: what this rank's collectives are doing, if something watches: a
            :class:`hexad.comm.trace.Trace`, of all axes of a mesh.
        kinds: names of its calls (filled by :mod:`hexad.comm`).
        buffers: memory that all its exchanges of one kind use, see :meth:`buffer`.
        parts: the axes that this one is the product of, slowest first, where weights may be divided over one
            of them alone, see :meth:`Mesh.factored`.
        alone: no other rank exists, and none is waited for (a dry run, see :meth:`Mesh.of_one`).
        to_next, to_previous: of the pipeline axis on NCCL, process groups of the same ranks for messages in
            one direction. NCCL executes the messages of one communicator one after the other, so that the two
            directions would wait for each other in ``group``. None of other axes and on gloo.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    trace: Any = None
    tree: Tree | None = None
    kinds: dict[tuple[str, int | None], Any] = field(default_factory=dict)
    buffers: dict[Any, Any] = field(default_factory=dict)
    parts: tuple[Axis, ...] = ()
    to_next: dist.ProcessGroup | None = None
    to_previous: dist.ProcessGroup | None = None
    alone: bool = False

    def __post_init__(self) -> None:
        self.size = len(self.ranks)

    def buffer(self, kind: Callable[[Axis], T]) -> T:
        """The memory of a kind of exchanges, made of the axis when it is first needed."""
        if kind not in self.buffers:
            self.buffers[kind] = kind(self)
        buffer: T = self.buffers[kind]
        return buffer

    def carrier(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        """The process group of messages from one of its places to another."""
        if self.to_next is None:
            return self.group
        if goes_to_next(sender, receiver, self.size):
            return self.to_next
        return self.to_previous if goes_to_next(receiver, sender, self.size) else self.group

    @cached_property
    def on_host(self) -> bool:
        """Whether the host carries its collectives out (gloo): they are complete once they were waited for.
        Others are queued on a device."""
        if self.alone:
            return self.device.type == "cpu"
        if self.group is None:
            return False
        backend = dist.get_backend(self.group)  # undefined: one for each type of device, gloo for CPUs
        return backend == "gloo" or (
            self.device.type == "cpu" and ("gloo" in backend or backend == "undefined")
        )


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks among which the experts of a layer are divided: the product of the axes ``expert`` and
    ``expert_tensor``, each of which has tokens of its own.

    Attributes:
        axis: all of them.
        expert, slice: for each of them, in the axis's order, its place along ``expert`` (which experts it
            has) and along ``expert_tensor`` (which part of each).
    """

    axis: Axis = field(default_factory=lambda: Axis("expert"))
    expert: tuple[int, ...] = (0,)
    slice: tuple[int, ...] = (0,)

    @property
    def experts(self) -> int:
        """Parts into which the experts are divided."""
        return max(self.expert) + 1

    @property
    def slices(self) -> int:
        """Parts into which each expert is divided."""
        return max(self.slice) + 1

    @property
    def place(self) -> int:
        """The number of this rank's part of the experts."""
        return self.expert[self.axis.rank]


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

    def expert_ranks(self) -> ExpertRanks:
        """The ranks among which experts are divided; every rank of the default process group calls this
        together. Their traffic counts as the expert axis's."""
        names = ("expert_tensor", "expert")
        if self.layout.expert_tensor == 1:
            axis = self._expert_axis("expert")
        else:
            together = "-".join(names)
            if together not in self.axes:
                self.axes[together] = self._along(names, self._expert_axis("expert"))
            axis = self.axes[together]
        places = [self.layout.coordinates(rank) for rank in axis.ranks]
        return ExpertRanks(axis, *(tuple(place[name] for place in places) for name in names[::-1]))

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
            self.axes[together] = self._along(names, self.axes[names[0]])
        return self.axes[together]

    def _expert_axis(self, name: str) -> Axis:
        """An axis of the expert grid, made on first use; every rank calls this together. Its
        traffic counts as that of the dense grid's counterpart."""
        if name not in self.axes:
            counted = self.axes[{"expert_data": "data", "expert_tensor": "tensor"}[name]]
            self.axes[name] = replace(self._along((name,), counted), name=name)
        return self.axes[name]

    def _along(self, names: tuple[str, ...], counted: Axis) -> Axis:
        """The ranks along axes of one grid; their traffic counts as that of another axis."""
        ranks = tuple(self.layout.group(self.rank, *names))
        return self._part(counted, ranks, self._smallest_around(names))

    def _smallest_around(self, names: Sequence[str]) -> dist.ProcessGroup | None:
        """The process group of the smallest axis so far whose groups contain those along some axes. It is the
        same axis on every rank."""
        around = [self.world]
        for together, axis in self.axes.items():
            along = together.split("-")
            if axis.group is not None and set(along) <= set(AXES) and self.layout.contains(along, names):
                around.append(axis)
        return min(around, key=lambda axis: axis.size).group

    def some(self, axis: Axis, *places: int) -> Axis:
        """Make an axis of some places of another, whose traffic counts as that one's.

        Every rank of the default process group calls this together; those of other places get an axis of
        size 1.
        """
        members = tuple(axis.ranks[place] for place in sorted(set(places)))
        if members == axis.ranks:
            return axis
        if self.rank in members:
            return self._part(axis, members, axis.group)
        if len(members) > 1:
            # A group of its own: torch names groups after how many a process has made before, and NCCL's are
            # split off by all ranks of the axis together.
            self._group(axis.name, (self.rank,), axis.group, f"apart from {axis.name}")
        return self._part(axis, (self.rank,), None)

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
            self._part(axis, axis.ranks[run * size : (run + 1) * size], axis.group),
            self._part(axis, axis.ranks[place::size], axis.group),
        )

    def factored(self, name: str, parts: tuple[str, str], size: int) -> Mesh:
        """This mesh with one axis that is also the product of two: of the runs of ``size`` neighbouring
        places, and of the places of a run.

        Their traffic counts as the whole axis's. Nothing is sent from run to run, so that the first part has
        no process group. Every rank of the default process group calls this together.
        """
        whole = self.axes[name]
        run, place = divmod(whole.rank, size)
        inside = whole
        if size < whole.size:
            inside = self._part(whole, whole.ranks[run * size : (run + 1) * size], whole.group)
        across = Axis(parts[0], whole.ranks[place::size], run, alone=whole.alone)
        known = (across, replace(inside, name=parts[1]))
        axes = {**self.axes, name: replace(whole, parts=known), **dict(zip(parts, known))}
        return Mesh(self.layout, self.rank, self.device, axes, self.timeout)

    def grouped_context(self, size: int) -> Mesh:
        """This mesh with a context axis that is also the product of two: of the axis ``ring``, and of
        ``ulysses``, runs of ``size`` neighbouring places.

        Their traffic counts as the context axis's. Every rank of the default process group calls this
        together.
        """
        whole, alone = self.context, Axis("context", (self.rank,))
        ulysses, ring = (whole, alone) if size == whole.size else self.split(whole, size)
        axes = {**self.axes, "ring": ring, "ulysses": ulysses}
        return Mesh(self.layout, self.rank, self.device, axes, self.timeout)

    def _part(self, axis: Axis, members: tuple[int, ...], parent: dist.ProcessGroup | None) -> Axis:
        """Ranks with a group of their own, this one among them, whose traffic counts as an axis's; ``parent``
        as in :func:`new_group`."""
        group = None
        if len(members) > 1:
            group = self._group(axis.name, members, parent, f"part of {axis.name}")
        rank, device = members.index(self.rank), self.device
        counted = {"sent": axis.sent, "calls": axis.calls, "trace": axis.trace, "alone": axis.alone}
        return Axis(axis.name, members, rank, group, device, **counted)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        """Itself: copies of what refers to it are on the same ranks."""
        return self

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
        world = tuple(range(layout.world))
        whole = Axis("world", world, rank, everyone, device, trace=trace, tree=tree)
        return cls._connected(layout, whole, limit)

    @classmethod
    def of_one(cls, layout: Layout, rank: int, device: torch.device) -> Mesh:
        """The mesh of one rank without the others, for a dry run: collectives are counted in bytes and return
        at once, agreements are this rank's own, and there are no process groups."""
        whole = Axis("world", tuple(range(layout.world)), rank, device=device, alone=layout.world > 1)
        return cls._connected(layout, whole, timedelta())

    @classmethod
    def _connected(cls, layout: Layout, world: Axis, limit: timedelta) -> Mesh:
        """The mesh around the axis of all ranks, with the groups of the axes in use."""
        rank, axes = world.rank, {"world": world}
        for name in TRAINING_AXES:
            ranks = tuple(layout.group(rank, name))
            place, alone = ranks.index(rank), world.alone
            axes[name] = Axis(name, ranks, place, device=world.device, trace=world.trace, alone=alone)
        mesh = cls(layout, rank, world.device, axes, limit)
        # From large to small, since a small group is split off the smallest that contains it.
        mesh.gradient_axis()
        for name in sorted(TRAINING_AXES, key=layout.degree, reverse=True):
            if axes[name].size > 1:
                axes[name].group = mesh._group(name, axes[name].ranks, mesh._smallest_around((name,)), name)
        pipeline = mesh.pipeline
        if pipeline.size > 1 and not pipeline.on_host:
            ways = (f"pipeline, to the {way} rank" for way in ("next", "previous"))
            pipeline.to_next, pipeline.to_previous = (
                mesh._group(pipeline.name, pipeline.ranks, pipeline.group, way) for way in ways
            )
        return mesh

    def _group(
        self, axis: str, members: tuple[int, ...], parent: dist.ProcessGroup | None, description: str
    ) -> dist.ProcessGroup | None:
        """Create a group (:func:`new_group`); None where no other rank exists."""
        if self.world.alone:
            return None
        return new_group(axis, members, parent, self.device, self.timeout, description)

    def background(self, name: str, timeout: timedelta | None = None, trace: Any = None) -> Axis:
        """All ranks, for agreements that are made beside others: each of :data:`CHANNELS` by its name."""
        world = self.world
        tree, channel = world.tree, CHANNELS.index(name)
        if tree is not None:  # the same connections
            tree = replace(tree, channel=channel, timeout=timeout or tree.timeout)
        return Axis(name, world.ranks, world.rank, trace=trace, tree=tree, alone=world.alone)

    def on_hosts(self) -> Axis:
        """All ranks, with a process group for tensors in the hosts' memory; every rank calls this
        together."""
        world = self.world
        if world.size == 1 or world.alone or self.device.type == "cpu":
            return world
        with _not_splitting_the_default():
            group = dist.new_group(
                list(world.ranks), timeout=self.timeout, backend="gloo", group_desc="all hosts"
            )
        return Axis(world.name, world.ranks, world.rank, group, trace=world.trace, tree=world.tree)

    @property
    def trace(self) -> Any:
        """The trace of this rank's collectives, if something watches."""
        return self.world.trace

    def sent_bytes(self) -> dict[str, int]:
        """Bytes this rank has sent so far, per axis that a step's traffic is counted for."""
        return {name: self.axes[name].sent.total() for name in TRAINING_AXES}


def new_group(
    axis: str,
    members: tuple[int, ...],
    parent: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta,
    description: str,
) -> dist.ProcessGroup:
    """A process group of ascending global ranks, this one among them; every group is made here.

    Of gloo only the members take part, so that the cost does not grow with the world. NCCL splits a
    communicator off that of ``parent``: all ranks of the parent call this together, each with the group that
    it belongs to, which contain each rank of the parent once. Groups of the urgent axes, see
    :data:`URGENT_AXES`, have kernels of high priority.
    """
    source, options = _communicator(parent, device), None
    if source is not None or (device.type == "cuda" and axis in URGENT_AXES):
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = axis in URGENT_AXES
        options._timeout = timeout  # new_group warns if it differs from its own
        if source is not None:
            # The first rank is a number that no other group of the parent has.
            options.split_from, options.split_color = source, members[0]
            # The parent may have been used before: splitting allocates memory, which waits for kernels.
            torch.cuda.synchronize(device)
    with _not_splitting_the_default():
        group: dist.ProcessGroup = dist.new_group(
            list(members),
            timeout=timeout,
            use_local_synchronization=True,
            group_desc=description,
            pg_options=options,
            device_id=None if source is None else device,
        )
    return group


def _communicator(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """The backend of a group whose NCCL communicator exists, so that others can be split off; else None."""
    if device.type != "cuda" or group is None or group.bound_device_id is None:
        return None
    backend = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if backend.supports_splitting else None


@contextmanager
def _not_splitting_the_default() -> Iterator[None]:
    """Let ``new_group`` use the parent and colour of the options that it is given.

    Where the default group is bound to a device, torch splits every group off that one and overwrites both.
    Its colour, as that of ``split_group``, is a 31-bit hash of the ranks, which different groups may have in
    common: NCCL would merge them.
    """
    default = dist.group.WORLD
    if default is None or default.bound_device_id is None:
        yield
        return
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _gloo_devices() -> list[Any]:
    """The interfaces that ``GLOO_SOCKET_IFNAME`` names, as for PyTorch's own groups; else the host name's."""
    # Connections that are made only when used do not notice a peer that is lost before (gloo issue 520).
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    return [dist.ProcessGroupGloo.create_device(interface=n, lazy_init=False) for n in names.split(",")]


class _Addresses(dist.Store):
    """A store in which one gloo group of ``size`` ranks exchanges addresses, each of which is written once.

    gloo waits for the address of one rank after the other and then reads it. Here all are waited for and read
    in one call, so that a rank's calls of the store, which is that of all ranks, do not grow with the group.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        super().__init__()
        self._store, self._size = store, size
        self._read: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        if key not in self._read:
            name, _, rank = key.rpartition("/")
            known = rank.isdigit() and int(rank) < self._size
            keys = [f"{name}/{rank}" for rank in range(self._size)] if known else [key]
            self._read.update(zip(keys, self._store.multi_get(keys)))  # waits for them
        return self._read[key]

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        for key in keys:
            self.get(key)


def connected(store: dist.Store, rank: int, size: int, options: Any) -> dist.ProcessGroupGloo:
    """A gloo group of ``size`` ranks, which call this together with a store of their own.

    ``options`` have devices that connect at once: the store is not used afterwards.
    """
    several = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stubs
    addresses = _Addresses(store, size) if several else store
    return dist.ProcessGroupGloo(addresses, rank, size, options)


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
        levels.append(Level(ranks, place, connected(named, place, len(ranks), options)))
    return Tree(tuple(levels), 0, timeout)
