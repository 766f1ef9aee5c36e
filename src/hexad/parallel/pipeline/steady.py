"""A long schedule without most of its steady state, for what depends on its beginning, its end and one period
of what lies between: the peak of memory. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .schedule import Action, Schedule

_LONGEST = 64
"""Microbatches after which a steady state repeats itself, at the most."""


@dataclass(frozen=True)
class Shortened:
    """A schedule with fewer repetitions of its steady state.

    Attributes:
        schedule: valid if the original is; as on a step of fewer microbatches.
        cuts: of every rank, the position from which on actions were left out.
        omitted: of every rank, how many.
    """

    schedule: Schedule
    cuts: tuple[int, ...]
    omitted: tuple[int, ...]

    def original(self, rank: int, position: int) -> int:
        """Position in the original schedule of a rank's action in the shortened one."""
        return position + (self.omitted[rank] if position >= self.cuts[rank] else 0)


@dataclass(frozen=True)
class _Steady:
    """Where a rank's actions repeat: ``actions[i + length]`` is ``actions[i]`` of a later microbatch for all
    ``i`` from ``begin`` to ``end - 1``."""

    begin: int
    end: int
    length: int


def shortened(schedule: Schedule, keep: int | None = None) -> Shortened:
    """The schedule with at most ``keep`` repetitions of its steady state on some rank, or as it is where
    there is no such state on all ranks, as in ``gpipe``.

    All ranks lose the same microbatches, so that their offsets to each other stay. Exact for what has become
    periodic after half of ``keep`` repetitions: by default four per rank and 16 more.

    Args:
        schedule: valid.
        keep: see above.
    """
    keep = 4 * schedule.pipeline + 16 if keep is None else keep
    whole = Shortened(schedule, (0,) * schedule.pipeline, (0,) * schedule.pipeline)
    for period in range(1, min(_LONGEST, schedule.microbatches // (keep + 1)) + 1):
        found = [_steady(actions, period) for actions in schedule.ranks]
        steady = [rank for rank in found if rank is not None]
        if len(steady) == len(found):
            turns = min((rank.end - rank.begin) // rank.length for rank in steady) - keep
            return _without(schedule, steady, period, turns, keep) if turns > 0 else whole
    return whole


def _steady(actions: Sequence[Action], period: int) -> _Steady | None:
    """The repetition, every ``period`` microbatches, around the middle of a rank's actions."""
    middle = len(actions) // 2
    stages = {action.stage for action in actions}
    wanted = _later(actions[middle], period)
    limit = min(len(actions), middle + 3 * period * len(stages) + 1)
    again = next((other for other in range(middle + 1, limit) if actions[other] == wanted), None)
    if again is None or not _balanced(actions[middle:again], stages, period):
        return None
    length = again - middle
    begin, end = middle, middle
    while end + length < len(actions) and actions[end + length] == _later(actions[end], period):
        end += 1
    while begin > 0 and actions[begin - 1 + length] == _later(actions[begin - 1], period):
        begin -= 1
    return _Steady(begin, end, length)


def _balanced(actions: Sequence[Action], stages: set[int], period: int) -> bool:
    """Whether as much is held after these actions as before: as many of each kind for every stage."""
    counts = Counter((kind, action.stage) for action in actions for kind in action.kind)
    return all(counts[kind, stage] == period for stage in stages for kind in "FBW")


def _later(action: Action, microbatches: int) -> Action:
    return Action(action.kind, action.stage, action.microbatch + microbatches)


def _without(schedule: Schedule, steady: list[_Steady], period: int, turns: int, keep: int) -> Shortened:
    """The schedule without ``turns`` repetitions on every rank, cut out behind half of those kept."""
    cuts = [rank.begin + keep // 2 * rank.length for rank in steady]
    omitted = [turns * rank.length for rank in steady]
    ranks = tuple(
        (*actions[:cut], *(_later(action, -turns * period) for action in actions[cut + gone :]))
        for actions, cut, gone in zip(schedule.ranks, cuts, omitted)
    )
    short = replace(schedule, microbatches=schedule.microbatches - turns * period, ranks=ranks)
    return Shortened(short, tuple(cuts), tuple(omitted))
