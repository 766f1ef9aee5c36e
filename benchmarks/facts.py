"""What a result needs beside its figures: the command, the machine, the versions."""

import os
import platform
import re
import shlex
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hexad import __version__


def facts(peer: str = "deepspeed") -> dict[str, Any]:
    """``command``, ``machine`` and ``versions`` for a result file.

    Args:
        peer: the package that Hexad is compared with.
    """
    script = Path(sys.argv[0])
    script = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    versions = {"python": platform.python_version(), "hexad": __version__}
    for package in "torch", peer:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    command = shlex.join(["python", str(script), *sys.argv[1:]])
    return {"command": command, "machine": machine(), "versions": versions}


def machine() -> str:
    """Processor, cores and memory."""
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        names = []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GB"
