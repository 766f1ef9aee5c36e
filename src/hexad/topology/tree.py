"""The tree over which all ranks agree: groups of neighbouring ranks, groups of their first ranks, and so on.

A process group of gloo connects every pair of its ranks. In one group of all ranks each of 10,000 ranks would
have 9,999 connections; in the tree it has 15 per level, of which there are four. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

FAN_OUT = 16
"""Ranks of a group. Those of a host are neighbours, so that the lowest level covers one or two hosts."""
CHANNELS = ("main", "checkpoint", "signals", "counts", "pace")
"""Agreements that may be made at the same time. A channel's place here is the tag of its messages."""


def tree_groups(rank: int, world: int, fan_out: int) -> Iterator[tuple[int, ...]]:
    """The ranks of the groups that a rank belongs to, from the lowest level up.

    It is the first rank in all but the last of them.
    """
    step = 1
    while step < world:
        width = step * fan_out
        first = rank - rank % width
        members = tuple(range(first, min(first + width, world), step))
        # At the end of the world one rank may be left over: it is a group of the next level only.
        if len(members) > 1:
            yield members
        if rank != first:
            return
        step = width


@dataclass(frozen=True)
class Level:
    """A rank's place in one of its groups.

    Attributes:
        ranks: global ranks of the group.
        place: this rank's among them; the first one passes on what the others send.
        group: gloo's process group.
    """

    ranks: tuple[int, ...]
    place: int
    group: Any


@dataclass(frozen=True)
class Tree:
    """A rank's part of the tree.

    Attributes:
        levels: from the lowest up; the rank is the first one in all but the last.
        channel: messages of different channels do not mix, so that several threads may use one tree.
        timeout: to wait for a message at most.
    """

    levels: tuple[Level, ...]
    channel: int
    timeout: timedelta

    def on(self, channel: int, timeout: timedelta | None = None) -> Tree:
        """The same connections for another thread."""
        return replace(self, channel=channel, timeout=timeout or self.timeout)
