"""The times at which every action of a schedule begins and ends, given its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .schedule import Schedule, ScheduleError
from .validate import validate

TIMELINE = "timeline.json"
"""File of a run directory: one step as it was planned and as it was measured."""


@dataclass(frozen=True)
class Costs:
    """Costs of a schedule's actions, per stage and for one microbatch.

    Attributes:
        forward: seconds of F, of each stage.
        backward: seconds of B, the gradient of the stage's input alone. BW takes ``backward + weight``.
        weight: seconds of W.
        transfer: seconds that a message occupies its link. There is one link from each rank to each other,
            and messages on one link are sequential.
        activation: memory held from the beginning of F to the end of W, of each stage, in any unit; 1.0 each
            by default.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: float = 0.0
    activation: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation", self.activation or (1.0,) * len(self.forward))
        costs = (self.forward, self.backward, self.weight, self.activation)
        if len({len(values) for values in costs}) > 1:
            raise ScheduleError("costs need as many values of each kind as there are stages")
        if min((self.transfer, *(value for values in costs for value in values))) < 0:
            raise ScheduleError("costs cannot be negative")

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @classmethod
    def uniform(
        cls, stages: int, per_rank: int = 1, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0
    ) -> Costs:
        """Equal costs of every stage, of which each rank has ``per_rank``: together they take these seconds
        for F, B and W of one microbatch, and hold one unit of memory."""
        f, b, w, activation = ((total / per_rank,) * stages for total in (forward, backward, weight, 1.0))
        return cls(f, b, w, activation=activation)


@dataclass(frozen=True)
class Timeline:
    """The times of a schedule's actions, each as early as possible.

    Attributes:
        schedule: what was simulated.
        times: for each rank and each of its actions (start, end) in seconds.
        makespan: seconds from the first start to the last end over all ranks.
        span: seconds from a rank's first start to its last end, of the rank where that is longest: the time
            of a step if steps follow each other without synchronisation.
        bubble: the idle fraction of ``ranks * span`` (as in Qi et al., arXiv 2401.10241).
    """

    schedule: Schedule
    times: tuple[tuple[tuple[float, float], ...], ...]
    makespan: float
    span: float
    bubble: float

    @classmethod
    def of(cls, schedule: Schedule, times: Sequence[Sequence[tuple[float, float]]]) -> Timeline:
        """The timeline of given times, simulated or measured: for each rank and action (start, end)."""
        spans = [(actions[0][0], actions[-1][1]) for actions in times if actions]
        makespan = max(end for _, end in spans) - min(start for start, _ in spans)
        span = max(end - start for start, end in spans)
        busy = sum(end - start for actions in times for start, end in actions)
        bubble = 1 - busy / (len(times) * span) if span else 0.0
        return cls(schedule, tuple(map(tuple, times)), makespan, span, bubble)

    def as_tree(self) -> dict[str, Any]:
        """The schedule with times, as JSON values; see :func:`~.schedule.read_schedule`."""
        tree = self.schedule.as_tree()
        for actions, times in zip(tree["ranks"], self.times):
            for action, (start, end) in zip(actions, times):
                action.update(start=start, end=end)
        report = validate(self.schedule)
        return {
            **tree,
            "bubble": self.bubble,
            "makespan": self.makespan,
            "peak_activations": list(report.peak_activations),
            "buffers": report.buffers,
        }


def simulate(
    schedule: Schedule, costs: Costs, durations: Sequence[Sequence[float]] | None = None
) -> Timeline:
    """Simulate a valid schedule (see :func:`~hexad.parallel.pipeline.validate.validate`).

    Sends never block and take none of a rank's time. It takes time proportional to the number of actions.
    ``durations``: seconds of every rank's actions one by one, as measured, in place of the costs' times.

    Raises:
        ScheduleError: the costs are of another number of stages, the durations of other numbers of actions,
            or the order leads to a deadlock.
    """
    if costs.stages != schedule.stages:
        raise ScheduleError(f"found costs of {costs.stages} stages for a schedule of {schedule.stages}")
    if durations is None:
        both = [backward + weight for backward, weight in zip(costs.backward, costs.weight)]
        seconds = {"F": costs.forward, "B": costs.backward, "W": costs.weight, "BW": both}
        durations = [[seconds[kind][stage] for kind, stage, _ in actions] for actions in schedule.ranks]
    elif [*map(len, durations)] != [*map(len, schedule.ranks)]:
        raise ScheduleError("durations need as many values of each rank as it has actions")
    return Timeline.of(schedule, _times(schedule, durations, costs.transfer))


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """The most activation memory that each rank holds at once, in the unit of :attr:`Costs.activation`."""
    peaks = []
    for actions in schedule.ranks:
        memory = peak = 0.0
        for kind, stage, _ in actions:
            if kind == "F":
                memory += costs.activation[stage]
                if memory > peak:
                    peak = memory
            elif kind != "B":
                memory -= costs.activation[stage]
        peaks.append(round(peak, 9))
    return tuple(peaks)


def _times(
    schedule: Schedule, durations: Sequence[Sequence[float]], transfer: float
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """(start, end) of every action. Each rank runs until it must wait, and resumes when its input is known.

    A link's messages all come from one rank, in the order of that rank's actions, so that ranks can be
    simulated one after the other, each as far as possible, without a common clock.
    """
    microbatches, stages, placement = schedule.microbatches, schedule.stages, schedule.placement
    pipeline, backward = schedule.pipeline, schedule.stages * schedule.microbatches
    # When the input of F (and, above, that of B) of each stage and microbatch arrives. None: not yet known.
    arrivals: list[float | None] = [None] * (2 * backward)
    arrivals[:microbatches] = arrivals[2 * backward - microbatches :] = [0.0] * microbatches
    links = [0.0] * pipeline**2
    waiting = [-1] * pipeline
    times: list[list[tuple[float, float]]] = [[] for _ in range(pipeline)]
    stack = list(range(pipeline))
    while stack:
        rank = stack.pop()
        done = times[rank]
        now = done[-1][1] if done else 0.0
        actions, seconds = schedule.ranks[rank], durations[rank]
        for position in range(len(done), len(actions)):
            kind, stage, number = actions[position]
            if kind == "W":
                end = now + seconds[position]
                done.append((now, end))
                now = end
                continue
            index = stage * microbatches + number
            if kind == "F":
                target, gives = stage + 1, index + microbatches
            else:
                index += backward
                target, gives = stage - 1, index - microbatches
            arrival = arrivals[index]
            if arrival is None:
                waiting[rank] = index
                break
            start = arrival if arrival > now else now
            now = start + seconds[position]
            done.append((start, now))
            if not 0 <= target < stages:
                continue
            other = placement[target]
            if other == rank:
                arrivals[gives] = now
                continue
            link = rank * pipeline + other
            arrivals[gives] = links[link] = max(now, links[link]) + transfer
            if waiting[other] == gives:
                waiting[other] = -1
                stack.append(other)
    if any(len(done) < len(actions) for done, actions in zip(times, schedule.ranks)):
        only = all(action.kind == "F" for actions in schedule.ranks for action in actions)
        validate(schedule, forward_only=only)
        raise ScheduleError("the schedule cannot be carried out")
    return tuple(map(tuple, times))
