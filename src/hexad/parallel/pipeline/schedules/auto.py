"""The best schedule that a search finds for given costs within a given memory."""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Schedule
from ..simulate import Costs


def search(
    pipeline: int,
    microbatches: int,
    virtual_stages: int,
    costs: Costs | Callable[[tuple[int, ...]], Costs | None] | None = None,
    memory: float | None = None,
) -> Schedule:
    """Not there yet."""
    raise NotImplementedError
