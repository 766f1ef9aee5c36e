"""The fastest layouts of a model on a cluster: an exact search by lower bounds. No torch.

Layouts are expanded in the order of a lower bound on their step time: first what determines a layer's kernels
(tensor, context and expert degrees, size of microbatches), then the pipeline, then what only concerns memory
and the data axis. A layout is evaluated exactly, by the plan that training would carry out, unless its bound
is above what has been found. So nothing better is left out, and most layouts are never evaluated.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, product
from math import inf
from typing import Any, NamedTuple

from hexad.config import Config, ConfigError
from hexad.model.inventory import ModelInventory
from hexad.model.recompute_inventory import Recompute
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.schedules.published import V_SHAPED
from hexad.parallel.pipeline.simulate import Costs, Timeline, peak_memory
from hexad.topology.layout import DEFAULT_ORDER, Layout

from .bounds import Grid, Kernels, Pipeline, Sent, Times, idle, in_flight
from .checks import check_config
from .device_memory import HOST, DeviceMemory, device_memory, least_device_memory
from .implementation import Implementation
from .job import Job, stages_of
from .links import Cluster
from .memory import MemoryPlan, RankParts, execution, largest, per_pipeline_rank, predict
from .resolve import Resolved, resolve, resolved_parallel, tensor_chunks
from .step_time import Predictor, StepTime
from .timeline import ActionTime

SEARCHED = (
    *("tensor", "context", "context_method", "pipeline", "virtual_stages", "schedule", "expert"),
    *("expert_tensor", "zero", "replicas", "order"),
)
"""Settings of ``parallel`` that are searched, besides ``batch.micro`` and those of ``memory``."""
_SHORTEST = 1024
"""Tokens of a sequence that a context rank has at the least."""


_WITHIN = 1.03
"""Layouts that take longer than the best one times this are not searched for."""
_SLACK = 0.97
"""Part of what ``1f1b`` needs that other schedules need at the least."""


class Sharding(NamedTuple):
    """What concerns memory and the data axis only."""

    replicas: int
    order: str
    recompute: str


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
        nbytes: of a GPU's memory; those that its state and activations need at the least unless ``exact``.
        exact: whether memory was predicted exactly.
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
        evaluated: how many's memory was predicted exactly.
        pipelines: how many were evaluated, each with all kinds of recompute, replicas and orders.
        points: layouts that were looked at.
    """

    base: Config
    cluster: Cluster
    capacity: int
    fixed: frozenset[str] = frozenset()
    system: Implementation | None = None
    rejected: Counter[str] = field(default_factory=Counter)
    evaluated: int = 0
    pipelines: int = 0
    points: list[Point] = field(default_factory=list, repr=False)
    _memo: dict[Any, ActionTime] = field(default_factory=dict, repr=False)
    _grid_kernels: dict[Grid, Kernels] = field(default_factory=dict, repr=False)
    _fit: dict[tuple[Grid, Pipeline], dict[str, float]] = field(default_factory=dict, repr=False)
    _layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict, repr=False)
    _devices: dict[Any, DeviceMemory] = field(default_factory=dict, repr=False)
    _data: dict[tuple[Grid, int, int], Sent] = field(default_factory=dict, repr=False)

    def best(self, top: int) -> list[Candidate]:
        """The fastest layouts of different degrees, the best one first: all that take at most 3 % longer, and
        others that were fastest on the way."""
        fastest: dict[tuple[Any, ...], Candidate] = {}
        numbers = count()
        queue: list[tuple[float, int, Grid, Pipeline | None, bool]] = [
            (self._kernels(grid), next(numbers), grid, None, False) for grid in self._grids()
        ]
        heapq.heapify(queue)
        while queue:
            bound, _, grid, pipeline, tight = heapq.heappop(queue)
            times = sorted(candidate.step.total for candidate in fastest.values())
            limit = min(times[top - 1] if len(times) >= top else inf, _WITHIN * times[0] if times else inf)
            if bound >= limit:
                break
            if pipeline is None or not tight:
                choices = self._pipelines(grid) if pipeline is None else [pipeline]
                for choice in choices:
                    bound = self._bound(grid, choice, tight=pipeline is not None)
                    if bound < inf:
                        entry = (bound, next(numbers), grid, choice, pipeline is not None)
                        heapq.heappush(queue, entry)
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
        return sorted(map(self._complete, listed), key=lambda candidate: candidate.step.total)

    # What there is to choose from

    def _values(self, name: str, values: list[Any]) -> list[Any]:
        """The values of a setting of ``parallel``: one, if it is fixed."""
        return [getattr(self.base.parallel, name)] if f"parallel.{name}" in self.fixed else values

    @cached_property
    def _world(self) -> int:
        return self.cluster.gpus

    def _grids(self) -> Iterator[Grid]:
        model, sequence = self.base.model, self.base.data.sequence
        tensors = self._values("tensor", _powers(min(self.cluster.domain_size, 8, model.heads)))
        contexts = self._values("context", _powers(max(1, sequence // _SHORTEST)))
        methods = self._values("context_method", ["ring", "ulysses", "all_gather"])
        experts = self._values("expert", _divisors(model.moe.experts) if model.moe else [1])
        micros = [self.base.batch.micro] if "batch.micro" in self.fixed else [1, 2, 4, 8]
        for tensor, context, expert, micro in product(tensors, contexts, experts, micros):
            for method in methods if context > 1 else methods[:1]:
                for expert_tensor in self._expert_tensors(tensor, expert):
                    grid = Grid(tensor, context, method, expert, expert_tensor, micro)
                    if self._possible(grid):
                        yield grid

    def _expert_tensors(self, tensor: int, expert: int) -> list[int]:
        values = [1] if self.base.model.moe is None or tensor == 1 else [1, tensor]
        return self._values("expert_tensor", values)

    def _possible(self, grid: Grid) -> bool:
        """Whether the degrees fit the model and the cluster, with some pipeline."""
        dense, experts = grid.tensor * grid.context, grid.expert * grid.expert_tensor
        if self._world % dense or self._world % experts:
            self.rejected["degrees that do not divide the GPUs"] += 1
            return False
        try:
            config = self._config(grid, Pipeline(1, 1, "1f1b", 0))
            check_config(config, Layout.from_settings(config.parallel, self._world))
        except ConfigError as error:
            if error.field != "batch.global":  # which depends on the pipeline
                self.rejected[f"divisibility: {error.field}"] += 1
                return False
        return True

    def _pipelines(self, grid: Grid) -> Iterator[Pipeline]:
        """The pipelines of a grid that fit the model, the batch and the cluster."""
        layers, whole = self.base.model.layers, self.base.batch.global_
        for pipeline in self._values("pipeline", _divisors(self._world, layers)):
            ranks = grid.tensor * grid.context * pipeline
            experts = grid.expert * grid.expert_tensor * pipeline
            if self._world % ranks or self._world % experts:
                continue
            data = self._world // ranks
            if whole % (data * grid.micro):
                self.rejected["divisibility: batch.global"] += 1
                continue
            yield from self._schedules(pipeline, layers)

    def _schedules(self, pipeline: int, layers: int) -> Iterator[Pipeline]:
        levels = self._values("zero", [0, 1, 2, 3] if self._world > 1 else [0])
        for (name, virtual), zero in product(self._named(pipeline, layers), levels):
            yield Pipeline(pipeline, virtual, name, zero)

    def _named(self, pipeline: int, layers: int) -> Iterator[tuple[str, int]]:
        """Schedules, and stages per rank."""
        if pipeline == 1:
            yield from product(self._values("schedule", ["1f1b"]), self._values("virtual_stages", [1]))
            return
        names = ["1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]
        for name in self._values("schedule", names):
            virtuals = [1]
            if name == "interleaved":
                most = layers // pipeline
                virtuals = [n for n in range(2, most + 1) if layers % (n * pipeline) in (0, n * pipeline - 1)]
                virtuals = virtuals or ([2] if most >= 2 else [])
            for virtual in self._values("virtual_stages", virtuals):
                if name in V_SHAPED and 2 * pipeline > layers:
                    continue
                yield name, virtual

    def _shardings(self, layout: Layout, zero: int) -> Iterator[Sharding]:
        """Everything else."""
        ranks, domain = layout.gradient_ranks, self.cluster.domain_size
        replicas = [1]
        if zero and ranks > domain and ranks % domain == 0:
            replicas.append(ranks // domain)
        for recompute, copies, order in product(
            self._recomputes(), self._values("replicas", replicas), self._orders(layout)
        ):
            yield Sharding(copies, order, recompute)

    def _orders(self, layout: Layout) -> list[str]:
        """Rank orders: data ranks are neighbours, or pipeline ranks."""
        orders = [DEFAULT_ORDER]
        if layout.pipeline > 1 and layout.expert * layout.expert_tensor == 1 and layout.degrees["data"] > 1:
            orders.append("tensor-context-expert-pipeline-data")
        return self._values("order", orders)

    # Lower bounds

    def _kernels(self, grid: Grid) -> float:
        """Seconds of a step if a pipeline were perfect and nothing were sent over the data axis."""
        times = next(iter(self._of_grid(grid).times.values()))  # that recomputes the least
        return (times.forward + times.backward) * self._microbatches_per_rank(grid)

    def _microbatches_per_rank(self, grid: Grid) -> float:
        """Microbatches of a step over the pipeline degree."""
        return self.base.batch.global_ * grid.tensor * grid.context / (grid.micro * self._world)

    def _of_grid(self, grid: Grid) -> Kernels:
        if grid not in self._grid_kernels:
            self._grid_kernels[grid] = self._measured(grid)
        return self._grid_kernels[grid]

    def _measured(self, grid: Grid) -> Kernels:
        """What the whole model takes for a microbatch on one pipeline rank, by recompute."""
        config = self._config(grid, Pipeline(1, 1, "1f1b", 0))
        layout = Layout.from_settings(config.parallel, self._world)
        run = execution(self._with_chunks(config, layout), layout)
        model = ModelInventory(config.model, config.parallel.sequence_parallel, grid.tensor)
        schedule = build_schedule("1f1b", 1, 1)
        stages, elements = stages_of(model, layout, (range(config.model.layers),), schedule)
        times = {}
        for recompute in self._recomputes():
            kind = Recompute(recompute)  # type: ignore[arg-type]
            job = Job(model, layout, run, kind, schedule, stages, elements)
            predictor = Predictor(job, self.cluster, self.system, self._memo)
            times[recompute] = Times(predictor)
        return Kernels(times, elements[0], predictor)

    @staticmethod
    def _with_chunks(config: Config, layout: Layout) -> Config:
        parallel = resolved_parallel(config, layout)
        if parallel.tensor_chunks == "auto":
            parallel = parallel.model_copy(update={"tensor_chunks": tensor_chunks(config, layout)})
        return config.model_copy(update={"parallel": parallel})

    def _bound(self, grid: Grid, choice: Pipeline, tight: bool = False) -> float:
        """Seconds of a step at the least. Infinite if it does not fit; see :meth:`_bounds`."""
        return next((seconds for _, seconds in self._bounds(grid, choice, tight)), inf)

    def _bounds(self, grid: Grid, choice: Pipeline, tight: bool = False) -> Iterator[tuple[str, float]]:
        """Kinds of recompute that may fit, from the least on, and seconds of a step at the least: of stages
        as equal as whole layers allow, with the schedule's bubble.

        Args:
            grid, choice: the layout.
            tight: memory is predicted exactly, for ``1f1b``, which holds no more than other schedules.
        """
        kernels, pipeline = self._of_grid(grid), choice.pipeline
        layers, microbatches = self.base.model.layers, self._microbatches(grid, choice)
        layout = self._layout(grid, pipeline)
        fitting = self._fitting(grid, choice) if tight else None
        sent = self._sent(grid, choice, layout)
        for recompute, times in kernels.times.items():
            if fitting is None:
                if not self.may_fit(layout, int(kernels.least(times, choice, layout, microbatches))):
                    continue
            else:
                more = in_flight(choice, microbatches) - min(microbatches, pipeline)
                nbytes = fitting[recompute] + more * (layers // pipeline) / layers * times.kept
                if nbytes == inf or not self.may_fit(layout, int(_SLACK * nbytes)):
                    continue
            seconds = times.seconds(choice, sent)
            per_rank = sum(seconds) / pipeline
            # The gathers of a stage's first layer have nothing beside them.
            slower = self.cluster.hardware.constants.overlap.slowdown
            per_rank += 2 * sent[0] / slower / layers * (2 if choice.schedule in V_SHAPED else choice.virtual)
            slowest = max(per_rank, -(-layers // pipeline) * times.layer)
            bubble = (pipeline - 1) * per_rank * idle(choice, seconds)
            # The first microbatch reaches the last stage through all others, as the last gradient does the
            # first.
            stages = pipeline * (2 if choice.schedule in V_SHAPED else choice.virtual)
            chain = (stages - 1 + microbatches) / stages * sum(seconds[:2])
            yield recompute, max(microbatches * slowest + bubble, chain)

    def _layout(self, grid: Grid, pipeline: int) -> Layout:
        key = (*grid[:2], *grid[3:5], pipeline)
        if key not in self._layouts:
            self._layouts[key] = Layout(
                world=self._world,
                tensor=grid.tensor,
                context=grid.context,
                expert=grid.expert,
                expert_tensor=grid.expert_tensor,
                pipeline=pipeline,
            )
        return self._layouts[key]

    def _fitting(self, grid: Grid, choice: Pipeline) -> dict[str, float]:
        """Bytes that the first rank needs by recompute if the schedule is ``1f1b``; of kinds that recompute
        more than one with which it fits, 0."""
        plain = choice._replace(schedule="1f1b", virtual=1)
        if (grid, plain) not in self._fit:
            needed = dict.fromkeys(self._recomputes(), inf)
            with suppress(ConfigError):
                few = min(self._microbatches(grid, choice), choice.pipeline + 1)
                resolved = self._resolved(grid, plain, few)
                parts = RankParts.of(resolved, 0)
                for recompute in needed:
                    variant = self._variant(resolved, Sharding(1, DEFAULT_ORDER, recompute))
                    if variant is not None:
                        needed[recompute] = predict(variant, 0, parts=parts).total
                        if self.fits(variant, int(needed[recompute])):
                            later = self._recomputes()
                            more = later[later.index(recompute) + 1 :]
                            needed |= dict.fromkeys(more, 0.0)
                            break
            self._fit[grid, plain] = needed
        return self._fit[grid, plain]

    def _sent(self, grid: Grid, choice: Pipeline, layout: Layout) -> Sent:
        """Seconds of what is sent over the data axis for a microbatch of the whole model, in the better of
        both rank orders."""
        key = grid, choice.pipeline, choice.zero
        if choice.zero < 2 or layout.gradient_ranks == 1:
            return 0.0, 0.0
        if key not in self._data:
            times = []
            for order in self._orders(layout):
                other = replace(layout, order=order)
                times.append(self._of_grid(grid).sent(choice.zero, other, self.cluster))
            self._data[key] = min(times, key=sum)
        return self._data[key]

    def _microbatches(self, grid: Grid, choice: Pipeline) -> int:
        data = self._world // (grid.tensor * grid.context * choice.pipeline)
        return self.base.batch.global_ // (data * grid.micro)

    # Exact evaluation

    def _config(self, grid: Grid, choice: Pipeline) -> Config:
        """The configuration of a layout."""
        base = self.base
        parallel: dict[str, Any] = {
            "tensor": grid.tensor,
            "context": grid.context,
            "context_method": grid.method,
            "expert": grid.expert,
            "expert_tensor": grid.expert_tensor,
            "pipeline": choice.pipeline,
            "virtual_stages": choice.virtual,
            "schedule": choice.schedule,
            "data": "auto",
            "zero": choice.zero,
        }
        return base.model_copy(
            update={
                "parallel": base.parallel.model_copy(update=parallel),
                "batch": base.batch.model_copy(update={"micro": grid.micro}),
            }
        )

    def _evaluate(self, grid: Grid, choice: Pipeline, limit: float) -> Candidate | None:
        """The fastest way to train so that fits in memory and takes less than ``limit`` seconds; None if none
        does. Of a long schedule a part is simulated, whose steady state is as the rest's."""
        short, steady = self._shortened(grid, choice)
        try:
            resolved = self._resolved(grid, choice, short)
            before = self._resolved(grid, choice, steady) if steady else None
        except ConfigError as error:
            self.rejected[f"divisibility: {error.field}"] += 1
            return None
        self.pipelines += 1
        timelines: dict[Any, Timeline] = {}
        memory, job = _Memory(self, resolved), Job.of(resolved)
        earlier = None if before is None else replace(job, schedule=before.plan.schedule)
        more = (self._microbatches(grid, choice) - short) / (short - steady) if steady else 0.0
        fitting: list[Candidate] = []
        bounds = dict(self._bounds(grid, choice, tight=True))
        for sharding in self._shardings(resolved.layout, choice.zero):
            if bounds.get(sharding.recompute, inf) >= limit:
                continue
            if fitting and sharding.recompute != fitting[0].resolved.config.memory.recompute:
                break  # more recompute takes longer
            variant = self._variant(resolved, sharding)
            if variant is None or not memory.may_fit(variant, job):
                self.rejected["memory"] += variant is not None
                continue
            changes: dict[str, Any] = {
                "layout": variant.layout,
                "recompute": Recompute.from_settings(variant.config.memory),
                "replicas": sharding.replicas,
            }
            changed = replace(job, **changes)
            step = self._step(changed, timelines)
            total = step.total
            if earlier is not None:
                total += more * (total - self._step(replace(earlier, **changes), timelines).total)
            plan = memory.plan(variant) if total < limit else None
            self._note(grid, choice, sharding, total, memory.device(variant, job, plan), plan is not None)
            if total >= limit:
                continue
            if plan is None:
                self.rejected["memory"] += 1
            else:
                step = replace(step, total=total)
                fitting.append(Candidate(variant, changed, step, plan, self.device(variant, plan.total)))
        return min(fitting, key=lambda candidate: candidate.step.total, default=None)

    def _note(
        self, grid: Grid, choice: Pipeline, sharding: Sharding, seconds: float, nbytes: int, exact: bool
    ) -> None:
        """Add a point."""
        degrees = [f"tensor {grid.tensor}"]
        degrees += [f"context {grid.context} {grid.method}"] if grid.context > 1 else []
        degrees += [f"expert {grid.expert} x {grid.expert_tensor}"] if grid.expert > 1 else []
        stages = f" x {choice.virtual}" if choice.virtual > 1 else ""
        degrees += [f"pipeline {choice.pipeline}{stages} {choice.schedule}"] if choice.pipeline > 1 else []
        rest = f"zero {choice.zero}, microbatch {grid.micro}, recompute {sharding.recompute}"
        self.points.append(Point(seconds, nbytes, exact, ", ".join([*degrees, rest])))

    def _step(self, job: Job, timelines: dict[Any, Timeline]) -> StepTime:
        return Predictor(job, self.cluster, self.system, self._memo, timelines).step

    def _shortened(self, grid: Grid, choice: Pipeline) -> tuple[int, int]:
        """Microbatches to simulate, and fewer ones, one period of the steady state less; 0 if all are."""
        microbatches, period = self._microbatches(grid, choice), choice.pipeline
        short = 4 * period + microbatches % period
        return (short, short - period) if microbatches > short + period else (microbatches, 0)

    def _resolved(self, grid: Grid, choice: Pipeline, microbatches: int) -> Resolved:
        config = self._config(grid, choice)
        layout = Layout.from_settings(config.parallel, self._world)
        whole = microbatches * grid.micro * layout.degrees["data"]
        batch = config.batch.model_copy(update={"global_": whole})
        return resolve(config.model_copy(update={"batch": batch}), layout)

    def _complete(self, candidate: Candidate) -> Candidate:
        """A candidate evaluated with all its microbatches."""
        config, base = candidate.resolved.config, self.base.batch.global_
        batch = config.batch.model_copy(update={"global_": base})
        resolved = resolve(config.model_copy(update={"batch": batch}), candidate.resolved.layout)
        job = Job.of(resolved)
        plan = largest(per_pipeline_rank(resolved))
        return Candidate(resolved, job, self._step(job, {}), plan, self.device(resolved, plan.total))

    def _recomputes(self) -> list[str]:
        if "memory.recompute" in self.fixed:
            return [self.base.memory.recompute]
        return ["none", "selective", "full"]

    def _variant(self, resolved: Resolved, sharding: Sharding) -> Resolved | None:
        """A resolved configuration with other sharding and recompute: nothing else depends on these."""
        config = resolved.config
        parallel = {"replicas": sharding.replicas, "order": sharding.order}
        memory = {"recompute": sharding.recompute}
        config = config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "memory": config.memory.model_copy(update=memory),
            }
        )
        try:
            layout = Layout.from_settings(config.parallel, self._world)
            check_config(config, layout)
        except ConfigError as error:
            self.rejected[f"divisibility: {error.field}"] += 1
            return None
        return Resolved(config, layout, resolved.plan)

    def device(self, resolved: Resolved, nbytes: int) -> DeviceMemory:
        """What a GPU holds with tensors of so many bytes."""
        settings = resolved.config.parallel
        key = resolved.layout, settings.zero, settings.replicas, settings.context_method
        if key not in self._devices:
            self._devices[key] = device_memory(0, resolved)
        return self._devices[key].holding(nbytes)

    def may_fit(self, layout: Layout, nbytes: int) -> bool:
        """Whether tensors of so many bytes may fit, with what a GPU holds besides at the least."""
        if layout not in self._devices:
            cpu = self.base.run.device == "cpu"
            self._devices[layout] = HOST if cpu else least_device_memory(0, layout)
        return self._devices[layout].holding(nbytes).total <= self.capacity

    def fits(self, resolved: Resolved, nbytes: int) -> bool:
        """Whether tensors of so many bytes fit, with what a GPU holds besides."""
        return self.device(resolved, nbytes).total <= self.capacity


class _Memory:
    """What the variants of one pipeline need. More sharding and more recompute need less."""

    def __init__(self, search: Search, resolved: Resolved) -> None:
        self._search, self._resolved = search, resolved
        self._plans: dict[tuple[Any, ...], MemoryPlan | None] = {}
        schedule = resolved.plan.schedule
        stages = schedule.stages
        self._in_flight = peak_memory(schedule, Costs.uniform(stages, stages // schedule.pipeline))[0]
        self._kept: dict[Recompute, int] = {}

    @cached_property
    def _first(self) -> RankParts:
        return RankParts.of(self._resolved, 0)

    def may_fit(self, variant: Resolved, job: Job) -> bool:
        """Whether the first rank's state and activations fit, without what is needed for a moment."""
        return self._search.fits(variant, self._least(variant, job))

    def device(self, variant: Resolved, job: Job, plan: MemoryPlan | None) -> int:
        """Bytes of a GPU: as planned, or at the least."""
        nbytes = self._least(variant, job) if plan is None else plan.total
        return self._search.device(variant, nbytes).total

    def _least(self, variant: Resolved, job: Job) -> int:
        """Bytes of the first rank's state and activations."""
        run, zero = job.run, variant.config.parallel.zero
        changed = replace(job, zero=zero, replicas=variant.config.parallel.replicas)
        recompute = Recompute.from_settings(variant.config.memory)
        first = job.schedule.stages_of(0)
        if recompute not in self._kept:
            kept = (job.stages[stage].kept(run, recompute).total() for stage in first)
            self._kept[recompute] = sum(kept)
        state = 0.0
        for stage in first:
            for grid, elements in job.elements[stage].items():
                shards = changed.shards(grid)
                state += elements * run.byte * (zero < 3)
                state += elements * run.gradient / (shards if zero >= 2 else 1)
                state += elements * 3 * run.wide / shards
        return int(state + self._in_flight * self._kept[recompute])

    def plan(self, variant: Resolved) -> MemoryPlan | None:
        """The plan of the rank that needs the most, if it fits."""
        settings, memory = variant.config.parallel, variant.config.memory
        fits = self._search.fits
        key = settings.zero, settings.replicas, memory.recompute, memory.recompute_layers, memory.offload
        if key not in self._plans:
            self._plans[key] = None
            self._search.evaluated += 1
            first = predict(variant, 0, parts=self._first)
            if fits(variant, first.total):
                plan = largest(per_pipeline_rank(variant))
                fitting = fits(variant, plan.total)
                self._plans[key] = plan if fitting else None
        return self._plans[key]


def _powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _divisors(number: int, most: float = inf) -> list[int]:
    """Divisors of a number, up to another."""
    return [n for n in range(1, int(min(number, most)) + 1) if number % n == 0]
