"""Starting local ranks through torchrun's elastic agent, and saying in one line how they ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import registry

from hexad.config import USER_ERROR

from .stop import POLITE_SIGNALS


@dataclass(frozen=True)
class LocalOutcome:
    """How a group of local ranks ended.

    Attributes:
        status: exit status for the command.
        message: what to tell the user, or None.
    """

    status: int
    message: str | None = None


class _Agent(LocalElasticAgent):
    """Hands a polite signal on to the ranks and keeps waiting for them, however long their save takes.

    torch's agent would give them 30 seconds, and forget how they ended.
    """

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs) -> None:
        super().__init__(spec=spec, logs_specs=logs)
        self.asked: signal.Signals | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        processes = super()._start_workers(worker_group)

        def hand_on(number: int, frame: FrameType | None) -> None:
            self.asked = signal.Signals(number)
            for process in processes.values():
                try:
                    # Always SIGTERM: a rank that is still importing then ends without a traceback.
                    os.kill(process, signal.SIGTERM)
                except ProcessLookupError:
                    continue

        # After super(): torch sets handlers of its own when it starts the processes.
        for number in POLITE_SIGNALS:
            signal.signal(number, hand_on)
        return processes


def run_local(arguments: Sequence[str], ranks: int) -> LocalOutcome:
    """Run ``python -m hexad.cli.worker ARGUMENTS`` on ``ranks`` local ranks and wait for all of them.

    When one rank ends badly the others are stopped at once. SIGTERM and SIGINT are handed on to the ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # It would announce every signal it sends; the one line of LocalOutcome says what matters.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    previous = {number: signal.getsignal(number) for number in POLITE_SIGNALS}
    with tempfile.TemporaryDirectory(prefix="hexad-launch-") as scratch:
        place = rendezvous.RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=f"hexad-{os.getpid()}",
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
        handler = registry.get_rendezvous_handler(place)
        spec = WorkerSpec(
            role="default",
            local_world_size=ranks,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=("-m", "hexad.cli.worker", *arguments),
            max_restarts=0,
            local_addr="localhost",  # not the host's full name, which may not resolve on a laptop
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=scratch))
        try:
            return _outcome(agent.run(), agent.asked)
        except SignalException as error:  # SIGHUP, SIGQUIT, or before the ranks were started
            name = signal.Signals(error.sigval).name
            return LocalOutcome(128 + error.sigval, f"stopped by {name} without saving")
        finally:
            handler.shutdown()
            for number, action in previous.items():
                signal.signal(number, action)


def _outcome(result: RunResult, asked: signal.Signals | None) -> LocalOutcome:
    if not result.is_failed():
        return LocalOutcome(0)
    failures = result.failures
    # Ranks that had not begun to listen, or were told twice.
    if asked and any(failure.exitcode == -signal.SIGTERM for failure in failures.values()):
        return LocalOutcome(128 + asked, f"stopped by {asked.name} without saving")
    return _failure(failures)


def _failure(failures: dict[int, ProcessFailure]) -> LocalOutcome:
    """A user's error beats a killed rank beats a crash beats a rank that merely lost a peer."""
    texts = {rank: _message(failure) for rank, failure in failures.items()}
    for rank, failure in failures.items():
        if failure.exitcode == USER_ERROR and texts[rank]:
            return LocalOutcome(USER_ERROR, texts[rank])

    def order(rank: int) -> tuple[bool, bool, float]:
        return failures[rank].exitcode >= 0, "CommError" in texts[rank], failures[rank].timestamp

    rank = min(failures, key=order)
    failure = failures[rank]
    if failure.exitcode < 0:
        how = f"was killed by {signal.Signals(-failure.exitcode).name}"
    else:
        how = f"failed with exit status {failure.exitcode}"
        how += f": {texts[rank]}" if texts[rank] else ""
    return LocalOutcome(
        1,
        f"rank {rank} (process {failure.pid}) {how}; all ranks were stopped (log-rank{rank}.txt in run.dir)",
    )


def _message(failure: ProcessFailure) -> str:
    """What the worker left in its error file (see :mod:`hexad.cli.worker`)."""
    try:
        with open(failure.error_file, encoding="utf-8") as file:
            return str(json.load(file)["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
