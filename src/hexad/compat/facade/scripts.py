"""Running a script of another system unchanged, after its ``install``."""

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def run_script(install: Callable[[], None], command: Sequence[str], as_module: bool = False) -> None:
    """Run a script, or a module by name, as Python's command line does, after ``install()``.

    Args:
        install: makes ``import`` find the interface of another system.
        command: the script or module, and its arguments.
        as_module: it is a module.
    """
    install()
    sys.argv = list(command)
    if as_module:
        sys.path.insert(0, "")
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")
