"""Stopping a run politely: SIGTERM and SIGINT save a checkpoint and exit."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

import torch

from hexad.comm import Pending, all_reduce_async
from hexad.topology.mesh import Mesh

POLITE_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Remembers a signal, and lets all ranks agree on it after a step.

    The agreement is a one-number reduction started before the step and read after it, so that nobody waits.
    A second signal acts as it would without Hexad. Used as a context manager.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._received = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in POLITE_SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def ask(self) -> Pending:
        """Start asking whether any rank has received a signal."""
        return all_reduce_async(
            torch.tensor([self._received], device=self._mesh.device), self._mesh.world, "max"
        )

    @staticmethod
    def answer(pending: Pending) -> str | None:
        """The name of a signal that some rank received, or None; the same on all ranks."""
        number = int(pending.wait())
        return signal.Signals(number).name if number else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
