"""When weights that are not resident (ZeRO 3) are gathered and released. No torch: the trainer's hooks and
the memory model follow the same order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol


class Gathers(Protocol):
    """Carries out what :class:`Gathering` decides; asking for what is there already changes nothing."""

    def fetch(self, bucket: int) -> None:
        """Start gathering a bucket's values, if they are not here."""
        ...

    def release(self, bucket: int) -> None:
        """Give up a bucket's values, if they are here."""
        ...


class Gathering:
    """The units of one stage: a unit's weights are here while it computes, the next unit's are gathered
    meanwhile (FSDP: Zhao et al., arXiv 2304.11277).

    Args:
        absent: for every unit, in the order of the forward pass, the buckets that are not resident.
        layers: for every unit, whether backward needs its weights; those of embedding and head are not.
        gathers: carries it out.
    """

    def __init__(self, absent: Sequence[Sequence[int]], layers: Sequence[bool], gathers: Gathers) -> None:
        self._absent, self._gathers = absent, gathers
        coming = [unit for unit, buckets in enumerate(absent) if buckets]
        self._after = dict(pairwise(coming))
        self._before = {after: unit for unit, after in self._after.items() if layers[unit]}

    def enter(self, unit: int) -> None:
        """The forward pass reaches a unit."""
        self._fetch(unit, self._after.get(unit))

    def leave(self, unit: int) -> None:
        """The unit's forward or backward pass is over."""
        for bucket in self._absent[unit]:
            self._gathers.release(bucket)

    def turn(self, unit: int) -> None:
        """The backward pass reaches a layer: the one after it is done, the one before it is next."""
        if unit in self._after:
            self.leave(self._after[unit])
        self._fetch(unit, self._before.get(unit))

    def _fetch(self, unit: int, ahead: int | None) -> None:
        for number in (unit,) if ahead is None else (unit, ahead):
            for bucket in self._absent[number]:
                self._gathers.fetch(bucket)
