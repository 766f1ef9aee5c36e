"""What all interfaces for other systems share: the world that a script has joined, and what it reads."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hexad import Engine, Layout, Mesh, load_config
from hexad.comm import CommError
from hexad.compat.facade import reads, world
from hexad.config import HexadError

CPU = torch.device("cpu")


def test_groups_wait_as_long_as_the_scripts_own() -> None:
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=limit)
    try:
        assert world.mesh_of(CPU).timeout == limit
    finally:
        dist.destroy_process_group()


def test_groups_without_options_wait_as_long_as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are written in Python, and of backends for other devices."""

    def fails(_: torch.device) -> Any:
        raise RuntimeError("no backend for this device")

    others: list[Callable[[torch.device], Any]] = [fails, lambda _: SimpleNamespace()]
    for backend in others:
        group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=backend))
        monkeypatch.setattr(world, "dist", SimpleNamespace(group=group))
        assert world._timeout(CPU) == timedelta(minutes=30)


@pytest.fixture
def engine() -> Engine:
    """Of two layers, on one rank, whose gatherings are counted."""
    config = load_config({"run": {"device": "cpu"}, "optimizer": {"clip": 0.0}})
    engine = Engine(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), Mesh.create(Layout(world=1), CPU), config
    )
    calls: list[tuple[str, int]] = []
    engine.gatherer.acquire = lambda bucket: calls.append(("acquire", engine.buckets.index(bucket)))  # type: ignore[method-assign]
    engine.gatherer.release = lambda bucket: calls.append(("release", engine.buckets.index(bucket)))  # type: ignore[method-assign]
    engine.calls = calls  # type: ignore[attr-defined]
    return engine


def test_what_is_read_is_gathered_once_until_it_is_released(engine: Any) -> None:
    read = reads.GatheredReads(engine)
    for parameter in engine.stages[0].parameters():
        assert read(parameter) is parameter
    gathered = [number for _, number in engine.calls]
    assert gathered and len(set(gathered)) == len(gathered) <= len(engine.buckets)
    read.release()
    assert engine.calls[len(gathered) :] == [("release", number) for number in reversed(gathered)]
    read.release()
    assert len(engine.calls) == 2 * len(gathered)


def test_what_one_rank_reads_alone_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reads.GatheredReads(engine)
    asked: list[object] = []

    def fails(what: str, value: object, axis: object) -> None:
        asked.append(value)
        raise CommError("agreement over axis world failed: timed out")

    monkeypatch.setattr(reads, "identical", fails)
    weight = engine.stages[0][1].weight
    read(weight)
    assert not asked  # in a pass
    read.release()
    engine.calls.clear()
    read.checked = True
    with pytest.raises(HexadError, match=r"1\.weight: found read on this rank .* read it on all ranks"):
        read(weight)
    assert asked == ["1.weight"] and not engine.calls
