"""Agreements of all ranks go by a tree: every level of it, against their definitions; no rank knows all."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hexad import comm
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.config import HexadError
from hexad.launching import launch
from hexad.launching.environment import Environment
from hexad.launching.stop import SAVE_FAILED, StopRequest
from hexad.model.configuration import load_config
from hexad.topology import mesh as mesh_module
from hexad.topology.layout import CHANNELS, FAN_OUT, Layout, tree_groups
from hexad.topology.mesh import Mesh, connected

from ..pool import TIMEOUT, Pool


@pytest.mark.parametrize(
    ("world", "fan_out"), [(10_000, FAN_OUT), (16_384, FAN_OUT), (7, 2), (17, 16), (5, 3)]
)
def test_the_tree_connects_all_ranks_with_few_connections_each(world: int, fan_out: int) -> None:
    parents, most = {}, 0
    for rank in range(world):
        groups = list(tree_groups(rank, world, fan_out))
        most = max(most, sum(len(group) - 1 for group in groups))
        assert all(group[0] == rank for group in groups[:-1]) and all(rank in group for group in groups)
        assert all(list(tree_groups(other, world, fan_out)).count(groups[0]) for other in groups[0][:3])
        if groups[-1][0] != rank:
            parents[rank] = groups[-1][0]
    assert len(parents) == world - 1 and all(parent < rank for rank, parent in parents.items())
    assert most <= 4 * (fan_out - 1) or world < 100
    assert most < 100


@contextmanager
def small_groups(fan_out: int) -> Iterator[None]:
    """A tree of several levels on a few ranks."""
    mesh_module.FAN_OUT, before = fan_out, mesh_module.FAN_OUT
    try:
        yield
    finally:
        mesh_module.FAN_OUT = before


def _agreements(fan_out: int) -> tuple[Any, ...]:
    with small_groups(fan_out):
        mesh = Mesh.create(Layout(world=dist.get_world_size()), torch.device("cpu"))
    world, rank = mesh.world, mesh.rank
    long = str(rank) * 1000  # more than one message
    return (
        comm.merged([long], world, list.__add__),
        comm.gathered([rank], world, list.__add__),
        comm.from_first(lambda: f"of {rank}" * 500, world),
        comm.first_difference("same", world),
        comm.first_difference("other" if rank in (3, 4) else "same", world),
        comm.first_difference({"b": 1, "a": 2} if rank == 2 else {"a": 2, "b": 1}, world),
        comm.first_difference(rank, world),
    )


@pytest.mark.parametrize(("world", "fan_out"), [(5, 2), (5, 3), (8, 2), (3, 16)])
def test_agreements_are_what_their_definitions_say(pool: Pool, world: int, fan_out: int) -> None:
    for rank, agreements in enumerate(pool.run(world, _agreements, fan_out)):
        merged, gathered, first, same, other, equal, all_different = agreements
        assert merged == [str(value) * 1000 for value in range(world)]
        assert gathered == (None if rank else list(range(world)))
        assert first == "of 0" * 500
        assert same is None and equal is None
        assert other == (("same", 3, "other") if world > 3 else None)
        assert all_different == (0, 1, 1)


def _fail(ranks: set[int], fan_out: int) -> list[str]:
    with small_groups(fan_out):
        mesh = Mesh.create(Layout(world=dist.get_world_size()), torch.device("cpu"))

    def act() -> None:
        if mesh.rank in ranks:
            raise HexadError(f"no file ({mesh.rank})")

    messages = []
    for call in (comm.agreed, comm.from_first):
        try:
            call(act, mesh.world)
        except HexadError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_errors_are_the_same_on_all_ranks(pool: Pool) -> None:
    assert pool.run(5, _fail, {4, 3}, 2) == [["AgreedError: rank 3: no file (3)"]] * 5
    assert pool.run(3, _fail, {0, 1, 2}, 2) == [["AgreedError: no file (0)"] * 2] * 3


def _at_once(fan_out: int) -> list[list[int]]:
    """Agreements of three threads, over the connections of one tree."""
    with small_groups(fan_out):
        mesh = Mesh.create(Layout(world=dist.get_world_size()), torch.device("cpu"))
    values: dict[int, list[int]] = {}

    def work(channel: int) -> None:
        axis = mesh.background(CHANNELS[channel])
        values[channel] = [comm.merged(channel * 100 + turn, axis, max) for turn in range(30)]

    threads = [threading.Thread(target=work, args=(channel,)) for channel in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    return [values[channel] for channel in range(3)]


def test_threads_share_the_connections(pool: Pool) -> None:
    expected = [[channel * 100 + turn for turn in range(30)] for channel in range(3)]
    assert pool.run(4, _at_once, 2) == [expected] * 4


def _stopped(fan_out: int) -> list[str | None]:
    with small_groups(fan_out):
        mesh = Mesh.create(Layout(world=dist.get_world_size()), torch.device("cpu"))
    stop, answers = StopRequest(mesh), []
    for turn in range(4):
        if turn == 1 and mesh.rank == 3:
            stop._received = 15
        answers.append(stop.answer(stop.ask(turn == 2 and mesh.rank == 1)))
    return answers


def test_signals_of_any_rank_reach_all(pool: Pool) -> None:
    assert pool.run(5, _stopped, 2) == [[None, "SIGTERM", SAVE_FAILED, "SIGTERM"]] * 5


def _groups_of_all(directory: str) -> list[int]:
    """Sizes of the process groups that a run makes, and how often the one of all ranks is used."""
    made: list[int] = []
    native, new_group = dist.ProcessGroupGloo, dist.new_group

    class Recorded(native):  # type: ignore[misc,valid-type]
        def __init__(self, store: Any, rank: int, size: int, *arguments: Any) -> None:
            made.append(size)
            super().__init__(store, rank, size, *arguments)

    def recorded(ranks: Any = None, *arguments: Any, **named: Any) -> Any:
        made.append(len(ranks) if ranks is not None else dist.get_world_size())
        return new_group(ranks, *arguments, **named)

    dist.ProcessGroupGloo, dist.new_group = Recorded, recorded
    used: Counter[str] = Counter()
    try:
        with small_groups(2):
            layout = Layout(world=4, tensor=2, data=2)
            mesh = Mesh.create(layout, torch.device("cpu"))
        mesh.world.group = None  # torch would take the default group

        def unused(*arguments: Any, **named: Any) -> None:
            used["default group"] += named.get("group") is None

        before = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_object", "gather_object")}
        for name in before:
            setattr(dist, name, unused)
        try:
            run = launch.Run(mesh, Environment(), None)  # type: ignore[arg-type]
            run.identical("settings", {"a": 1})
            run.agreed(lambda: None)
            saved = Checkpointer(load_config({"run": {"dir": directory}}), mesh)
            saved.find()
            saved.save([], {"step": 1, "samples": 1})
            saved.wait()
            stop = StopRequest(mesh)
            stop.answer(stop.ask(False))
            saved.close()
        finally:
            for name, call in before.items():
                setattr(dist, name, call)
    finally:
        dist.ProcessGroupGloo, dist.new_group = native, new_group
    assert not used
    return made


def test_no_agreement_needs_a_group_of_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for made in pool.run(4, _groups_of_all, str(tmp_path)):
        assert made and max(made) == 2


class _Counted(dist.Store):
    """A store that counts the calls of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = dist.HashStore(), list[str]()

    def set(self, key: str, value: Any) -> None:
        self.calls.append("set")
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.calls.append("get")
        return self.inner.get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.calls.append("wait")
        self.inner.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls.append("multi_get")
        values: list[bytes] = self.inner.multi_get(keys)  # type: ignore[attr-defined]
        return values

    def has_extended_api(self) -> bool:
        return True


@pytest.mark.parametrize("size", [2, 5, 16])
def test_a_rank_asks_the_store_twice_to_connect_a_group(size: int) -> None:
    """However large the group; each connection is used."""
    store, sums = _Counted(), []
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]

    def join(rank: int) -> None:
        group = connected(dist.PrefixStore("group", store), rank, size, options)
        received = [torch.zeros(1) for _ in range(size)]
        others = [other for other in range(size) if other != rank]
        works = [group.recv([received[other]], other, 0) for other in others]
        works += [group.send([torch.tensor([float(rank)])], other, 0) for other in others]
        for work in works:
            work.wait()
        sums.append(sum(map(float, received)) + rank)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [sum(range(size))] * size
    assert Counter(store.calls) == {"set": size, "multi_get": size}


def _joined(rank: int, world: int, path: str, largest: int) -> int:
    """The connections that a rank has, beside those it had."""
    before, meet, most = _established(), launch.meet, launch._LARGEST_MESH
    variables = dict(os.environ)
    launch._LARGEST_MESH = largest
    launch.meet = lambda *arguments: dist.FileStore(path, world)  # type: ignore[assignment]
    try:
        with small_groups(2):
            launch._join(Environment(rank, world), world, torch.device("cpu"), TIMEOUT)
            mesh = Mesh.create(Layout(world=world, tensor=2, data=world // 2), torch.device("cpu"))
        launch.Run(mesh, Environment(), None).identical("x", 1)  # type: ignore[arg-type]
        connections = len(_established() - before)
        comm.merged(0, mesh.world, max)  # all have counted
        total = torch.ones(1)
        dist.all_reduce(total)  # the default group works, as soon as somebody uses it
        assert total == world
        comm.merged(0, mesh.world, max)
        return connections
    finally:
        launch.meet, launch._LARGEST_MESH = meet, most
        os.environ.clear()
        os.environ.update(variables)


def _established() -> set[str]:
    """The sockets of this process's TCP connections."""
    links = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _exists(name))
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return {line[9] for line in lines if len(line) > 9 and line[3] == "01"} & inodes


def _exists(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_a_large_world_is_not_connected_pair_by_pair(pool: Pool, tmp_path: Path) -> None:
    world = 8
    few = pool.apart(world, _joined, str(tmp_path / "lazy"), 4)
    expected = [sum(len(group) - 1 for group in tree_groups(rank, world, 2)) for rank in range(world)]
    assert few == expected and max(few) == 3  # axes that no collective has used have none either
    many = pool.apart(world, _joined, str(tmp_path / "eager"), 64)
    assert min(many) > world - 1


@pytest.mark.parametrize("named", [None, "eth0", "eth0,eth1"])
def test_the_tree_is_connected_over_the_interfaces_that_are_named(
    named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a host's name leads to 127.0.0.1, no other host could connect."""
    gloo, asked = torch.distributed.ProcessGroupGloo, []
    monkeypatch.setattr(gloo, "create_device", lambda **options: asked.append(options))
    monkeypatch.setattr(gloo, "create_default_device", lambda **options: asked.append(options))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    assert len(mesh_module._gloo_devices()) == len(asked)
    interfaces = [{}] if named is None else [{"interface": interface} for interface in named.split(",")]
    assert asked == [{**interface, "lazy_init": False} for interface in interfaces]
