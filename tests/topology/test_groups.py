"""NCCL's process groups: what every rank of a layout splits off which parent, as torch is asked for it."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.compat.facade import world as facade
from hexad.topology import mesh as topology
from hexad.topology.layout import AXES, DENSE_AXES, EXPERT_AXES, Layout
from hexad.topology.mesh import Axis, Mesh

from .test_layout import layouts

GPU = torch.device("cuda", 0)
TIMEOUT = timedelta(seconds=7)


class _Options:
    """Those of NCCL that torch 2.11 to 2.14 have, with the same initial values."""

    def __init__(self) -> None:
        self.is_high_priority_stream, self._timeout = False, timedelta(0)
        self.split_from, self.split_color = None, -2


class Group:
    """A process group of ranks that has an NCCL communicator, and is its own backend."""

    supports_splitting = True

    def __init__(self, ranks: tuple[int, ...], bound: torch.device | None = GPU) -> None:
        self.ranks, self.bound_device_id = ranks, bound

    def _get_backend(self, device: torch.device) -> Group:
        return self


class Split(NamedTuple):
    """One call of a rank: ranks of the parent, colour, ranks of the group, its description, and whether it is
    urgent."""

    parent: tuple[int, ...]
    colour: int
    members: tuple[int, ...]
    description: str
    urgent: bool


class World:
    """A world in which one rank after the other makes its mesh; the last world is torch's. ``splits``: the
    calls of each rank."""

    last: ClassVar[World]

    def __init__(self, layout: Layout, bound: torch.device | None = GPU) -> None:
        self.layout, self.splits = layout, dict[int, list[Split]]()
        self.default = Group(tuple(range(layout.world)), bound)
        self.rank, self.backend = 0, "nccl"
        World.last = self

    def new_group(self, ranks: list[int], *, pg_options: Any = None, **named: Any) -> Group:
        """In place of torch's, which overwrites parent and colour where the default group is bound."""
        assert named["use_local_synchronization"] and self.default.bound_device_id is None
        assert ranks == sorted(ranks) and self.rank in ranks
        assert pg_options is None or pg_options._timeout == named["timeout"]  # torch would warn
        group = Group(tuple(ranks), named["device_id"])
        urgent = pg_options is not None and pg_options.is_high_priority_stream
        parent = None if pg_options is None else pg_options.split_from
        assert (parent is None) == (named["device_id"] is None)
        of = () if parent is None else parent.ranks
        colour = -1 if parent is None else pg_options.split_color
        self.splits[self.rank].append(Split(of, colour, group.ranks, named["group_desc"], urgent))
        return group

    def mesh(self, rank: int, device: torch.device = GPU) -> Mesh:
        self.rank, self.splits[rank] = rank, []
        return Mesh.create(self.layout, device, TIMEOUT.total_seconds())


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the calls of :class:`World` instead of creating groups."""

    class Default:
        WORLD = property(lambda _: World.last.default)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    monkeypatch.setattr(dist, "group", Default())
    monkeypatch.setattr(dist, "get_rank", lambda: World.last.rank)
    monkeypatch.setattr(dist, "get_backend", lambda _: World.last.backend)
    monkeypatch.setattr(dist, "new_group", lambda *a, **named: World.last.new_group(*a, **named))
    monkeypatch.setattr(topology, "_make_tree", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


def _divisor(size: int) -> int:
    """The smallest one above 1."""
    return next(d for d in range(2, size + 1) if size % d == 0) if size > 1 else 1


def everything(world: World, rank: int) -> Mesh:
    """All groups that a run may make: axes, shards and replicas on both grids, tied stages, KV heads on
    several ranks, groups of context ranks, and Megatron's combinations."""
    mesh = world.mesh(rank)
    for grid in ("dense", "expert"):
        data = mesh.gradient_axis(grid)
        mesh.split(data, _divisor(data.size))
        mesh.model_axes(grid)
    mesh.some(mesh.pipeline, 0, mesh.pipeline.size - 1)
    mesh.some(mesh.pipeline, mesh.pipeline.size // 2, mesh.pipeline.size - 1)
    mesh.combined("tensor", "pipeline")
    mesh.combined("expert_tensor", "expert")
    mesh.combined("tensor", "data", "context")
    inside = mesh.factored("tensor", ("kv", "kv_copies"), _divisor(mesh.tensor.size))
    inside = inside.grouped_context(_divisor(inside.context.size))
    inside.split(inside.axes["ulysses"], _divisor(inside.axes["ulysses"].size))
    return mesh


def check(splits: dict[int, list[Split]]) -> None:
    """The rules of ncclCommSplit, for those of the recorded ranks that are in the same parent: the same calls
    in the same order, each with a colour that the members have in common, and others have not."""
    made = len(next(iter(splits.values())))
    assert all(len(calls) == made for calls in splits.values())  # torch's names count them
    calls_of: dict[tuple[int, ...], dict[int, list[Split]]] = defaultdict(dict)
    for rank, calls in splits.items():
        for call in calls:
            assert rank in call.members and set(call.members) <= set(call.parent)
            calls_of[call.parent].setdefault(rank, []).append(call)
    for parent, by_rank in calls_of.items():
        assert by_rank.keys() == set(parent) & splits.keys()
        for together in zip(*by_rank.values(), strict=True):
            members_of: dict[int, tuple[int, ...]] = {}
            for call in together:
                assert members_of.setdefault(call.colour, call.members) == call.members
            ranks = [rank for members in members_of.values() for rank in members]
            assert len(ranks) == len(set(ranks))
            assert len({call.urgent for call in together}) == 1


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_ranks_of_a_parent_split_it_together(layout: Layout) -> None:
    world = World(layout)
    for rank in range(layout.world):
        everything(world, rank)
    if layout.world > 1:
        check(world.splits)


LARGE = [
    Layout(world=12_288, tensor=8, pipeline=8),
    Layout(world=131_072, tensor=8, context=4, pipeline=16, expert=64),
    Layout(world=16_384, tensor=4, context=2, pipeline=8, expert=32, expert_tensor=2),
    Layout(world=15_750, tensor=7, context=3, pipeline=5, expert=25, expert_tensor=3),
    Layout(world=10_080, tensor=6, context=5, pipeline=7, order="data-tensor-pipeline-context"),
]


@pytest.mark.parametrize("layout", LARGE, ids=str)
def test_colours_of_a_large_world(layout: Layout) -> None:
    """Of a few ranks everything is made; the colours of all groups of an axis are compared."""
    world = World(layout)
    ranks = {0, layout.world - 1, layout.world // 3}
    ranks |= {other for rank in list(ranks) for axis in AXES for other in layout.group(rank, axis)[:3]}
    for rank in sorted(ranks):
        everything(world, rank)
    check(world.splits)
    for axis in AXES:
        colours = [group[0] for group in layout.iter_groups(axis)]
        assert len(set(colours)) == len(colours) and max(colours) < 2**31
        for rank in ranks:
            call = next((c for c in world.splits[rank] if c.members == tuple(layout.group(rank, axis))), None)
            assert call is None or call.colour == layout.group(rank, axis)[0]


def test_a_small_group_is_split_off_the_smallest_that_contains_it() -> None:
    world = World(Layout(world=64, tensor=2, context=4, pipeline=2, expert=4))
    everything(world, 0)
    parents = defaultdict(list)
    for call in world.splits[0]:
        parents[call.description].append((len(call.parent), len(call.members)))
    assert parents["data"] == [(16, 4)] and parents["context"] == [(16, 4)]
    assert parents["pipeline"] == [(64, 2)]
    assert parents["tensor"] == [(4, 2)]  # of the expert axis, whose ranks are neighbours here
    assert parents["part of data"][:3] == [(64, 16), (16, 2), (16, 8)]
    # KV heads have nothing inside of two ranks; ulysses and ring are parts of the context ranks.
    assert parents["part of context"] == [(4, 2), (4, 2), (2, 2)]
    assert parents["pipeline, to the next rank"] == parents["pipeline, to the previous rank"] == [(2, 2)]


def test_each_direction_of_the_pipeline_has_a_communicator() -> None:
    world = World(Layout(world=8, tensor=2, pipeline=4))
    mesh = world.mesh(5)
    groups = {mesh.pipeline.group, mesh.pipeline.to_next, mesh.pipeline.to_previous}
    assert len(groups) == 3 and all(group.ranks == (1, 3, 5, 7) for group in groups)  # type: ignore[union-attr]
    assert mesh.tensor.to_next is mesh.tensor.to_previous is None
    for device, backend in ((torch.device("cpu"), "cpu:gloo,cuda:nccl"), (GPU, "gloo")):
        world.backend = backend
        mesh = world.mesh(5, device)
        assert mesh.pipeline.to_next is mesh.pipeline.to_previous is None


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")], ids=str)
def test_a_default_group_without_a_device_is_not_split(device: torch.device) -> None:
    world = World(Layout(world=8, tensor=2, pipeline=2), bound=None)
    for rank in range(8):
        mesh = world.mesh(rank, device)
        mesh.some(mesh.pipeline, 0)
        mesh.some(mesh.pipeline, 1, 1)
        assert {call.parent for call in world.splits[rank]} == {()}


def test_a_group_of_one_rank_needs_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may ask for it on some ranks only, which a split would wait for."""
    world = World(Layout(world=8))
    world.rank, world.splits[3] = 3, []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(facade, "_last", [facade._World(None)])
    monkeypatch.setattr(facade, "join", lambda: GPU)
    group: Any = facade.group_of(Axis("tensor", (3,)))
    assert group.ranks == (3,) and facade.group_of(Axis("pipeline", (3,))) is group
    assert [call.parent for call in world.splits[3]] == [()]


@pytest.mark.parametrize("bound", [GPU, None], ids=str)
def test_groups_that_layers_wait_for_are_urgent(bound: torch.device | None) -> None:
    world = World(Layout(world=8, tensor=2, pipeline=2), bound)
    for device, urgent in ((GPU, True), (torch.device("cpu"), False)):
        mesh = world.mesh(0, device)
        mesh.split(mesh.data, 2)
        asked = {call.description: call.urgent for call in world.splits[0] if ", to " not in call.description}
        assert asked == {"tensor": urgent, "pipeline": urgent, "data": False, "part of data": False}


@given(layouts(), st.data())
@settings(max_examples=200, deadline=None)
def test_groups_inside_of_others_are_known(layout: Layout, data: st.DataObject) -> None:
    """Where groups of one axis lie in groups of another, in every group, by their ranks."""
    grids = st.sampled_from([DENSE_AXES, EXPERT_AXES])
    outer, inner = (
        data.draw(grids.flatmap(lambda grid: st.lists(st.sampled_from(grid), min_size=1, unique=True)))
        for _ in range(2)
    )
    number = {rank: n for n, group in enumerate(layout.groups(*outer)) for rank in group}
    inside = all(len({number[rank] for rank in group}) == 1 for group in layout.groups(*inner))
    assert layout.contains(outer, inner) == inside


TORCH = {name: getattr(dist, name) for name in ("new_group", "group", "get_rank", "get_backend")}


def test_torch_splits_off_the_parent_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own ``new_group``, with gloo of one rank in place of NCCL."""
    made: list[Any] = []

    class NCCL(dist.ProcessGroupGloo):  # type: ignore[misc]
        Options, supports_splitting, device = _Options, True, None

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(dist.HashStore(), 0, 1, TIMEOUT)
            self.nccl = options
            made.append(self)

        def eager_connect_single_device(self, device: torch.device) -> None:
            self.device = device

    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_NCCL_AVAILABLE", True)
    for name, original in TORCH.items():
        monkeypatch.setattr(dist, name, original)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=2, world_size=8, timeout=TIMEOUT)
    try:
        default = dist.group.WORLD
        default.bound_device_id = GPU  # of init_process_group, which looks for the GPU
        data = topology.new_group("data", (0, 2, 4), default, GPU, TIMEOUT, "data")
        run = topology.new_group("data", (2, 4), data, GPU, TIMEOUT, "part of data")
        assert default.bound_device_id == data.bound_device_id == GPU
        assert dist.get_backend(run) == "nccl" and dist.get_group_rank(run, 2) == 0
    finally:
        dist.destroy_process_group()
    parents = [(backend.nccl.split_from, backend.nccl.split_color, backend.device) for backend in made]
    assert parents[1:] == [(made[0], 0, GPU), (made[1], 2, GPU)]
