"""Files between the processes of a run: the lock of its directory, and a rank's last message to its launcher.
No torch: a second command is refused at once."""

import json
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from hexad.config import ConfigError
from hexad.dataset.files import lock


def refuse_locked(run_dir: str) -> None:
    """Refuse a run directory that another process uses, before any rank is started.

    Raises:
        ConfigError: naming that process.
    """
    path = Path(run_dir)
    if (path / ".lock").exists():
        with ExitStack() as stack, suppress(OSError):
            lock_run(path, 0.0, stack)


def lock_run(path: Path, patience: float, stack: ExitStack) -> None:
    """Lock ``run.dir`` for this run until ``stack`` closes or this process ends.

    Waits up to ``patience`` seconds for another process to release it. Ignored by file systems without locks.
    """
    file = stack.enter_context((path / ".lock").open("a+", encoding="utf-8"))
    if lock(file, patience) is False:
        file.seek(0)
        raise ConfigError("run.dir", f"found {path}, locked by {file.read()}; use another directory")


def write_in_one_step(path: Path, content: bytes) -> None:
    """Write a file by a rename, so that it is never there in part: an agent, or PyTorch's watchdog, may end
    this process at any moment."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_error(message: str) -> None:
    """Leave a message for torchrun's agent, or Hexad's own; without one, nothing."""
    path = os.environ.get(_VARIABLE)
    if not path:
        return
    document = {"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}
    write_in_one_step(Path(path), json.dumps(document).encode())


def withdraw_error() -> None:
    """Remove the message again."""
    with suppress(OSError):
        os.unlink(os.environ.get(_VARIABLE, ""))
