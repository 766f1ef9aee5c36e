"""What a rank's collectives are doing, for a thread that watches them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Call(NamedTuple):
    """A collective or message: in words, its bytes, when it was started (seconds since the epoch), and its
    label in profiles."""

    what: str
    nbytes: int
    since: float
    label: str


@dataclass(eq=False)
class Trace:
    """What this rank's collectives are at, for a thread that watches them.

    Attributes:
        step: the step being made.
        waiting: the call that is being waited for.
        finished: the call that was last waited for.
        changes: grows with every call that is started or finished.
        waited: seconds spent waiting for calls.
    """

    step: int = 0
    waiting: Call | None = None
    finished: Call | None = None
    changes: int = 0
    waited: float = 0.0

    def wait(self, call: Call, action: Callable[[], object]) -> None:
        """Wait for a call by ``action``; one that fails stays the one that is waited for."""
        self.waiting = call
        begin = time.perf_counter()
        action()
        self.waited += time.perf_counter() - begin
        self.waiting, self.finished = None, call
        self.changes += 1
