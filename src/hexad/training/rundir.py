"""The run directory: created, verified to be shared by all ranks, locked, with log files."""

import faulthandler
import logging
import os
import sys
import traceback
from contextlib import ExitStack, suppress
from operator import or_
from pathlib import Path
from typing import TextIO

from hexad.comm import from_first, merged
from hexad.config import ConfigError
from hexad.config.schema import RunSettings
from hexad.launching import watch
from hexad.launching.files import lock_run
from hexad.launching.launch import Run
from hexad.launching.watch import Watch

log = logging.getLogger("hexad")


def open_run_directory(settings: RunSettings, run: Run, stack: ExitStack) -> None:
    """Create ``run.dir``, verify that all ranks share it and that no other run uses it, and log into it until
    ``stack`` closes.

    Raises:
        AgreedError: it cannot be created or written, is not shared by all hosts, or is in use.
    """
    path = Path(settings.dir)
    # A name that no other run uses; chosen by rank 0.
    token = path / f".shared-{from_first(lambda: os.urandom(8).hex(), run.mesh.world)}"
    first = run.mesh.rank == 0
    # Lost ranks of this run, or those of a disconnected host, may hold the lock until run.timeout. Each host
    # counts its own restarts: where hosts may come and go, no host knows the number of all.
    here = run.environment
    again = here.restart > 0 or (here.restarts > 0 and here.world > here.local_world)
    patience = settings.timeout / 2 if merged(again, run.mesh.world, or_) else 0.0

    def prepare() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            if run.mesh.device.type == "cuda":
                watch.make_folder(path)
            if first:
                lock_run(path, patience, stack)
                token.touch()
        except OSError as error:
            raise ConfigError("run.dir", f"cannot write to {path}: {error.strerror}") from None

    def see() -> None:
        if not token.exists():
            raise ConfigError(
                "run.dir", f"{path} is not the directory of rank 0; use a file system that all hosts share"
            )

    run.agreed(prepare)
    try:
        run.agreed(see)
    finally:
        if first:
            token.unlink(missing_ok=True)
    run.agreed(lambda: _log_to_file(path / f"log-rank{run.mesh.rank}.txt", run, settings.timeout, stack))


class _Stderr(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time: a progress bar puts lines above itself, which would
    otherwise continue its own line and leave a copy of it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _LogFile(logging.StreamHandler[TextIO]):
    """Writes to ``log-rankN.txt``, as long as its disk has space: training continues without."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing."""


def _close(file: TextIO) -> None:
    with suppress(OSError):  # a full disk
        file.close()


def _log_to_file(path: Path, run: Run, timeout: float, stack: ExitStack) -> None:
    """Messages, and the stacks of a crash or a stall, are written to ``log-rankN.txt``; the first rank's
    messages to stderr too."""
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError("run.dir", f"cannot write {path}: {error.strerror}") from None
    stack.callback(_close, file)
    faulthandler.enable(file)
    stack.callback(faulthandler.disable)

    def write_error(kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(OSError):  # a full disk must not hide it
            if error:
                traceback.print_exception(error, file=file)

    stack.push(write_error)
    handlers: list[logging.Handler] = [_LogFile(file)]
    if run.mesh.rank == 0:
        handlers.append(_Stderr())
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        stack.callback(log.removeHandler, handler)
    log.setLevel(logging.INFO)
    if run.mesh.layout.world > 1:
        stack.enter_context(Watch(run.mesh.trace, timeout, file, run.mesh.rank, path.parent, run.mesh.device))
