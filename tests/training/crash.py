"""Runs the command once per crash point, each time in a fork that kills itself there: one import of torch.

``python -m tests.training.crash DIRECTORY``: DIRECTORY has one run.yaml per crash point, in POINT/run.yaml.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hexad.checkpoint import checkpointer, directory
from hexad.checkpoint.tensor_file import TensorFileWriter
from hexad.cli.main import run
from hexad.training import loop

STEP = "step-00000008"  # the second save: the first is whole


def _die(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Function = Callable[..., Any]


def _when(function: Function, wanted: Callable[..., bool], after: bool = False) -> Function:
    """``function``, but this process dies before (or after) a call that is wanted."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        due = wanted(*(str(argument) for argument in arguments))
        if due and not after:
            _die()
        result = function(*arguments, **options)
        if due:
            _die()
        return result

    return wrapped


def _tensors(after: bool) -> None:
    checkpointer.write_shard = _when(checkpointer.write_shard, lambda path, *_: STEP in path, after)


def _within() -> None:
    """In the middle of a tensor file, of which a part is written."""
    seen: list[str] = []

    def second(writer: str, *_: object) -> bool:
        seen.append(writer)
        return STEP in writer and seen.count(writer) == 2

    TensorFileWriter.__str__ = lambda writer: str(writer._file.name)  # type: ignore[method-assign]
    TensorFileWriter.write = _when(TensorFileWriter.write, second)  # type: ignore[method-assign]


def _write(part: str) -> None:
    write = directory.write_durably
    directory.write_durably = _when(write, lambda path, *_: STEP in path and part in path)


def _os(name: str, wanted: Callable[..., bool], after: bool = False) -> None:
    setattr(os, name, _when(getattr(os, name), wanted, after))


POINTS: dict[str, Callable[[], None]] = {
    "before tensors": lambda: _tensors(after=False),
    "within tensors": _within,
    "after tensors": lambda: _tensors(after=True),
    "before config.yaml": lambda: _write("config.yaml"),
    "before the manifest": lambda: _write("manifest.json"),
    "before rename": lambda: _os("rename", lambda source, target, *_: target.endswith(STEP)),
    "after rename": lambda: _os("rename", lambda source, target, *_: target.endswith(STEP), after=True),
    "before latest": lambda: _os("replace", lambda source, target, *_: _latest(source, target)),
    "after latest": lambda: _os("replace", lambda source, target, *_: _latest(source, target), after=True),
    "in retention": lambda: _removal(),
}


def _latest(source: str, target: str) -> bool:
    return target.endswith("latest") and STEP in Path(source).read_text()


def _removal() -> None:
    shutil.rmtree = _when(shutil.rmtree, lambda path, *_: path.endswith(".removed"))


def main() -> None:
    """Each point in turn; fails unless the fork died by SIGKILL."""
    assert loop  # imported for the forks
    for point, arm in POINTS.items():
        child = os.fork()
        if child == 0:
            arm()
            os._exit(run(["train", str(Path(sys.argv[1]) / point / "run.yaml")]))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"{point}: never reached (exit status {os.waitstatus_to_exitcode(status)})")


if __name__ == "__main__":
    main()
