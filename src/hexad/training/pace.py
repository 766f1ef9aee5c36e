"""How long each rank takes for a step, and garbage collection at fixed points of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hexad.comm import merging, wait_for
from hexad.topology.mesh import Mesh

COLLECT_EVERY = 100
"""Steps between collections of all generations."""


class _Times(NamedTuple):
    """Seconds of the slowest of some ranks, that rank's number, and seconds of the fastest."""

    slowest: float
    rank: int
    fastest: float

    def merged(self, other: _Times) -> _Times:
        slower = self if self.slowest >= other.slowest else other
        return _Times(slower.slowest, slower.rank, min(self.fastest, other.fastest))


class Pace:
    """Finds the slowest rank of each step, by the time that is its own: on a CPU without waiting for
    collectives, on a GPU until the last backward pass is over.

    Ranks wait for each other in every step, so that the duration of a whole step is the same on all of them.
    The hosts compare the times, in the background: nothing is asked of a GPU.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._gpu = mesh.device.type == "cuda"
        self._began: Any = None
        self._computed: Any = None
        self._axis = mesh.background("pace")
        self._comparison: Future[_Times] | None = None

    def begin(self) -> None:
        """Record the start of a step."""
        self._began = self._mark()

    def computed(self) -> None:
        """Record the end of the step's forward and backward passes (on a GPU: of starting them)."""
        if self._gpu:
            self._computed = self._mark()

    def end(self) -> None:
        """Record the end of a step, and start the comparison with the other ranks."""
        seconds = self._seconds()
        self._comparison = merging(_Times(seconds, self._mesh.rank, seconds), self._axis, _Times.merged)

    def slowest(self) -> dict[str, float] | None:
        """``rank``, ``seconds`` and ``fastest_seconds`` (of the fastest rank) of the step that ended last."""
        if self._comparison is None:
            return None
        slowest = wait_for(self._mesh.world, self._comparison.result)
        return {"rank": slowest.rank, "seconds": slowest.slowest, "fastest_seconds": slowest.fastest}

    def close(self) -> None:
        """Wait for the comparison under way, if any: no thread is left behind."""
        self.slowest()

    def _mark(self) -> Any:
        if not self._gpu:
            trace = self._mesh.trace
            return time.perf_counter() - (trace.waited if trace is not None else 0.0)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self) -> float:
        if not self._gpu:
            return float(self._mark() - self._began)
        return float(self._began.elapsed_time(self._computed)) / 1e3  # both are over: the loss has been read


@contextmanager
def collected_by_step() -> Iterator[Callable[[int], object]]:
    """Switch off automatic garbage collection; yields a function of the step's number that collects, to be
    called at the same point on all ranks: one that collects in the middle of a step makes all others wait for
    it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # what is there now stays: later collections need not visit it
    gc.disable()
    try:
        yield lambda step: gc.collect(2 if step % COLLECT_EVERY == 0 else 1)
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
