"""Writes the stacks of all threads, and the collective a rank waits for, after too long without progress."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import TextIO

from hexad.comm.trace import Call, Trace

log = logging.getLogger("hexad.watch")


class Watch:
    """Watches this rank's collectives from a separate thread. Used as a context manager.

    Shortly before ``timeout`` seconds without progress, when the peers of a hung rank are about to time out,
    the stacks of all threads and the collective that the rank waits for are written to the log. The rank is
    not ended: a long compilation or save may take that long. Before the first step they are written to the
    log file only, not to stderr. A rank that was itself stopped for so long writes them as soon as it runs
    again, even if it is about to end: its peers have gone by then.

    If a hanging thread holds Python's lock, this thread cannot run either. A timer in C then writes the
    stacks. It is reset as long as this thread runs: reading the stacks of running threads can crash the
    process. The same can happen if the complete job is stopped (SIGSTOP) for longer than that: the timer uses
    the wall clock and cannot distinguish this from a thread that did not run.

    Args:
        trace: of the mesh.
        timeout: ``run.timeout``, in seconds.
        file: the rank's log.
    """

    def __init__(self, trace: Trace, timeout: float, file: TextIO) -> None:
        self._trace = trace
        self._timeout = timeout
        self._file = file
        self._interval = min(1.0, timeout / 20)
        self._limit = timeout - min(10.0, timeout / 5)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hexad-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        looked = since = time.monotonic()
        seen, told, over = self._trace.changes, False, False
        while not over:
            faulthandler.dump_traceback_later(self._limit, file=self._file)
            over = _in_the_stack(self.words(), lambda: self._over.wait(self._interval))
            now, before = time.monotonic(), looked
            looked = now
            if now - before > self._limit:  # stopped, or Python's lock was held: the trace cannot tell
                self._tell(f"no progress for {now - before:.0f} s, in which no Python ran")
            elif self._trace.changes != seen:
                seen, since, told = self._trace.changes, now, False
            elif now - since > self._limit and not told:
                told = True
                self._tell(f"no progress for {now - since:.0f} s")

    def _tell(self, what: str) -> None:
        text = f"{what} (run.timeout is {self._timeout:.0f} s); {self.words()}"
        if self._trace.step:
            log.warning(text)
        else:
            print(text, file=self._file, flush=True)
        faulthandler.dump_traceback(self._file)

    def words(self) -> str:
        """Step, and the collective this rank waits in or has last finished."""
        trace = self._trace
        waiting, finished = trace.waiting, trace.finished
        if waiting is not None:
            return f"step {trace.step}, waiting in {_words(waiting)}"
        return f"step {trace.step}, last finished {_words(finished) if finished else 'no collective'}"


def _words(call: Call) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(call.since))
    return f"{call.what}, {call.nbytes} bytes, started at {since}"


def _in_the_stack(words: str, call: Callable[[], bool]) -> bool:
    """Call something from a function whose "file" is ``words``.

    They then appear in the stacks that the timer in C writes when no Python can run any more: it writes the
    names of files and functions, and nothing else.
    """

    def last_seen() -> bool:
        return call()

    code = last_seen.__code__.replace(co_filename=f"as last seen: {words}")
    named: Callable[[], bool] = FunctionType(code, {}, closure=last_seen.__closure__)
    return named()
