"""Starting local ranks through torchrun's elastic agent, restarting them, and reporting how they ended."""

import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from hexad.config import USER_ERROR

from .environment import HELD_BACK, hold_back_notice
from .stop import STOP_SIGNALS

_GRACE = 5.0
"""Seconds for ranks that have lost a peer to end by themselves; torch's default is 30."""
_TIMED_OUT = re.compile(r"CommError: .*tim(ed |e)out", re.IGNORECASE | re.DOTALL)
"""The message of a rank whose peer does not answer: Gloo's "Timed out", NCCL's "timeout"."""


@dataclass(frozen=True)
class LocalOutcome:
    """How a group of local ranks ended.

    Attributes:
        status: exit status for the command.
        message: for the user, or None.
    """

    status: int
    message: str | None = None


class _Agent(LocalElasticAgent):
    """Forwards a stop signal to the ranks and waits for them, however long their save takes; ends the others
    soon when one has failed.

    torch's agent would wait 30 seconds in both cases, and discard how they ended.
    """

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, run_dir: str | None) -> None:
        super().__init__(spec=spec, logs_specs=logs)
        self._run_dir = run_dir
        self.asked: signal.Signals | None = None
        # Ranks, among those that were to end because another had failed.
        self._ended_by_us: set[int] = set()
        self._stopped: set[int] = set()
        self._killed: set[int] = set()

    @property
    def restarts(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stopped, self._killed, self._ended_by_us = set(), set(), set()
        # Ranks start with it blocked, after a restart too; here it is blocked until it can be forwarded.
        hold_back_notice()
        processes = super()._start_workers(worker_group)
        # After super(): torch sets handlers of its own when it starts the processes.
        for number in STOP_SIGNALS:
            signal.signal(number, self._hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {HELD_BACK})
        if self.asked:  # while no rank was running
            self._hand_on(self.asked, None)
        return processes

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number)
        for process in self._processes().values():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def _processes(self) -> dict[int, int]:
        return self._pcontext.pids() if self._pcontext is not None else {}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = self._processes()
        ended = {rank: _exit_status(process) for rank, process in processes.items()}
        if any(ended.values()):
            self._end({rank: processes[rank] for rank, status in ended.items() if status is None})
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.FAILED:
            return result
        # A user's error would recur after a restart, and a requested stop is final.
        if self.asked or any(failure.exitcode == USER_ERROR for failure in result.failures.values()):
            self._worker_group.spec.max_restarts = self.restarts
            self._remaining_restarts = 0
        if self._remaining_restarts:
            what, maximum = self.failure(result), worker_group.spec.max_restarts
            line = f"hexad: {what.message}; restart {self.restarts + 1} of {maximum}"
            print(line, file=sys.stderr, flush=True)
        return result

    def _end(self, processes: Mapping[int, int]) -> None:
        """End the ranks whose peer has failed. A stopped one is resumed, so that it can write its stacks."""
        self._stopped = {rank for rank, process in processes.items() if _stopped(process)}
        self._ended_by_us = set(processes)
        for number in (signal.SIGTERM, signal.SIGCONT):
            for process in processes.values():
                with suppress(ProcessLookupError):
                    os.killpg(process, number)
        end = time.monotonic() + _GRACE
        left = dict(processes)
        while left and time.monotonic() < end:
            time.sleep(0.02)
            left = {rank: process for rank, process in left.items() if _exit_status(process) is None}
        self._killed = set(left)
        for process in left.values():
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)

    def failure(self, result: RunResult) -> LocalOutcome:
        """The failure to report, in order of precedence: a user's error, a killed rank, a crash, a rank whose
        peer did not answer in time, one that lost its peer."""
        failures: dict[int, ProcessFailure] = result.failures
        texts = {rank: _message(failure) for rank, failure in failures.items()}
        for rank, failure in failures.items():
            if failure.exitcode == USER_ERROR and texts[rank]:
                return LocalOutcome(USER_ERROR, texts[rank])

        def order(rank: int) -> tuple[bool, bool, bool, bool, float]:
            failure, text = failures[rank], texts[rank]
            ours = rank in self._ended_by_us
            killed = failure.exitcode < 0 and not _aborted(failure.exitcode, text)
            lost = "CommError" in text
            return ours, not killed, lost, not _TIMED_OUT.search(text), failure.timestamp

        rank = min(failures, key=order)
        message = f"rank {rank} (process {failures[rank].pid}) {_how(failures[rank].exitcode, texts[rank])}"
        hung, slow = self._stopped, self._killed - self._stopped
        if _TIMED_OUT.search(texts[rank]):  # what made the others wait; else they were merely slow to end
            hung, slow = hung | slow, set()
        message += f"; {_names(hung)} hung" if hung else ""
        message += f"; {_names(slow)} had to be killed" if slow else ""
        return LocalOutcome(1, f"{message}; all ranks were stopped{self._named_logs(None if hung else rank)}")

    def _named_logs(self, rank: int | None) -> str:
        """The path of a rank's log, or those of all logs, if they exist: a generation writes none."""
        name = f"log-rank{'*' if rank is None else rank}.txt"
        exists = self._run_dir is not None and any(Path(self._run_dir).glob(name))
        return f" ({name} in {self._run_dir})" if exists else ""


def _names(ranks: set[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _aborted(status: int, text: str) -> bool:
    """Whether torch's watchdog has ended a rank because of a collective that was not completed in time: it
    raises SIGABRT, and the rank's watch has left the message before (:class:`.watch.Watch`)."""
    return status == -signal.SIGABRT and _TIMED_OUT.search(text) is not None


def _how(status: int, text: str) -> str:
    if _aborted(status, text):
        return f"was aborted by torch's watchdog: {text}"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"failed with exit status {status}" + (f": {text}" if text else "")


def _exit_status(process: int) -> int | None:
    """The exit status of a child (a signal's number if it was killed), 0 if it was already collected; None
    while it runs. It can still be waited for afterwards."""
    try:
        state = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return None if state is None else state.si_status


def _stopped(process: int) -> bool:
    """Whether a process has been stopped (SIGSTOP); False if unknown."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False


class _OneHost(RendezvousHandler):
    """The rendezvous of an agent that is alone: nothing listens for others. Each start of the ranks has a
    free port of the loopback interface for their store."""

    def __init__(self) -> None:
        self._closed = False

    def get_backend(self) -> str:
        return "hexad"

    def get_run_id(self) -> str:
        return f"hexad-{os.getpid()}"

    def next_rendezvous(self) -> RendezvousInfo:
        with socket.create_server((_LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True


_LOOPBACK = "127.0.0.1"


def run_local(
    arguments: Sequence[str], ranks: int, restarts: int = 0, run_dir: str | None = None
) -> LocalOutcome:
    """Run :mod:`hexad.cli.worker` with ``arguments`` on ``ranks`` local ranks and wait for all of them;
    ``run_dir`` is the directory of their logs, if they write some.

    When one rank fails the others are stopped, and all are restarted, up to ``restarts`` times. SIGTERM,
    SIGINT and SIGUSR1 are forwarded to the ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # It would log every signal it sends; LocalOutcome has one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with tempfile.TemporaryDirectory(prefix="hexad-launch-") as scratch:
        handler = _OneHost()
        spec = WorkerSpec(
            role="default",
            local_world_size=ranks,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=("-m", "hexad.cli.worker", str(os.getpid()), scratch, *arguments),
            max_restarts=restarts,
            local_addr=_LOOPBACK,  # not the host's full name, which may not resolve on a laptop
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=scratch), run_dir)
        try:
            return _outcome(agent.run(), agent)
        except SignalException as error:  # SIGHUP, SIGQUIT, or before the ranks were started
            name = signal.Signals(error.sigval).name
            return LocalOutcome(128 + error.sigval, f"stopped by {name} at once, without another save")
        finally:
            handler.shutdown()
            for number, action in previous.items():
                signal.signal(number, action)


def _outcome(result: RunResult, agent: _Agent) -> LocalOutcome:
    if not result.is_failed():
        return LocalOutcome(0)
    # Ranks that did not handle signals yet, or received two.
    asked = agent.asked
    if asked and any(failure.exitcode in (-signal.SIGTERM, -asked) for failure in result.failures.values()):
        return LocalOutcome(128 + asked, f"stopped by {asked.name} at once, without another save")
    outcome = agent.failure(result)
    if outcome.status == USER_ERROR or not agent.restarts:
        return outcome
    return LocalOutcome(
        outcome.status, f"{outcome.message}, after {agent.restarts} restarts (faults.restarts)"
    )


def _message(failure: ProcessFailure) -> str:
    """The message in the worker's error file (see :mod:`hexad.cli.worker`)."""
    try:
        with open(failure.error_file, encoding="utf-8") as file:
            return str(json.load(file)["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
