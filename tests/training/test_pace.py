"""The slowest rank is named, and garbage is collected between steps only."""

import gc
import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hexad
from hexad import load_config
from hexad.comm import Trace, all_reduce
from hexad.engine.engine import Engine
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh
from hexad.training.pace import Pace, collected_by_step

from ..pool import Pool
from .conftest import MakeRun


class _NoOperators(TorchDispatchMode):
    """Of this thread: an operator on a GPU's tensors might wait for it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_record_function_" in str(function), f"unexpected {function}"  # a profiler's mark
        return function(*args, **(kwargs or {}))


def paced() -> dict[str, float] | None:
    """A step in which the second rank works longer; the others wait for it in a collective."""
    mesh = Mesh.create(Layout(data=3, world=3), torch.device("cpu"), trace=Trace())
    pace = Pace(mesh)
    all_reduce(torch.zeros(1), mesh.world)
    pace.begin()
    time.sleep(1.0 if mesh.rank == 1 else 0.02)
    all_reduce(torch.zeros(1), mesh.world)
    pace.computed()
    with _NoOperators():
        pace.end()
        return pace.slowest()


def test_slowest_rank_is_named(pool: Pool) -> None:
    """Compared on the hosts."""
    paces = pool.run(3, paced)
    assert paces == [paces[0]] * 3
    assert paces[0]["rank"] == 1 and paces[0]["seconds"] >= 1.0 > paces[0]["fastest_seconds"]


def compared() -> bool:
    """Whether the comparison is over when it is closed; the second rank comes late."""
    mesh = Mesh.create(Layout(data=2, world=2), torch.device("cpu"))
    pace = Pace(mesh)
    pace.begin()
    time.sleep(0.3 * mesh.rank)
    pace.computed()
    pace.end()
    pace.close()
    return pace._comparison is not None and pace._comparison.done()


def test_closing_waits_for_the_comparison(pool: Pool) -> None:
    assert pool.run(2, compared) == [True, True]


def test_a_gpus_time_ends_with_the_last_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([3.0, 5.5])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = next(now)

        def elapsed_time(self, end: Any) -> float:
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    mesh = Mesh.create(Layout(world=1), torch.device("cpu"))
    pace = Pace(mesh)
    pace._gpu = True
    assert pace.slowest() is None
    pace.begin()
    pace.computed()
    pace.end()
    assert pace.slowest() == {"rank": 0, "seconds": 2.5, "fastest_seconds": 2.5}


def test_garbage_is_collected_between_steps(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Automatic collection would come whenever enough has been allocated."""
    collected: list[tuple[bool, int]] = []
    inside = False
    step = Engine.train_step

    def watched(self: Engine, *arguments: Any) -> Any:
        nonlocal inside
        inside = True
        keep = [[[]] for _ in range(5000)]  # enough for an automatic collection
        try:
            return step(self, *arguments)
        finally:
            inside = False
            del keep

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append((inside, info["generation"]))

    monkeypatch.setattr(Engine, "train_step", watched)
    monkeypatch.setattr("hexad.training.loop.collected_by_step", collected_by_step)  # not that of tests
    monkeypatch.setattr("hexad.training.pace.COLLECT_EVERY", 5)
    closed: list[Pace] = []
    monkeypatch.setattr(Pace, "close", lambda self: closed.append(self))
    config = load_config(make_run().path)
    gc.callbacks.append(note)
    try:
        hexad.train(config)
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.freeze()  # as at the session's start
    assert len(closed) == 1
    assert not any(during for during, _ in collected)
    generations = "".join(str(generation) for _, generation in collected)
    assert "211112111121" in generations  # twelve steps
