"""Free memory of the host's heap, given back to the system."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

GROWTH = 1.05
"""Resident memory that is tolerated, over that of a step which began with nothing free."""


class Heap:
    """Gives back what is free, where the C library can (glibc's ``malloc_trim``).

    A step leaves small blocks that stay among large ones that are free: without this a process's resident
    memory grows from step to step to about half as much again as it needs. What is given back costs page
    faults when the next step uses it again: 3 to 5 % of a step of ``benchmarks/deepspeed_face.py``. So it is
    given back only when resident memory has grown by :data:`GROWTH`. Blocks mapped one by one (``mallopt``)
    take less memory still, but a fifth more time.
    """

    def __init__(self) -> None:
        self._needed: int | None = None  # bytes resident after a step that began with nothing free
        self._trimmed = False

    def step_ended(self) -> bool:
        """Give back what is free if there is too much of it; whether that was so."""
        found = resident()
        if self._trimmed:
            self._needed = found
        self._trimmed = self._needed is None or found > GROWTH * self._needed
        if self._trimmed:
            give_back()
        return self._trimmed


def give_back() -> None:
    """Give back what is free."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def resident() -> int:
    """Bytes of this process in memory, without those of files; 0 where that cannot be read."""
    try:
        _, everything, files, *_ = map(int, Path("/proc/self/statm").read_bytes().split())
        return (everything - files) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    return trim
