"""The variants of one pipeline in a search: the time of a step, and what fits in memory. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from hexad.model.recompute_inventory import Recompute
from hexad.parallel.pipeline.simulate import Timeline

from .choices import Choices, LayerLayout, PipelineLayout, Variant
from .device_memory import DeviceRoom
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

    def __init__(self, choices: Choices, predict: Predict, grid: LayerLayout, choice: PipelineLayout) -> None:
        self._predict = predict
        period, microbatches = choice.pipeline, choices.microbatches(grid, choice.pipeline)
        short = 4 * period + microbatches % period
        if microbatches <= short + period or choice.schedule == "gpipe":  # which keeps all of them
            short, steady = microbatches, 0
        else:
            steady = short - period  # one period of the steady state less
        self.resolved = choices.resolved(grid, choice, short)
        self._job, self._before, self._more = Job.of(self.resolved), None, 0.0
        self._timelines: dict[Any, Timeline] = {}
        if steady:
            before = choices.resolved(grid, choice, steady)
            self._before, self._more = before.plan.schedule, (microbatches - short) / period

    def of(self, resolved: Resolved) -> tuple[Job, StepTime]:
        """The job of a variant, and its time."""
        recompute = Recompute.from_settings(resolved.config.memory)
        job = replace(self._job, layout=resolved.layout, recompute=recompute)
        step = self._predict(job, self._timelines)
        if self._before is not None:
            before = self._predict(replace(job, schedule=self._before), self._timelines)
            # In the beginning the slowest rank may not yet be the one that all others wait for.
            busy = (sum(end - begin for begin, end in times) for times in step.timeline.times)
            slowest = max(busy) * job.layout.pipeline / job.schedule.microbatches
            step = replace(step, total=step.total + self._more * max(slowest, step.total - before.total))
        return job, step


class Memories:
    """The memory that the variants of a pipeline need. More sharding and more recompute need less."""

    def __init__(self, choices: Choices, room: DeviceRoom, resolved: Resolved) -> None:
        self._choices, self._room, self._resolved = choices, room, resolved
        self._variants: dict[Variant, Resolved | None] = {}
        self._plans: dict[Variant, MemoryPlan | None] = {}
        self._fitting: dict[Variant, bool] = {}
        self._fullest = 0  # the rank that needs the most, as far as is known
        self._fewest: dict[Variant, Variant | None] = {}
        self._most = max(map(len, resolved.plan.layers))
        self._kept: dict[Any, tuple[int, int]] = {}
        self._least: dict[Recompute, int] = {}

    def _parts(self, rank: int) -> RankParts:
        return self._choices.parts(self._resolved, rank)

    @cached_property
    def _job(self) -> Job:
        return Job.of(self._resolved)

    def resolved(self, variant: Variant) -> Resolved | None:
        """The configuration of a variant; None if it is refused."""
        if variant not in self._variants:
            self._variants[variant] = self._choices.variant(self._resolved, variant)
        return self._variants[variant]

    def planned(self, variant: Variant) -> tuple[Resolved, MemoryPlan]:
        """The configuration of a variant that fits, and the plan of the rank that needs the most."""
        resolved, plan = self.resolved(variant), self._plan(variant)
        assert resolved is not None and plan is not None
        return resolved, plan

    def _plan(self, variant: Variant) -> MemoryPlan | None:
        """The plan of the rank that needs the most; None if it is refused or does not fit."""
        key = variant._replace(order="")
        if key not in self._plans:
            plan, resolved = None, self.resolved(variant)
            if resolved is not None and self._may_fit(variant):
                ranks = range(resolved.layout.pipeline)
                plans = per_pipeline_rank(resolved, parts=list(map(self._parts, ranks)))
                plan = largest(plans)
                if not self._room.fits(resolved, plan.total):
                    self._fullest, plan = plans.index(plan), None
                    self._fitting.clear()
            self._plans[key] = plan
        return self._plans[key]

    def _may_fit(self, variant: Variant) -> bool:
        """Whether the rank fits that needed the most when that was last known."""
        key = variant._replace(order="")
        if key not in self._fitting:
            resolved, fits = self.resolved(variant), self._room.fits
            self._fitting[key] = (
                resolved is not None
                and fits(resolved, self.least(resolved))
                and fits(resolved, self._predicted(resolved, self._fullest))
            )
        return self._fitting[key]

    def _predicted(self, resolved: Resolved, rank: int) -> int:
        """Bytes that a pipeline rank needs."""
        ranks = next(resolved.layout.iter_groups("pipeline"))
        return predict(resolved, ranks[rank], parts=self._parts(rank)).total

    def at_least(self, variant: Variant, part: float) -> Variant:
        """The variant in which so many of the first rank's layers recompute, at the least."""
        if variant.recompute == "none" or not self._choices.some_layers:
            return variant
        plan = self._resolved.plan
        fewest = min(len(plan.layers[stage]) for stage in plan.schedule.stages_of(0))
        return self._some(variant, max(1, int(part * fewest)))

    def _some(self, variant: Variant, layers: int) -> Variant:
        return variant._replace(layers=None if layers >= self._most else layers)

    def fewest(self, variant: Variant) -> Variant | None:
        """The variant in which as few layers recompute as fit, and no fewer than in this one; None if none
        does."""
        key = variant._replace(order="")
        if key not in self._fewest:
            self._fewest[key] = self._fewest_layers(variant)
        fewest = self._fewest[key]
        return None if fewest is None else fewest._replace(order=variant.order)

    def _fewest_layers(self, variant: Variant) -> Variant | None:
        most = self._some(variant, self._most)
        if variant == most or self._plan(variant) is not None:
            return variant if self._plan(variant) is not None else None
        if self._plan(most) is None:
            return None
        below, layers = cast("int", variant.layers), self._most
        while layers - below > 1:
            middle = min((below + layers) // 2, below + 2)  # mostly few more
            if self._may_fit(self._some(variant, middle)):
                layers = middle
            else:
                below = middle
        fitting = (self._some(variant, more) for more in range(layers, self._most + 1))
        return next((candidate for candidate in fitting if self._plan(candidate) is not None), None)

    def least(self, resolved: Resolved) -> int:
        """Bytes of state and of activations on the rank that has most of them, without what is needed for a
        moment."""
        job, recompute = self._job, Recompute.from_settings(resolved.config.memory)
        if recompute not in self._least:
            self._least[recompute] = int(
                max(
                    self._state[rank] + self._activations(rank, recompute)
                    for rank in range(job.schedule.pipeline)
                )
            )
        return self._least[recompute]

    @cached_property
    def _state(self) -> list[float]:
        """Bytes of each pipeline rank's parameters, gradients and optimizer."""
        job, run, states = self._job, self._job.run, []
        for rank in range(job.schedule.pipeline):
            state = 0.0
            for stage in job.schedule.stages_of(rank):
                for grid, elements in job.elements[stage].items():
                    shards = job.shards(grid)
                    state += elements * run.byte * (job.zero < 3)
                    state += elements * run.gradient / (shards if job.zero >= 2 else 1)
                    state += elements * 3 * run.wide / shards * (not job.offload)
            states.append(state)
        return states

    def _activations(self, rank: int, recompute: Recompute) -> int:
        """Bytes that are kept from forward to backward, and from ``B`` to ``W``, at the most."""
        job, nbytes, most = self._job, 0, 0
        sizes = {}
        for stage in job.schedule.stages_of(rank):
            spec = job.stages[stage]
            key = spec.runs, spec.first, spec.last, recompute
            if key not in self._kept:
                kept = spec.kept(job.run, recompute).total()
                self._kept[key] = kept, spec.operands(job.run).total()
            sizes[stage] = self._kept[key]
        for action in job.schedule.ranks[rank]:
            kept, operands = sizes[action.stage]
            if action.kind == "F":
                nbytes += kept
                most = max(most, nbytes)
            elif action.kind == "W":
                nbytes -= operands
            else:
                nbytes += operands - kept if action.kind == "B" else -kept
        return most
