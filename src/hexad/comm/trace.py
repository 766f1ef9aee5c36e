"""The state of a rank's collectives, for a thread that watches them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class CallKind(NamedTuple):
    """Names of one operation on an axis: in messages, in profiles, and of its queue. Calls of one queue are
    completed in the order in which they were started."""

    what: str
    label: str
    queue: str


class TracedCall(NamedTuple):
    """A collective or message: its kind, its bytes, and when it was started, in seconds since the epoch."""

    kind: CallKind
    nbytes: int
    since: float


@dataclass(eq=False)
class _Enqueued:
    """A call that a device had not completed when its wait returned; ``work`` is None as soon as it has."""

    call: TracedCall
    work: Any

    def completed(self) -> bool:
        try:
            if self.work is not None and self.work.is_completed():
                self.work = None  # it holds the result's memory
        except RuntimeError:  # its communicator was aborted
            return False
        return self.work is None


@dataclass(eq=False)
class Trace:
    """The state of this rank's collectives, for a thread that watches them.

    To wait for a collective of a GPU (NCCL) only makes a stream wait: it returns before the collective is
    completed, and so does the next one's. ``is_completed()`` of torch's ``Work`` tells; :meth:`unfinished`
    asks it of one call per queue, so that no more than two results per queue are held. The training thread
    never asks: a query of an event would end the capture of a graph.

    Attributes:
        step: the step being made.
        waiting: the call that is being waited for.
        finished: the call that is known to have been completed last.
        changes: grows with every call that is started, waited for or completed.
        waited: seconds spent waiting for calls.
    """

    step: int = 0
    waiting: TracedCall | None = None
    finished: TracedCall | None = None
    changes: int = 0
    waited: float = 0.0
    _enqueued: dict[str, _Enqueued] = field(default_factory=dict)
    _followed: dict[str, _Enqueued] = field(default_factory=dict)

    def wait(self, call: TracedCall, action: Callable[[], T], work: Any = None) -> T:
        """Wait for a call by ``action``, and return what it returns; one that fails stays the one that is
        waited for. ``work`` is torch's of a call that a device completes later; without, it is completed when
        ``action`` returns.
        """
        self.waiting = call
        begin = time.perf_counter()
        result = action()
        self.waited += time.perf_counter() - begin
        self.waiting = None
        if work is None:
            self.finished = call
        else:
            self._enqueued[call.kind.queue] = _Enqueued(call, work)
        self.changes += 1
        return result

    def unfinished(self) -> list[TracedCall]:
        """Calls that were waited for but that a device has not completed, at most one per queue, oldest
        first. For the watching thread."""
        calls = []
        for queue, newest in list(self._enqueued.items()):
            followed = self._followed.get(queue, newest)
            if followed.completed():
                self._note(followed.call)
                followed = newest
            self._followed[queue] = followed
            if followed.completed():
                self._note(followed.call)
            else:
                calls.append(followed.call)
        return sorted(calls, key=lambda call: call.since)

    def _note(self, completed: TracedCall) -> None:
        if self.finished is None or self.finished.since < completed.since:
            self.finished = completed
            self.changes += 1
