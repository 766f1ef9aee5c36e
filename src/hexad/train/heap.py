"""Free memory of the host's heap, given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Give back what is free, where the C library can (glibc's ``malloc_trim``).

    A step leaves small blocks that stay among large ones that are free: without this a process's resident
    memory grows from step to step to about half as much again as it needs. Called once per step, it costs
    page faults for what the next step uses again: 1 to 4 % of a step of
    ``benchmarks/step_time.py``. Blocks mapped one by one (``mallopt``) take less memory still, but a fifth
    more time.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    return trim
