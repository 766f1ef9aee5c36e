"""Starting local ranks through torchrun's elastic agent, and saying in one line how they ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed.launcher.api as elastic
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

USER_ERROR = 2


@dataclass(frozen=True)
class LocalOutcome:
    """How a group of local ranks ended.

    Attributes:
        status: exit status for the command.
        message: what to tell the user, or None.
    """

    status: int
    message: str | None = None


def run_local(arguments: Sequence[str], ranks: int) -> LocalOutcome:
    """Run ``python -m hexad.cli.worker ARGUMENTS`` on ``ranks`` local ranks and wait for all of them.

    When one rank ends badly the others are stopped at once.
    """
    with tempfile.TemporaryDirectory(prefix="hexad-launch-") as scratch:
        launch = elastic.LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=f"hexad-{os.getpid()}",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        try:
            elastic.elastic_launch(launch, sys.executable)("-m", "hexad.cli.worker", *arguments)
        except ChildFailedError as error:
            return _failure(error.failures)
        except SignalException as error:
            return LocalOutcome(128 + error.sigval, f"stopped by {signal.Signals(error.sigval).name}")
    return LocalOutcome(0)


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
