"""The fastest layouts of a model on a cluster: a search by lower bounds. No torch.

Layouts are expanded in the order of a lower bound on their step time (:mod:`.bounds`): first what determines
a layer's kernels (tensor, context and expert degrees, size of microbatches), then the pipeline, then what
only concerns memory and the data axis. A layout is evaluated exactly, by the plan that training would carry
out, unless its bound is above what has been found. Most layouts are never evaluated.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import inf
from typing import Any, NamedTuple

from hexad.config import Config, ConfigError
from hexad.parallel.pipeline.partition import partition
from hexad.parallel.pipeline.simulate import Timeline
from hexad.parallel.tensor.linear_inventory import MOST_CHUNKS
from hexad.topology.layout import Layout

from .bounds import Bounds
from .choices import Choices, LayerLayout, PipelineLayout, Variant, with_batch
from .device_memory import DeviceMemory, DeviceRoom
from .evaluation import Memories, Steps
from .implementation import Implementation
from .job import Job
from .links import Cluster
from .memory import MemoryPlan, largest, per_pipeline_rank
from .resolve import Resolved
from .step_time import Predictor, StepTime
from .timeline import ActionTime

_WITHIN = 1.03
"""Layouts that take longer than the best one times this are not searched for."""


@dataclass(frozen=True)
class Candidate:
    """A layout that has been evaluated.

    Attributes:
        resolved: the configuration that trains so.
        job: what its step does.
        step: its predicted time.
        memory: of the pipeline rank that needs the most.
        device: the same with what a GPU holds besides tensors.
    """

    resolved: Resolved
    job: Job
    step: StepTime
    memory: MemoryPlan
    device: DeviceMemory


class Point(NamedTuple):
    """A layout that was looked at.

    Attributes:
        seconds: of a step.
        nbytes: of a GPU's memory.
        exact: whether memory was predicted; otherwise both are those at the least.
        layout: in words.
    """

    seconds: float
    nbytes: int
    exact: bool
    layout: str


@dataclass
class Search:
    """A search.

    Attributes:
        base: the configuration whose other settings all layouts have.
        cluster: where it is to run.
        capacity: bytes of memory of a GPU.
        fixed: settings that are not searched: ``parallel.tensor`` and the like.
        system: what computes it; None for Hexad's own.
        rejected: how many layouts were not possible, by reason.
        pipelines: how many were evaluated, each with all kinds of recompute and orders.
        points: layouts that were looked at.
    """

    base: Config
    cluster: Cluster
    capacity: int
    fixed: frozenset[str] = frozenset()
    system: Implementation | None = None
    rejected: Counter[str] = field(default_factory=Counter)
    pipelines: int = 0
    points: list[Point] = field(default_factory=list, repr=False)
    _memo: dict[Any, ActionTime] = field(default_factory=dict, repr=False)

    @cached_property
    def room(self) -> DeviceRoom:
        """The memory of a GPU."""
        return DeviceRoom(self.capacity, self.base.run.device == "cpu")

    @cached_property
    def choices(self) -> Choices:
        """The layouts that are searched."""
        cluster = self.cluster
        return Choices(self.base, cluster.gpus, cluster.domain_size, self.fixed, self.rejected)

    @cached_property
    def bounds(self) -> Bounds:
        """Lower bounds on the time of layouts."""
        return Bounds(self.choices, self.cluster, self.room, self.system, self._memo)

    def best(self, top: int) -> list[Candidate]:
        """The fastest layouts of different degrees, the best one first: all that take at most 3 % longer, and
        others that were fastest on the way."""
        fastest: dict[tuple[Any, ...], Candidate] = {}
        numbers = count()
        queue: list[tuple[float, int, LayerLayout, PipelineLayout | None, bool]] = [
            (self.bounds.grid(grid), next(numbers), grid, None, False) for grid in self.choices.grids()
        ]
        heapq.heapify(queue)
        while queue:
            bound, _, grid, pipeline, tight = heapq.heappop(queue)
            times = sorted(candidate.step.total for candidate in fastest.values())
            limit = min(times[top - 1] if len(times) >= top else inf, _WITHIN * times[0] if times else inf)
            if bound >= limit:
                break
            if pipeline is None or not tight:
                choices = self.choices.pipelines(grid) if pipeline is None else [pipeline]
                for choice in choices:
                    bounds = self.bounds.of(grid, choice, tight=pipeline is not None)
                    if bounds:
                        least = min(bound.seconds for bound in bounds.values())
                        heapq.heappush(queue, (least, next(numbers), grid, choice, pipeline is not None))
                    else:
                        self.rejected["memory"] += 1
                continue
            degrees = (grid.tensor, grid.context, grid.method, pipeline.pipeline, *grid[3:5])
            if degrees in fastest:
                limit = min(limit, fastest[degrees].step.total)
            if bound < limit:
                candidate = self._evaluate(grid, pipeline, limit)
                if candidate is not None:
                    fastest[degrees] = candidate
        listed = sorted(fastest.values(), key=lambda candidate: candidate.step.total)[:top]
        complete = [candidate for candidate in map(self._complete, listed) if candidate is not None]
        return sorted(complete, key=lambda candidate: candidate.step.total)

    def _evaluate(self, grid: LayerLayout, choice: PipelineLayout, limit: float) -> Candidate | None:
        """The fastest way to train so that fits in memory and takes less than ``limit`` seconds; None if none
        does."""
        try:
            steps = Steps(self.choices, self.predicted, grid, choice)
        except ConfigError as error:
            self.choices.refuse(error)
            return None
        self.pipelines += 1
        memories, best = Memories(self.choices, self.room, steps.resolved), None
        bounds = self.bounds.of(grid, choice, tight=True)
        for order in self.choices.orders(steps.resolved.layout):
            for recompute, bound in bounds.items():
                least = memories.at_least(Variant(order, recompute), bound.part)
                if bound.seconds >= limit or (resolved := memories.resolved(least)) is None:
                    continue
                job, step = steps.of(resolved)
                if step.total >= limit:
                    nbytes = self.room.device(resolved, memories.least(resolved)).total
                    self._note(grid, choice, least, step, nbytes, exact=False)
                    if recompute == "none":
                        break  # others take longer
                    continue
                variant = memories.fewest(least)
                if variant is None:
                    self.rejected["memory"] += 1
                    continue
                resolved, plan = memories.planned(variant)
                job, step = steps.of(resolved)
                device = self.room.device(resolved, plan.total)
                self._note(grid, choice, variant, step, device.total, exact=True)
                if step.total < limit:
                    limit, best = step.total, Candidate(resolved, job, step, plan, device)
                if recompute == "none":
                    break
        return best

    def _note(
        self,
        grid: LayerLayout,
        choice: PipelineLayout,
        variant: Variant,
        step: StepTime,
        nbytes: int,
        exact: bool,
    ) -> None:
        parts = [f"tensor {grid.tensor}"]
        parts += [f"context {grid.context} {grid.method}"] if grid.context > 1 else []
        parts += [f"expert {grid.expert} x {grid.expert_tensor}"] if grid.expert > 1 else []
        stages = f" x {choice.virtual}" if choice.virtual > 1 else ""
        parts += [f"pipeline {choice.pipeline}{stages} {choice.schedule}"] if choice.pipeline > 1 else []
        layers = f" of {variant.layers} layers" if variant.layers else ""
        parts += [f"zero {choice.zero}", f"microbatch {grid.micro}"]
        parts += [f"recompute {variant.recompute}{layers}"]
        parts += [f"{choice.replicas} replicas"] if choice.replicas > 1 else []
        parts += ["offload"] if choice.offload else []
        self.points.append(Point(step.total, nbytes, exact, ", ".join(parts)))

    def predicted(self, job: Job, timelines: dict[Any, Timeline]) -> StepTime:
        """The time of a step."""
        return Predictor(job, self.cluster, self.system, self._memo, timelines).step

    def _complete(self, candidate: Candidate) -> Candidate | None:
        """A candidate evaluated with all its microbatches, by itself and with stages divided by predicted
        seconds, then with other numbers of chunks: what is fastest and fits, if it does."""
        resolved = candidate.resolved
        best = self._whole(resolved.config, resolved.layout)
        if best is None:
            self.rejected["memory"] += 1
            return None
        for settings in (self._splits(best), self._chunks(best)):
            for update in settings:
                parallel = best.resolved.config.parallel.model_copy(update=update)
                config = best.resolved.config.model_copy(update={"parallel": parallel})
                best = self._whole(config, resolved.layout, best.step.total) or best
        return best

    def _whole(self, config: Config, layout: Layout, limit: float = inf) -> Candidate | None:
        """A configuration evaluated with all microbatches; None if it does not fit, or takes ``limit``
        seconds."""
        resolved = with_batch(config, layout, self.base.batch.global_)
        job = Job.of(resolved)
        step = self.predicted(job, {})
        if step.total >= limit:
            return None
        plan = largest(per_pipeline_rank(resolved))
        device = self.room.device(resolved, plan.total)
        return Candidate(resolved, job, step, plan, device) if device.total <= self.capacity else None

    def _splits(self, candidate: Candidate) -> list[dict[str, Any]]:
        """The division into stages by predicted seconds, if it is another."""
        settings, layers = candidate.resolved.config.parallel, candidate.resolved.plan.layers
        if "parallel.split" in self.fixed or settings.split != "cost" or len(layers) == 1:
            return []
        costs = Predictor(candidate.job, self.cluster, self.system, self._memo).layer_costs
        divided = partition("cost", self.base.model.layers, len(layers), costs)
        return [] if divided == layers else [{"split": list(map(len, divided))}]

    def _chunks(self, candidate: Candidate) -> list[dict[str, Any]]:
        """Other numbers of chunks of tensor-parallel layers."""
        settings = candidate.resolved.config.parallel
        if "parallel.tensor_chunks" in self.fixed or self.base.parallel.tensor_chunks != "auto":
            return []
        if settings.tensor == 1 or self.base.precision.dtype == "fp8":
            return []
        numbers = {1, 2, MOST_CHUNKS} - {settings.tensor_chunks}
        return [{"tensor_chunks": number} for number in sorted(numbers)]
