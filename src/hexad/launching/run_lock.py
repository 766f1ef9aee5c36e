"""One run per directory. No torch: a second command is refused at once."""

from __future__ import annotations

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
