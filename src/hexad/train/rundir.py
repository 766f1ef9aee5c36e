"""The run directory: made, found to be one for all ranks, and logged into."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

from hexad.comm import gather_objects
from hexad.config import ConfigError

from .launch import Run

log = logging.getLogger("hexad")


def open_run_directory(setting: str, run: Run, stack: ExitStack) -> None:
    """Make ``run.dir``, see that all ranks mean the same one, and log into it until ``stack`` closes.

    Raises:
        AgreedError: it cannot be made or written, or is not shared by all hosts.
    """
    path = Path(setting)
    # A name that no other run uses; chosen by rank 0.
    token = path / f".shared-{gather_objects((os.getpid(), os.urandom(4).hex()), run.mesh.world)[0][1]}"
    first = run.mesh.rank == 0

    def prepare() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            if first:
                token.touch()
        except OSError as error:
            raise ConfigError("run.dir", f"cannot write to {path}: {error.strerror}") from None

    def see() -> None:
        if not token.exists():
            raise ConfigError(
                "run.dir", f"{path} is not that of rank 0; use a file system that all hosts share"
            )

    run.agreed(prepare)
    try:
        run.agreed(see)
    finally:
        if first:
            token.unlink(missing_ok=True)
    run.agreed(lambda: _log_to_file(path / f"log-rank{run.mesh.rank}.txt", first, stack))


def _log_to_file(path: Path, first: bool, stack: ExitStack) -> None:
    """Messages, and the stacks of a crash, go to ``log-rankN.txt``; the first rank's to stderr too."""
    try:
        file = stack.enter_context(path.open("a", encoding="utf-8"))
    except OSError as error:
        raise ConfigError("run.dir", f"cannot write {path}: {error.strerror}") from None
    faulthandler.enable(file)
    stack.callback(faulthandler.disable)
    stack.push(lambda kind, error, trace: traceback.print_exception(error, file=file) if error else None)
    handlers: list[logging.Handler] = [logging.StreamHandler(file)]
    if first:
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        stack.callback(log.removeHandler, handler)
    log.setLevel(logging.INFO)
