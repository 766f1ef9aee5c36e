"""A pipeline schedule is data: for each pipeline rank, the order of its actions.

A long schedule can be shortened to its beginning, its end and one period of its steady state, on which the
peak of memory depends. The generators (``schedules/``), the validator, the simulator, the pictures and the
executor all use the same :class:`Schedule`. It can be written to a file and read from one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hexad.config import HexadError, one_line
from hexad.config.files import read_json

KINDS = ("F", "B", "W", "BW")


class ScheduleError(HexadError):
    """A schedule that cannot be built, or is not valid."""


class Message(NamedTuple):
    """A tensor that one stage computes for another: an activation (``F``) or a gradient (``B``).

    Attributes:
        kind: ``F`` or ``B``.
        stage: the stage that computed it. ``F`` goes to ``stage + 1``, ``B`` to ``stage - 1``.
        microbatch: number in the step.
    """

    kind: str
    stage: int
    microbatch: int

    @property
    def target(self) -> int:
        """The stage that needs the result."""
        return self.stage + 1 if self.kind == "F" else self.stage - 1


class Action(NamedTuple):
    """One action of a pipeline rank.

    Attributes:
        kind: ``F`` forward; ``B`` gradient of the stage's input; ``W`` gradient of its weights; ``BW`` both.
        stage: global number of the stage.
        microbatch: number in the step.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"

    @property
    def needs(self) -> Message | None:
        """The message that it takes from a neighbouring stage, if there is one; None of ``W``."""
        if self.kind == "W":
            return None
        forward = self.kind == "F"
        return Message("F" if forward else "B", self.stage + (-1 if forward else 1), self.microbatch)

    @property
    def gives(self) -> Message | None:
        """The message that it computes for a neighbouring stage, if there is one; None of ``W``."""
        return None if self.kind == "W" else Message(self.kind[0], self.stage, self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """The order of actions on every pipeline rank.

    Attributes:
        name: for display.
        microbatches: of one step.
        placement: the pipeline rank of every stage.
        ranks: for each pipeline rank its actions, in order.
        trained_from: the first stage in which anything is trained: those before have nothing to do in their
            backward actions, and no gradient is sent to them.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    trained_from: int = 0

    @property
    def pipeline(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @cached_property
    def split_backward(self) -> bool:
        """Whether any weight gradient is an action of its own."""
        return any(action.kind == "W" for actions in self.ranks for action in actions)

    def sent(self, action: Action) -> Message | None:
        """The message to another rank after ``action``."""
        return self._message(action.gives)

    def received(self, action: Action) -> Message | None:
        """The message that ``action`` waits for."""
        return self._message(action.needs)

    def passes(self, stage: int) -> bool:
        """Whether a stage passes a gradient on to the one before."""
        return stage > self.trained_from

    def _message(self, message: Message | None) -> Message | None:
        """The message, if there are such stages, on different ranks, and it is a gradient that is needed."""
        if message is None:
            return None
        first = 0 if message.kind == "F" else self.trained_from
        if not (0 <= message.stage < self.stages and first <= message.target < self.stages):
            return None
        return message if self.placement[message.stage] != self.placement[message.target] else None

    def first(self, microbatches: int) -> Schedule:
        """The schedule for the first ``microbatches``. Removing actions keeps the order valid."""
        ranks = tuple(
            tuple(action for action in actions if action.microbatch < microbatches) for actions in self.ranks
        )
        return replace(self, microbatches=microbatches, ranks=ranks)

    def as_tree(self) -> dict[str, Any]:
        """The content of a file, as JSON values."""
        return {
            "name": self.name,
            "microbatches": self.microbatches,
            "placement": list(self.placement),
            "ranks": [[action._asdict() for action in actions] for actions in self.ranks],
        }


def looped(pipeline: int, virtual_stages: int) -> tuple[int, ...]:
    """Round-robin placement of stages: 0, 1, .., p-1, 0, 1, .. (Narayanan et al., arXiv 2104.04473)."""
    return tuple(stage % pipeline for stage in range(pipeline * virtual_stages))


def v_shaped(pipeline: int) -> tuple[int, ...]:
    """Two stages per rank, there and back: 0, 1, .., p-1, p-1, .., 0 (Qi et al., arXiv 2405.15362)."""
    return (*range(pipeline), *reversed(range(pipeline)))


def forward_schedule(placement: Sequence[int], microbatches: int) -> Schedule:
    """Forward passes only, for evaluation.

    Microbatches run in groups of as many as there are ranks, each group through all of a rank's stages. All
    ranks follow one order in which every action comes after those it needs, so that there is no deadlock.
    """
    pipeline = max(placement) + 1
    ranks: list[list[Action]] = [[] for _ in range(pipeline)]
    for begin in range(0, microbatches, pipeline):
        for stage, rank in enumerate(placement):
            group = range(begin, min(begin + pipeline, microbatches))
            ranks[rank] += [Action("F", stage, microbatch) for microbatch in group]
    return Schedule("forward", microbatches, tuple(placement), tuple(map(tuple, ranks)))


def read_schedule(path: str | Path) -> Schedule:
    """A schedule from a JSON file, as :func:`write_schedule` and ``hexad show schedule --json`` write it.

    It is well-formed, not yet validated.

    Raises:
        ScheduleError: the file cannot be read, or what it holds is not a schedule.
    """
    try:
        return _from_tree(read_json(path), Path(path).stem)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path}: cannot be read as a schedule: {one_line(error)}") from None


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule to a JSON file.

    Raises:
        ScheduleError: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(schedule.as_tree()) + "\n", encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be written: {error.strerror}") from None


def _from_tree(tree: Any, name: str) -> Schedule:
    if not isinstance(tree, Mapping) or not isinstance(tree.get("ranks"), list) or not tree["ranks"]:
        raise ScheduleError("expected an object with 'ranks': a list of actions for each pipeline rank")
    ranks = tuple(tuple(_actions(actions, rank)) for rank, actions in enumerate(tree["ranks"]))
    owners: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            owner = owners.setdefault(action.stage, rank)
            if owner != rank:
                raise ScheduleError(f"stage {action.stage} has actions on ranks {owner} and {rank}")
    if not owners or sorted(owners) != list(range(len(owners))):
        raise ScheduleError(f"found actions of stages {sorted(owners)}, expected 0, 1, 2, .. without a gap")
    microbatches = len(numbers := {action.microbatch for actions in ranks for action in actions})
    if max(numbers) != microbatches - 1:
        missing = next(number for number in range(microbatches) if number not in numbers)
        raise ScheduleError(f"found microbatch {max(numbers)} but no microbatch {missing}")
    placement = tuple(owners[stage] for stage in range(len(owners)))
    for key, value in (("microbatches", microbatches), ("placement", list(placement))):
        if tree.get(key, value) != value:
            raise ScheduleError(f"{key}: found {tree[key]}, but the actions in ranks say {value}")
    return Schedule(str(tree.get("name", name)), microbatches, placement, ranks)


def _actions(actions: Any, rank: int) -> Iterator[Action]:
    if not isinstance(actions, list):
        raise ScheduleError(f"ranks[{rank}]: expected a list of actions")
    for index, entry in enumerate(actions):
        where = f"ranks[{rank}][{index}]"
        if not isinstance(entry, Mapping):
            raise ScheduleError(f"{where}: expected an object with kind, stage and microbatch")
        if entry.get("kind") not in KINDS:
            raise ScheduleError(f"{where}.kind: found {entry.get('kind')!r}, expected {', '.join(KINDS)}")
        for field in ("stage", "microbatch"):
            number = entry.get(field)
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ScheduleError(f"{where}.{field}: found {number!r}, expected a number from 0")
        yield Action(entry["kind"], entry["stage"], entry["microbatch"])


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
    """The range in which a rank's actions repeat: ``actions[i + length]`` is ``actions[i]`` of a later
    microbatch for all ``i`` from ``begin`` to ``end - 1``."""

    begin: int
    end: int
    length: int


def shortened(schedule: Schedule, keep: int | None = None) -> Shortened:
    """A valid schedule with at most ``keep`` repetitions of its steady state on some rank, or as it is where
    there is no such state on all ranks, as in ``gpipe``.

    All ranks lose the same microbatches, so that their offsets to each other stay. Exact for what has become
    periodic after half of ``keep`` repetitions: by default four per rank and 16 more. The order of
    messages by the costs of unequal stages may take longer: then what is in flight differs by a message.
    """
    keep = 4 * schedule.pipeline + 16 if keep is None else keep
    whole = Shortened(schedule, (0,) * schedule.pipeline, (0,) * schedule.pipeline)
    for period in range(1, min(_LONGEST, schedule.microbatches // (keep + 1)) + 1):
        periods = [_steady(actions, period) for actions in schedule.ranks]
        steady = [rank for rank in periods if rank is not None]
        if len(steady) == len(periods):
            turns = min((rank.end - rank.begin) // rank.length for rank in steady) - keep
            return _without(schedule, steady, period, turns, keep) if turns > 0 else whole
    return whole


def _steady(actions: Sequence[Action], period: int) -> _Steady | None:
    """The repetition, every ``period`` microbatches, around the middle of a rank's actions."""
    middle = len(actions) // 2
    stages = {action.stage for action in actions}
    later = _later(actions[middle], period)
    limit = min(len(actions), middle + 3 * period * len(stages) + 1)
    again = next((other for other in range(middle + 1, limit) if actions[other] == later), None)
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
