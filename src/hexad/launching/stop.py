"""Graceful stop of a run: SIGTERM, SIGINT and SIGUSR1 save a checkpoint and exit."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future
from types import FrameType

from hexad.comm import merging, wait_for
from hexad.topology.mesh import Mesh

from .environment import HELD_BACK

SAVE_FAILED = "save failed"
_SAVE_FAILED_NUMBER = 255  # above every signal's
_ASKED, _ASKED_NUMBER = "callback", 254
_ONE_REQUEST = 0.5  # seconds
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is the signal with which SLURM and others announce pre-emption."""


class StopRequest:
    """Records a signal, and lets all ranks agree on it after a step.

    They start to agree before the step, in the background, and read the result after it, so that no rank
    waits and nothing is asked of a GPU. A second signal, more than half a second later, has its default
    effect (managers that signal a command and its ranks send two at once). Used as a context manager.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._axis = mesh.background("signals")
        self._received = self._requested = 0
        self._at = 0.0
        self._previous: dict[int, object] = {}
        self._mask: set[int] | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
            # A blocked signal is delivered now.
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {HELD_BACK})
        return self

    def __exit__(self, *_: object) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._restore()

    def request(self) -> None:
        """Ask to stop, as a signal does."""
        self._requested = _ASKED_NUMBER

    def ask(self, save_failed: bool) -> Future[int]:
        """Start asking all ranks whether any has received a signal, or its background save has failed."""
        number = _SAVE_FAILED_NUMBER if save_failed else self._received or self._requested
        return merging(number, self._axis, max)

    def answer(self, asked: Future[int]) -> str | None:
        """The name of a signal that some rank received, ``callback`` after :meth:`request`, SAVE_FAILED, or
        None; the same on all ranks.

        Raises:
            CommError: a peer is lost.
        """
        number = wait_for(self._mesh.world, asked.result)
        if number == _SAVE_FAILED_NUMBER:
            return SAVE_FAILED
        if number == _ASKED_NUMBER:
            return _ASKED
        return signal.Signals(number).name if number else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._at = number, now
        elif now - self._at > _ONE_REQUEST:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
