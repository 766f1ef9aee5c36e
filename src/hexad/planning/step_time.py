"""How long a step takes: actions of every stage, the pipeline, reductions of gradients, the update. No torch.

The pipeline's actions are placed in time by the very schedule that the executor carries out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hexad.model.block_inventory import BlockSpec
from hexad.model.inventory import StageSpec
from hexad.model.recompute_inventory import RecomputedParts
from hexad.parallel.inventory import Collective, Grid
from hexad.parallel.pipeline.partition import LayerCosts
from hexad.parallel.pipeline.simulate import Costs, Timeline, simulate

from .implementation import Implementation, own_implementation
from .job import Job
from .links import Cluster
from .rates import RankRates
from .timeline import ActionTime, action_time, layer_time

KINDS = ("F", "B", "W", "BW")
_GRIDS: tuple[Grid, ...] = ("dense", "expert")
_NORM = 3
"""Small collectives in which all ranks agree on the gradient norm."""


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step, on the pipeline rank that ends last.

    Attributes:
        total: of the step.
        timeline: of the pipeline's actions; they take :attr:`Timeline.makespan` seconds.
        actions: (stage, kind) -> the time of one action.
        reduction: of gradients, after the last action.
        update: of the optimizer, and of the norm.
        weights: gathers of weights that nothing hides.
        besides: of the implementation, per step.
    """

    total: float
    timeline: Timeline
    actions: dict[tuple[int, str], ActionTime]
    reduction: float
    update: float
    weights: float
    besides: float


@dataclass
class Predictor:
    """Predicts the time of a job's step.

    Attributes:
        job: what is trained.
        cluster: where.
        system: by which implementation; None for Hexad's own.
        memo: times of layers, for predictors of the same model on the same cluster.
        timelines: of schedules, for the same; schedules are kept by whoever shares these.
    """

    job: Job
    cluster: Cluster
    system: Implementation | None = None
    memo: dict[Any, ActionTime] = field(default_factory=dict, repr=False)
    timelines: dict[Any, Timeline] = field(default_factory=dict, repr=False)

    @cached_property
    def implementation(self) -> Implementation:
        """The system that computes the job."""
        return self.system or own_implementation(self.cluster.hardware)

    @cached_property
    def rates(self) -> RankRates:
        """Seconds of single operations."""
        return RankRates(self.job, self.cluster, self.implementation)

    def layer(self, block: BlockSpec, parts: RecomputedParts, kind: str, split: bool) -> ActionTime:
        """An action of one layer."""
        key = (block, parts, kind, split, self.rates.places)
        if key not in self.memo:
            operations = block.operations(self.job.run, parts, split)
            for action in KINDS if split else ("F", "BW"):
                self.memo[block, parts, action, split, self.rates.places] = layer_time(
                    operations.of(action), self.rates
                )
        return self.memo[key]

    def action(self, stage: StageSpec, kind: str, split: bool) -> ActionTime:
        """An action of a stage, without what is sent over the data axis."""
        job = self.job
        key = (stage.runs, stage.unreached, stage.first, stage.last, job.recompute, kind, split)
        place = (key, self.rates.places)
        if place in self.memo:
            return self.memo[place]
        total = ActionTime()
        layers = Counter(
            layer
            for number, layer in enumerate(stage.recomputing(job.recompute))
            if kind == "F" or number >= stage.unreached
        )
        for (block, parts), count in layers.items():
            total += self.layer(block, parts, kind, split).times(count)
        for part in (stage.before_layers(job.run), stage.after_layers(job.run)):
            total += action_time(part.of(kind), self.rates)
        self.memo[place] = total
        return total

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Seconds of a microbatch in each layer, and in what the first and the last stage do besides."""
        job, split, stages = self.job, self.job.schedule.split_backward, list(self.job.stages.values())
        kinds = ("F", "B", "W") if split else ("F", "BW")
        layers: list[float] = []
        for stage in stages:
            for block, parts in stage.recomputing(job.recompute):
                layers.append(sum(self.layer(block, parts, kind, split).seconds for kind in kinds))

        def besides(stage: StageSpec) -> float:
            count = len(stage.layers)
            within = sum(layers[:count] if stage.first else layers[len(layers) - count :])
            return max(0.0, sum(self.action(stage, kind, split).seconds for kind in kinds) - within)

        return LayerCosts(besides(stages[0]), tuple(layers), besides(stages[-1]))

    @cached_property
    def actions(self) -> dict[tuple[int, str], ActionTime]:
        """(stage, kind) -> time of the action, with the gathers and reductions that belong to it."""
        job, split = self.job, self.job.schedule.split_backward
        kinds = ("F", "B", "W", "BW") if split else ("F", "BW")
        times: dict[tuple[int, str], ActionTime] = {}
        alike: dict[tuple[object, ...], dict[str, ActionTime]] = {}
        for number, stage in job.stages.items():
            key = (stage.runs, stage.first, stage.last, stage.unreached)
            if key not in alike:
                alike[key] = {kind: self._with_state(number, kind, split) for kind in kinds}
            times |= {(number, kind): time for kind, time in alike[key].items()}
        return times

    def _with_state(self, number: int, kind: str, split: bool) -> ActionTime:
        """An action of a stage, with what is sent over the data axis in every microbatch."""
        job, stage = self.job, self.job.stages[number]
        time = self.action(stage, kind, split)
        if job.zero < 2 or job.layout.gradient_ranks == 1:
            return time
        sent = 0.0
        first = 0.0
        units = max(1, len(stage.layers))
        for grid, elements in job.elements[number].items():
            shards = f"shards of {grid}"
            if job.zero == 3 and kind != "W":
                gather = self.state_seconds("all_gather", shards, elements * job.run.byte, units)
                sent += gather
                first = max(first, gather / units)  # the first layer's has nothing beside it
            if kind in ("BW", "W"):
                reduce = self.state_seconds("reduce_scatter", shards, elements * job.run.reduced, units)
                sent += reduce
        longer = time.device + sent
        if self.implementation.weights == "overlapped":  # a collective beside computation slows both down
            slower = time.device + min(sent, time.device) * self.rates.taken
            longer = max(slower, sent * self.cluster.hardware.constants.overlap.slowdown) + first
        exposed = {**time.exposed, "data": time.exposed.get("data", 0.0) + longer - time.device}
        calls = 2 * units * self.rates.collective_seconds
        return time._replace(device=longer, exposed=exposed, host=time.host + calls)

    def state_seconds(self, operation: str, axis: str, nbytes: float, parts: int) -> float:
        """Seconds of a collective of parameters or gradients, in so many parts."""
        if nbytes == 0:
            return 0.0
        part = Collective("", axis, operation, int(nbytes / parts))
        return parts * self.rates.collective(part)[0]

    @cached_property
    def timeline(self) -> Timeline:
        """The pipeline's actions in time."""
        job = self.job
        times, absent = self.actions, ActionTime()
        seconds = {kind: [times.get((stage, kind), absent).seconds for stage in job.stages] for kind in KINDS}
        message = self.rates.message(job.run.stream(job.model.settings.hidden))
        exposed = message if self.implementation.messages == "exposed" else 0.0
        exposed += self.implementation.message_us * 1e-6
        key = (id(job.schedule), message, *(tuple(seconds[kind]) for kind in KINDS))
        if key not in self.timelines:
            nothing = (0.0,) * len(job.stages)
            costs = Costs(nothing, nothing, nothing, transfer=message)
            self.timelines[key] = simulate(job.schedule, costs, self._durations(seconds, exposed))
        return self.timelines[key]

    def _durations(self, seconds: Mapping[str, Sequence[float]], exposed: float) -> list[list[float]]:
        """Seconds of every rank's actions, with messages that are not overlapped."""
        schedule = self.job.schedule
        durations = [[seconds[kind][stage] for kind, stage, _ in rank] for rank in schedule.ranks]
        if exposed:
            for rank, times in zip(schedule.ranks, durations):
                for place, action in enumerate(rank):
                    times[place] += exposed * (schedule.sent(action) is not None)
        return durations

    def _seconds(self, stage: int, kind: str) -> float:
        time = self.actions.get((stage, kind))
        return 0.0 if time is None else time.seconds

    @cached_property
    def step(self) -> StepTime:
        """The step."""
        timeline = self.timeline
        ranks = range(self.job.schedule.pipeline)
        reduced = max(map(self._reduced, ranks))
        update, weights = max(map(self._update, ranks)), max(map(self._gathered, ranks))
        besides = self.implementation.step_us * 1e-6
        total = reduced + update + weights + besides
        return StepTime(total, timeline, self.actions, reduced - timeline.makespan, update, weights, besides)

    def _reduced(self, rank: int) -> float:
        """The time at which a pipeline rank's gradients are reduced."""
        job, schedule = self.job, self.job.schedule
        times = self.timeline.times[rank]
        end = times[-1][1]
        sums = ("replicas",) if job.zero >= 2 else ("shards", "replicas")
        if all(self.rates.groups[f"{sum_} of {grid}"].size == 1 for sum_ in sums for grid in _GRIDS):
            return end
        lasts = {
            action.stage: place for place, action in enumerate(schedule.ranks[rank]) if action.kind != "F"
        }
        free = 0.0
        for stage, place in sorted(lasts.items(), key=lambda item: item[1]):
            begin, finish = times[place]
            seconds, parts = self._reduction(stage)
            if self.implementation.gradients == "exposed":
                free = max(free, end) + seconds
            else:  # buckets are complete one after the other
                first = begin + (finish - begin) / parts
                free = max(max(first, free) + seconds, finish + seconds / parts)
        return max(end, free)

    def _reduction(self, stage: int) -> tuple[float, int]:
        """Seconds of reducing a stage's gradients once, and the number of buckets: over shards, in ZeRO 2 and
        3 by every action; then each shard over its replicas."""
        job, seconds, most = self.job, 0.0, 1
        for grid, elements in job.elements[stage].items():
            nbytes = elements * job.run.reduced
            parts = max(1, round(nbytes / job.bucket))
            if job.zero < 2:
                seconds += self.state_seconds("reduce_scatter", f"shards of {grid}", nbytes, parts)
            shard = nbytes / job.shards(grid)
            seconds += self.state_seconds("all_reduce", f"replicas of {grid}", shard, parts)
            most = max(most, parts)
        return seconds, most

    def _shard(self, rank: int, grid: Grid) -> float:
        """Elements that a rank updates."""
        job = self.job
        stages = job.schedule.stages_of(rank)
        return sum(job.elements[stage][grid] for stage in stages) / job.shards(grid)

    def _update(self, rank: int) -> float:
        job, rates = self.job, self.rates
        elements = sum(self._shard(rank, grid) for grid in _GRIDS)
        buckets = max(1, round(elements * job.run.gradient / job.bucket))
        if job.offload:
            update = rates.kernels.update_on_host(elements)
        else:
            update = rates.kernels.update(elements * job.update, 2 * buckets)
        everyone = Collective("", "pipeline", "all_reduce", 4), Collective("", "gradient", "all_reduce", 4)
        norm = sum(rates.collective(collective)[0] for collective in everyone)
        return update + norm + _NORM * rates.collective_seconds

    def _gathered(self, rank: int) -> float:
        """Seconds of gathering updated weights that neither the update nor the first forward pass hides."""
        job = self.job
        if job.zero not in (1, 2):
            return 0.0
        seconds = 0.0
        stages = job.schedule.stages_of(rank)
        for stage in stages:
            for grid, elements in job.elements[stage].items():
                nbytes = elements * job.run.byte
                parts = max(1, round(nbytes / job.bucket))
                seconds += self.state_seconds("all_gather", f"shards of {grid}", nbytes, parts)
        if self.implementation.weights == "exposed":
            return seconds
        beside = self.timeline.times[rank][0][0] + sum(self._seconds(stage, "F") for stage in stages)
        return max(0.0, seconds - beside)
