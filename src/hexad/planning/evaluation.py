"""The variants of one pipeline in a search: the time of a step, and what fits in memory. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Any, cast

from hexad.model.recompute_inventory import Recompute
from hexad.parallel.pipeline.simulate import Costs, Timeline, peak_memory

from .choices import Choices, Grid, Pipeline, Sharding
from .device_memory import Room
from .job import Job
from .memory import MemoryPlan, RankParts, largest, per_pipeline_rank, predict
from .resolve import Resolved
from .step_time import StepTime

Predict = Callable[[Job, dict[Any, Timeline]], StepTime]
"""The time of a job's step, given the timelines of schedules."""


class Steps:
    """The step of a layout. Of a long schedule a part is simulated, whose steady state is as the rest's.

    Raises:
        ConfigError: the layout is refused.
    """

    def __init__(self, choices: Choices, predict: Predict, grid: Grid, choice: Pipeline) -> None:
        self._predict = predict
        period, microbatches = choice.pipeline, choices.microbatches(grid, choice.pipeline)
        short = 4 * period + microbatches % period
        if microbatches <= short + period:
            short, steady = microbatches, 0
        else:
            steady = short - period  # one period of the steady state less
        self.resolved = choices.resolved(grid, choice, short)
        self._job, self._before, self._more = Job.of(self.resolved), None, 0.0
        self._timelines: dict[Any, Timeline] = {}
        if steady:
            before = choices.resolved(grid, choice, steady)
            self._before, self._more = before.plan.schedule, (microbatches - short) / (short - steady)

    def of(self, variant: Resolved) -> tuple[Job, StepTime]:
        """The job of a variant, and its time."""
        recompute = Recompute.from_settings(variant.config.memory)
        replicas = variant.config.parallel.replicas
        job = replace(self._job, layout=variant.layout, recompute=recompute, replicas=replicas)
        step = self._predict(job, self._timelines)
        if self._before is not None:
            before = self._predict(replace(job, schedule=self._before), self._timelines)
            step = replace(step, total=step.total + self._more * (step.total - before.total))
        return job, step


class Memories:
    """What the variants of a pipeline need. More sharding and more recompute need less."""

    def __init__(self, choices: Choices, room: Room, resolved: Resolved) -> None:
        self._choices, self._room, self._resolved = choices, room, resolved
        self._variants: dict[Sharding, Resolved | None] = {}
        self._plans: dict[Sharding, MemoryPlan | None] = {}
        self._fitting: dict[Sharding, bool] = {}
        self._fullest = 0  # the rank that needs the most, as far as is known
        self._fewest: dict[Sharding, Sharding | None] = {}
        self._most = max(map(len, resolved.plan.layers))
        schedule = resolved.plan.schedule
        stages = schedule.stages
        self._in_flight = peak_memory(schedule, Costs.uniform(stages, stages // schedule.pipeline))[0]
        self._kept: dict[Recompute, int] = {}

    def _parts(self, rank: int) -> RankParts:
        return self._choices.parts(self._resolved, rank)

    @cached_property
    def _job(self) -> Job:
        return Job.of(self._resolved)

    def variant(self, sharding: Sharding) -> Resolved | None:
        """The configuration of a sharding; None if it is refused."""
        if sharding not in self._variants:
            self._variants[sharding] = self._choices.variant(self._resolved, sharding)
        return self._variants[sharding]

    def planned(self, sharding: Sharding) -> tuple[Resolved, MemoryPlan]:
        """The configuration of a sharding that fits, and the plan of the rank that needs the most."""
        variant, plan = self.variant(sharding), self._plan(sharding)
        assert variant is not None and plan is not None
        return variant, plan

    def _plan(self, sharding: Sharding) -> MemoryPlan | None:
        """The plan of the rank that needs the most; None if it is refused or does not fit."""
        key = sharding._replace(order="")
        if key not in self._plans:
            plan, variant = None, self.variant(sharding)
            if variant is not None and self._may_fit(sharding):
                ranks = range(variant.layout.pipeline)
                plans = per_pipeline_rank(variant, parts=list(map(self._parts, ranks)))
                plan = largest(plans)
                if not self._room.fits(variant, plan.total):
                    self._fullest, plan = plans.index(plan), None
                    self._fitting.clear()
            self._plans[key] = plan
        return self._plans[key]

    def _may_fit(self, sharding: Sharding) -> bool:
        """Whether the rank fits that needed the most when that was last known."""
        key = sharding._replace(order="")
        if key not in self._fitting:
            variant, fits = self.variant(sharding), self._room.fits
            self._fitting[key] = (
                variant is not None
                and fits(variant, self.least(variant))
                and fits(variant, self._predicted(variant, self._fullest))
            )
        return self._fitting[key]

    def _predicted(self, variant: Resolved, rank: int) -> int:
        """Bytes that a pipeline rank needs."""
        ranks = next(variant.layout.iter_groups("pipeline"))
        return predict(variant, ranks[rank], parts=self._parts(rank)).total

    def at_least(self, sharding: Sharding, part: float) -> Sharding:
        """The sharding in which so many of the first rank's layers recompute, at the least."""
        if sharding.recompute == "none" or not self._choices.some_layers:
            return sharding
        plan = self._resolved.plan
        fewest = min(len(plan.layers[stage]) for stage in plan.schedule.stages_of(0))
        return self._some(sharding, max(1, ceil(part * fewest - 1e-9)))

    def _some(self, sharding: Sharding, layers: int) -> Sharding:
        return sharding._replace(layers=None if layers >= self._most else layers)

    def fewest(self, sharding: Sharding) -> Sharding | None:
        """The sharding in which as few layers recompute as fit, and no fewer than before; None if none do."""
        key = sharding._replace(order="")
        if key not in self._fewest:
            self._fewest[key] = self._fewest_layers(sharding)
        fewest = self._fewest[key]
        return None if fewest is None else fewest._replace(order=sharding.order)

    def _fewest_layers(self, sharding: Sharding) -> Sharding | None:
        all_ = self._some(sharding, self._most)
        if sharding == all_ or self._plan(sharding) is not None:
            return sharding if self._plan(sharding) is not None else None
        if self._plan(all_) is None:
            return None
        below, layers = cast("int", sharding.layers), self._most
        while layers - below > 1:
            middle = min((below + layers) // 2, below + 2)  # mostly few more
            if self._may_fit(self._some(sharding, middle)):
                layers = middle
            else:
                below = middle
        fitting = (self._some(sharding, more) for more in range(layers, self._most + 1))
        return next((some for some in fitting if self._plan(some) is not None), None)

    def least(self, variant: Resolved) -> int:
        """Bytes of the first rank's state and activations, without what is needed for a moment."""
        job = replace(self._job, replicas=variant.config.parallel.replicas)
        run, zero = job.run, job.zero
        recompute = Recompute.from_settings(variant.config.memory)
        first = job.schedule.stages_of(0)
        if recompute not in self._kept:
            kept = (job.stages[stage].kept(run, recompute).total() for stage in first)
            self._kept[recompute] = sum(kept)
        state = 0.0
        for stage in first:
            for grid, elements in job.elements[stage].items():
                shards = job.shards(grid)
                state += elements * run.byte * (zero < 3)
                state += elements * run.gradient / (shards if zero >= 2 else 1)
                state += elements * 3 * run.wide / shards * (not job.offload)
        return int(state + self._in_flight * self._kept[recompute])
