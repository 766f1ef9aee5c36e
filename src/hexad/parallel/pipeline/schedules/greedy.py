"""Orders found by simulating a step in which every rank takes the best available action when it is free."""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate

from ..schedule import Action, Schedule
from ..simulate import Costs

_SLACK = 1e-9
_NEVER = float("inf")


@dataclass(frozen=True)
class Preference:
    """A heuristic: which action a rank prefers.

    Attributes:
        first: of forwards and backwards that are ready: ``B``, ``F``, or ``FB`` for alternating.
        deep: of a rank's stages, whether the later is preferred in forwards.
        fill: a deferred weight gradient is computed when nothing else is ready, if the next known input will
            take at least this fraction of its time to arrive.
        ahead: for each rank the most microbatches per stage whose F is done and whose B is not; None for as
            many as fit in memory.
        debt: for each rank, the most deferred weight gradients before they take precedence; None for as many
            as fit in memory.
    """

    first: str = "B"
    deep: bool = True
    fill: float = 0.5
    ahead: tuple[int, ...] | None = None
    debt: tuple[int, ...] | None = None


def greedy(
    placement: tuple[int, ...],
    microbatches: int,
    costs: Costs,
    memory: float,
    preference: Preference,
    follow: Schedule | None = None,
) -> Schedule | None:
    """A schedule in which no rank ever holds more than ``memory``.

    A forward is admitted only if memory is left for each of the rank's later stages. Then the microbatch that
    has advanced furthest can always continue, and in the end all of them.

    Args:
        placement: the pipeline rank of every stage.
        memory: in the unit of :attr:`Costs.activation`; at least one microbatch's of all stages of a rank.
        follow: forwards and backwards keep their order in this schedule (a backward is B or BW), and only the
            weight gradients are moved; None is returned where it does not fit into the memory.
    """
    run = _Search(placement, microbatches, costs, memory, preference, _plans(follow) if follow else None)
    run.carry_out()
    if sum(map(len, run.orders)) < 3 * len(placement) * microbatches:
        return None
    return Schedule("auto", microbatches, placement, tuple(map(tuple, run.orders)))


@dataclass
class _Search:
    """A step that is being simulated.

    Per stage, ``inputs["F"]`` and ``inputs["B"]`` list when the input of each microbatch arrives, as far as
    known, and ``counts`` how many of each kind have started.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: Costs
    memory: float
    preference: Preference
    plans: list[list[tuple[str, int]]] | None

    def __post_init__(self) -> None:
        placement, costs = self.placement, self.costs
        self.pipeline = pipeline = max(placement) + 1
        stages = len(placement)
        self.orders: list[list[Action]] = [[] for _ in range(pipeline)]
        self.stages = [[s for s in range(stages) if placement[s] == rank] for rank in range(pipeline)]
        self.inputs: dict[str, list[list[float]]] = {kind: [[] for _ in placement] for kind in "FB"}
        self.inputs["F"][0] = [0.0] * self.microbatches
        self.counts = {kind: [0] * stages for kind in "FBW"}
        self.seconds = {"F": costs.forward, "B": costs.backward, "W": costs.weight}
        self.frees = {
            "F": [-activation for activation in costs.activation],
            "B": [0.0] * stages,
            "W": costs.activation,
        }
        self.room = [self.memory * (1 + _SLACK)] * pipeline
        self.needs = [0.0] * stages
        for rank_stages in self.stages:
            for stage, needed in zip(
                reversed(rank_stages), accumulate(costs.activation[s] for s in reversed(rank_stages))
            ):
                self.needs[stage] = needed
        self.free = [0.0] * pipeline
        self.links = [0.0] * pipeline**2
        self.last = ["B"] * pipeline

    def carry_out(self) -> None:
        events = [(0.0, rank) for rank in range(self.pipeline)]
        heapify(events)
        while events:
            now, rank = heappop(events)
            if self.free[rank] > now:
                continue
            choice = self._choose(rank, now)
            if choice is not None:
                self._begin(rank, now, *choice, events)

    def _choose(self, rank: int, now: float) -> tuple[str, int] | None:
        preference, counts = self.preference, self.counts
        owed = self._owed(rank)
        if owed is not None and preference.debt is not None:
            done, begun = counts["B"], counts["W"]
            if sum(done[s] - begun[s] for s in self.stages[rank]) > preference.debt[rank]:
                return "W", owed
        if self.plans is not None:
            choice, ready = self._planned(rank)
        else:
            choice, ready = self._preferred(rank, now)
        if choice is not None and ready <= now:
            return choice
        if owed is None or ready - now < preference.fill * self.seconds["W"][owed]:
            return None
        return "W", owed

    def _owed(self, rank: int) -> int | None:
        """The stage of the oldest deferred weight gradient, later stages before earlier ones."""
        best, oldest = None, 1 << 60
        for stage in self.stages[rank]:
            number = self.counts["W"][stage]
            if number < self.counts["B"][stage] and number <= oldest:
                best, oldest = stage, number
        return best

    def _preferred(self, rank: int, now: float) -> tuple[tuple[str, int] | None, float]:
        """The best action that is ready, or the next known one, and when it is ready."""
        forward, forward_ready = self._candidate("F", rank, now)
        backward, backward_ready = self._candidate("B", rank, now)
        if forward_ready > now or backward_ready > now:
            if forward_ready < backward_ready:
                return ("F", forward), forward_ready
            return ("B", backward), backward_ready
        first = self.preference.first
        if first == "B" or (first == "FB" and self.last[rank] == "F"):
            return ("B", backward), now
        return ("F", forward), now

    def _candidate(self, kind: str, rank: int, now: float) -> tuple[int, float]:
        """The stage whose next action of a kind is best, and when its input arrives (not before ``now``)."""
        best, ready = -1, _NEVER
        begun, inputs = self.counts[kind], self.inputs[kind]
        rank_stages = self.stages[rank]
        for stage in reversed(rank_stages) if kind == "B" or self.preference.deep else rank_stages:
            number = begun[stage]
            if number < len(inputs[stage]):
                arrival = inputs[stage][number]
                arrival = now if arrival < now else arrival
                if arrival < ready and (kind == "B" or self._admitted(rank, stage)):
                    best, ready = stage, arrival
        return best, ready

    def _admitted(self, rank: int, stage: int) -> bool:
        if self.needs[stage] > self.room[rank]:
            return False
        ahead = self.preference.ahead
        return ahead is None or self.counts["F"][stage] - self.counts["B"][stage] < ahead[rank]

    def _planned(self, rank: int) -> tuple[tuple[str, int] | None, float]:
        assert self.plans is not None
        plan = self.plans[rank]
        if not plan:
            return None, _NEVER
        kind, stage = plan[-1]
        number, inputs = self.counts[kind][stage], self.inputs[kind][stage]
        if number >= len(inputs) or (kind == "F" and self.costs.activation[stage] > self.room[rank]):
            return None, _NEVER
        return (kind, stage), inputs[number]

    def _begin(self, rank: int, now: float, kind: str, stage: int, events: list[tuple[float, int]]) -> None:
        number = self.counts[kind][stage]
        self.counts[kind][stage] = number + 1
        self.orders[rank].append(Action(kind, stage, number))
        self.room[rank] += self.frees[kind][stage]
        end = self.free[rank] = now + self.seconds[kind][stage]
        heappush(events, (end, rank))
        if kind == "W":
            return
        self.last[rank] = kind
        if self.plans is not None:
            self.plans[rank].pop()
        target = stage + 1 if kind == "F" else stage - 1
        if target == len(self.placement):
            self.inputs["B"][stage].append(end)
        elif target >= 0:
            other = self.placement[target]
            if other != rank:
                link = rank * self.pipeline + other
                self.links[link] = max(end, self.links[link]) + self.costs.transfer
                end = self.links[link]
                heappush(events, (end, other))
            self.inputs[kind][target].append(end)


def _plans(schedule: Schedule) -> list[list[tuple[str, int]]]:
    """The forwards and backwards of each rank, the first one last."""
    return [
        [(kind[0], stage) for kind, stage, _ in reversed(actions) if kind != "W"]
        for actions in schedule.ranks
    ]
