"""The watch of a rank: after too long without progress it writes the stacks of all threads, the collective
that the rank waits for, and torch's flight recorder, which has the last collectives of each process group."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import TextIO

import torch

from hexad.comm.trace import Trace, TracedCall

from .files import withdraw_error, write_error, write_in_one_step

_FOLDER, _PREFIX = "flight-recorder", "rank_"
_ENTRIES = 2000
_HEARTBEAT = 480
"""torch's own limit for the heartbeat of NCCL's watchdog, in seconds."""


def enable_flight_recorder(run_dir: str | Path, ranks: int, timeout: float) -> None:
    """Let NCCL's process groups record their collectives, and torch's watchdog write them into ``run_dir``.

    To be called before the first group is made. Variables that the user has set are left as they are.
    ``ranks``: of the world; ``timeout``: of its collectives, in seconds.
    """
    prefix = str(Path(run_dir).absolute() / _FOLDER / _PREFIX)
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", str(_ENTRIES)),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", str(_ENTRIES)),  # its name before torch 2.9
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        # Each rank asks the store, in this interval, whether another one is writing: 1,000 calls/s at most.
        ("TORCH_NCCL_COORD_CHECK_MILSEC", str(max(1000, ranks))),
        # A watchdog that is silent for so long ends the process: not before a collective is out of time, and
        # the watch has reported it.
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(max(_HEARTBEAT, math.ceil(timeout) + _HEARTBEAT // 4))),
        ("TORCH_FR_DUMP_TEMP_FILE", prefix),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", prefix),
    ):
        os.environ.setdefault(name, value)


def make_folder(run_dir: str | Path) -> None:
    """Make the directory that the watchdog writes to: it does not."""
    (Path(run_dir) / _FOLDER).mkdir(exist_ok=True)


def write_flight_record(run_dir: str | Path, rank: int) -> None:
    """Write what is recorded on this rank; nothing where nothing is. A failure is logged."""
    module = torch._C._distributed_c10d
    # NCCL's recorder, or that of gloo, which torch 2.13 has.
    dump = getattr(module, "_dump_nccl_trace", None) or getattr(module, "_dump_fr_trace", None)
    if dump is None:
        return
    path = Path(run_dir) / _FOLDER / f"{_PREFIX}{rank}"
    try:
        content = dump()
        if pickle.loads(content).get("entries"):
            make_folder(run_dir)
            write_in_one_step(path, content)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        log.warning("%s: the flight recorder cannot be written: %s", path, error)


log = logging.getLogger("hexad.watch")


class Watch:
    """Watches this rank's collectives from a separate thread. Used as a context manager.

    Shortly before ``timeout`` seconds without progress, when the peers of a hung rank are about to time out,
    the stacks of all threads and the collective that the rank waits for are written to the log. The rank is
    not ended: a long compilation or save may take that long. Before the first step they are written to the
    log file only, not to stderr. A rank that was itself stopped for so long writes them as soon as it runs
    again, even if it is about to end: its peers have gone by then.

    Collectives of a GPU are completed after they were waited for, so that their progress is asked for
    (:class:`~hexad.comm.trace.Trace`). If one is not completed in time, torch's watchdog aborts the process
    at the timeout: the dump of torch's flight recorder is written before, and a message for the launcher.

    If a hanging thread holds Python's lock, this thread cannot run either. A timer in C then writes the
    stacks. It is reset as long as this thread runs: reading the stacks of running threads can crash the
    process. The same can happen if the complete job is stopped (SIGSTOP) for longer than that: the timer uses
    the wall clock and cannot distinguish this from a thread that did not run.

    ``timeout`` is ``run.timeout``, in seconds; ``file`` the rank's log; ``device`` that of its collectives.
    """

    def __init__(
        self,
        trace: Trace,
        timeout: float,
        file: TextIO,
        rank: int,
        run_dir: Path,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
    ) -> None:
        self._trace = trace
        self._device = device
        self._timeout = timeout
        self._file = file
        self._rank = rank
        self._run_dir = run_dir
        self._unfinished: list[TracedCall] = []
        self._interval = min(1.0, timeout / 20)
        self._limit = timeout - min(10.0, timeout / 5)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hexad-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread has the first one, and would start CUDA there
        looked = since = time.monotonic()
        seen, reported, over = self._trace.changes, False, False
        while not over:
            faulthandler.dump_traceback_later(self._limit, file=self._file)
            over = _in_the_stack(self.words(), lambda: self._over.wait(self._interval))
            now, before = time.monotonic(), looked
            looked = now
            self._unfinished = self._trace.unfinished()
            if self._trace.changes != seen:
                seen, since = self._trace.changes, now
            # torch's watchdog ends the rank run.timeout after it has started what is not completed.
            idle = max([now - since, *(time.time() - call.since for call in self._unfinished)])
            if now - before > self._limit:  # stopped, or Python's lock was held: the trace cannot tell
                self._tell(f"no progress for {now - before:.0f} s, in which no Python ran")
            elif idle > self._limit and not reported:
                self._tell(f"no progress for {idle:.0f} s")
                reported = True
            elif idle <= self._limit and reported:
                reported = False
                withdraw_error()

    def _tell(self, what: str) -> None:
        text = f"{what} (run.timeout is {self._timeout:.0f} s); {self.words()}"
        if self._trace.step:
            log.warning(text)
        else:
            print(text, file=self._file, flush=True)
        faulthandler.dump_traceback(self._file)
        if self._unfinished:
            # What is left if torch's watchdog now aborts the process.
            call = self._unfinished[0]
            write_error(f"CommError: {call.kind.what} timed out: not completed within {self._timeout:.0f} s")
        write_flight_record(self._run_dir, self._rank)

    def words(self) -> str:
        """Step, and the collectives this rank waits in, that a device has not completed, or the last one that
        is known to be completed."""
        trace = self._trace
        waiting, finished = trace.waiting, trace.finished
        parts = [f"waiting in {_words(waiting)}"] if waiting is not None else []
        parts += [f"not completed by the device: {_words(call)}" for call in self._unfinished]
        if not parts:
            parts = [f"last finished {_words(finished) if finished else 'no collective'}"]
        return f"step {trace.step}, {'; '.join(parts)}"


def _words(call: TracedCall) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(call.since))
    return f"{call.kind.what}, {call.nbytes} bytes, started at {since}"


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
