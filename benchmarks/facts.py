"""What a result needs beside its figures: the command, the machine, the versions."""

import os
import platform
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hexad import __version__

PACKAGES = ("torch", "deepspeed", "lightning")


def facts() -> dict[str, Any]:
    """``command``, ``machine`` and ``versions`` for a result file."""
    script = Path(sys.argv[0])
    script = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return {
        "command": shlex.join(["python", str(script), *sys.argv[1:]]),
        "machine": machine(),
        "versions": {"python": platform.python_version(), "hexad": __version__} | _versions(),
    }


def machine() -> str:
    """Processor, cores and memory."""
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        names = []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GB"


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
