"""Lower bounds on what a layout takes: seconds of its kernels, messages and bubble, and bytes. No torch.

They are those of a pipeline whose stages are equal, from what the whole model takes on one pipeline rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from hexad.config import Config, ConfigError
from hexad.model.block_inventory import BlockSpec
from hexad.model.inventory import ModelInventory, StageSpec
from hexad.model.recompute_inventory import Recompute, RecomputedPart, RecomputedParts
from hexad.parallel.pipeline.schedules import build_schedule, stages_per_rank
from hexad.parallel.pipeline.schedules.published import V_SHAPED
from hexad.topology.layout import Layout

from .choices import Choices, LayerLayout, PipelineLayout, Variant
from .device_memory import DeviceRoom
from .implementation import Implementation
from .job import Job, stages_of
from .links import Cluster
from .memory import execution, predict
from .rates import RankRates
from .resolve import resolved_parallel, tensor_chunks
from .stages import stage_layers
from .step_time import Predictor
from .timeline import ActionTime

SPLIT = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")
"""Schedules in which weight gradients are actions of their own."""
DEFERRING = ("zb_h1", "zb_h2", "zb_v")
"""Schedules in which ranks defer weight gradients for several microbatches."""
_SLACK = 0.97
"""Part of what ``1f1b`` needs that other schedules need at the least."""

_EVEN = 0.93
"""Part of what ``1f1b`` needs that all ranks need on average at the least."""


class Sent(NamedTuple):
    """Seconds of gathering all weights, and of reducing all gradients."""

    gather: float = 0.0
    reduce: float = 0.0


Ways = tuple[tuple[float, float], ...]
"""Seconds of actions, of the device and of the host."""


@dataclass
class Times:
    """A microbatch on one pipeline rank that has the whole model, with one kind of recompute. What no bound
    asks for is not computed.

    Attributes:
        predictor: of its times.
    """

    predictor: Predictor

    @property
    def _stage(self) -> StageSpec:
        (stage,) = self.predictor.job.stages.values()
        return stage

    @property
    def _parts(self) -> RecomputedParts:
        return self.predictor.job.recompute.of(0)

    @cached_property
    def _layers(self) -> Counter[BlockSpec]:
        return Counter(self._stage.blocks)

    @cached_property
    def whole(self) -> Ways:
        """(Device's, host's) seconds of F and BW."""
        return tuple(self._pair(kind, False) for kind in ("F", "BW"))

    @cached_property
    def split(self) -> Ways:
        """(Device's, host's) seconds of F, B and W, where weight gradients are computed by themselves."""
        return tuple(self._pair(kind, True) for kind in ("F", "B", "W"))

    def _pair(self, kind: str, split: bool) -> tuple[float, float]:
        time = self.predictor.action(self._stage, kind, split)
        return time.device, time.host

    @cached_property
    def layer(self) -> float:
        """Seconds of both passes in the layer that takes the least, on the device."""
        times = (
            [self.predictor.layer(block, self._parts, kind, False).device for kind in ("F", "BW")]
            for block in self._layers
        )
        return min(map(sum, times))

    @cached_property
    def besides(self) -> float:
        """Seconds of both passes in what the last stage computes besides layers."""
        stage = replace(self._stage, layers=range(0), first=False)
        return sum(self.predictor.action(stage, kind, False).device for kind in ("F", "BW"))

    @cached_property
    def kept(self) -> int:
        """Bytes from forward to backward."""
        return self.kept_by(self._stage.blocks)

    def kept_by(self, blocks: Sequence[BlockSpec]) -> int:
        """Bytes that layers keep from forward to backward."""
        run = self.predictor.job.run
        kept = (number * block.kept(run, self._parts).total() for block, number in Counter(blocks).items())
        return sum(kept)

    @cached_property
    def moment(self) -> int:
        """Bytes that a layer's backward pass needs besides."""
        moments = self._stage.blocks[-1].backward(self.predictor.job.run, self._parts, False)
        return max(0, *(moment.needed for moment in moments))

    def ways(self, choice: PipelineLayout) -> list[Ways]:
        """Seconds of a microbatch's actions: F and BW; F, B and W, too, where a schedule has both."""
        return [self.whole, self.split] if choice.schedule in SPLIT else [self.whole]


@dataclass
class ModelTimes:
    """Times of the complete model for a microbatch on one pipeline rank.

    Attributes:
        times: by recompute.
        plain: without recompute.
        elements: of trained parameters, by grid.
        predictor: of times.
    """

    times: dict[str, Times]
    plain: Times
    elements: dict[Any, int]
    predictor: Predictor

    def least(self, choice: PipelineLayout, layout: Layout) -> Needs:
        """Bytes on the first pipeline rank at the least: of parameters, gradients, optimizer and activations,
        and of what a layer needs for a moment."""
        layers = self.predictor.job.model.settings.layers
        return self._needs(choice, layout, (layers // choice.pipeline) / layers)

    def average(self, choice: PipelineLayout, layout: Layout, microbatches: int) -> Needs:
        """Average bytes of ranks that have equal parts of the model. Where weight gradients are deferred, of
        some microbatches only their operands are kept; and the last rank keeps those of as many microbatches
        as the first one keeps activations, less one, if there are enough of them."""
        part, pipeline = _EVEN / choice.pipeline, choice.pipeline
        needs = self._needs(choice, layout, part)
        if choice.schedule not in SPLIT:
            return needs
        deferred = 0.9 * (pipeline - 1) / pipeline**2 * self._operands
        if choice.schedule not in DEFERRING or microbatches < 2 * pipeline:
            deferred = 0.0
        kept = {kind: max(min(size, part * self._operands), deferred) for kind, size in needs.kept.items()}
        return needs._replace(kept=kept)

    @cached_property
    def _operands(self) -> int:
        """Bytes of the operands of all layers' weight gradients."""
        (stage,) = self.predictor.job.stages.values()
        return stage.operands(self.predictor.job.run).total()

    def _needs(self, choice: PipelineLayout, layout: Layout, part: float) -> Needs:
        run, zero, layers = self.predictor.job.run, choice.zero, self.predictor.job.model.settings.layers
        state, layer = 0.0, 0.0
        for grid, elements in self.elements.items():
            shards = layout.state_ranks[grid] // choice.replicas
            state += part * elements * run.byte * (zero < 3)
            state += part * elements * run.gradient / (shards if zero >= 2 else 1)
            state += part * elements * 3 * run.wide / (shards if zero else 1) * (not choice.offload)
            layer += elements / layers
        moment = min(times.moment for times in self.times.values())
        moment += int(layer * (run.gradient * (zero >= 2) + 2 * run.byte * (zero == 3)))
        return Needs(0, state + moment, {kind: part * times.kept for kind, times in self.times.items()})

    def update(self, choice: PipelineLayout, layout: Layout) -> float:
        """Seconds of the update at the least, where it is the host's; those on the device are not counted."""
        if not choice.offload:
            return 0.0
        shards = {
            grid: ranks // choice.replicas if choice.zero else 1 for grid, ranks in layout.state_ranks.items()
        }
        elements = sum(elements / shards[grid] for grid, elements in self.elements.items())
        return self.predictor.rates.kernels.update_on_host(elements / choice.pipeline)

    def sent(self, choice: PipelineLayout, layout: Layout) -> Sent:
        """Seconds of what is sent over the data axis for a microbatch."""
        job = replace(self.predictor.job, layout=layout, zero=choice.zero, replicas=choice.replicas)
        predictor = replace(self.predictor, job=job)
        run, layers, gather, reduce = job.run, job.model.settings.layers, 0.0, 0.0
        for grid, elements in self.elements.items():
            part, shards = elements / layers, f"shards of {grid}"
            if choice.zero == 3:
                gather += layers * predictor.state_seconds("all_gather", shards, part * run.byte, 1)
            reduce += layers * predictor.state_seconds("reduce_scatter", shards, part * run.reduced, 1)
        return Sent(gather, reduce)


def beside(actions: Ways, sent: Sent, rates: RankRates) -> tuple[float, ...]:
    """Seconds of a microbatch's actions, beside what is sent over the data axis; both slow each other
    down."""
    gather, reduce = sent
    slower = rates.cluster.hardware.constants.overlap.slowdown
    besides = (gather, gather + reduce) if len(actions) == 2 else (gather, gather, reduce)
    return tuple(
        max(device + rates.taken * min(device, sending), sending * slower, host)
        for (device, host), sending in zip(actions, besides)
    )


def _slowest(layers: int, pipeline: int, layer: float, again: float, besides: float) -> float:
    """Seconds of a microbatch on the slowest rank at the least: one has the head, others whole layers, in
    which they recompute for ``again`` seconds."""
    if pipeline == 1:
        return layers * layer + besides
    most = -(-layers // pipeline)
    return min(
        max(-(-(layers - count) // (pipeline - 1)) * layer + again, count * layer + besides)
        for count in range(max(0, most - int(besides / layer) - 2), most + 1)
    )


def in_flight(choice: PipelineLayout, microbatches: int, rank: int) -> float:
    """Microbatches of all its layers that a rank holds at the least."""
    pipeline, most = choice.pipeline, float(choice.pipeline - rank)
    if choice.schedule == "zb_h2":
        most = 2.0 * most - 1
    elif choice.schedule == "interleaved":
        most += (pipeline - 1 - rank) / choice.virtual
    return min(float(microbatches), most)


def idle(choice: PipelineLayout, seconds: tuple[float, ...]) -> float:
    """The bubble of a schedule at the least, in parts of that of ``1f1b``."""
    if choice.schedule in ("1f1b", "gpipe"):
        return 1.0
    if choice.schedule == "interleaved":
        return 0.6 / choice.virtual
    if choice.schedule == "zb_h1":  # F + B - W
        return max(0.0, seconds[0] + seconds[1] - seconds[2]) / sum(seconds)
    return 0.0


class Needs(NamedTuple):
    """Bytes that a pipeline rank needs at the least.

    Attributes:
        rank: its number.
        rest: of everything but ``kept``.
        kept: of a microbatch from forward to backward, by kind of recompute.
    """

    rank: int
    rest: float
    kept: Mapping[str, float]

    def scaled(self, share: float) -> Needs:
        """The needs of a rank that has a part of the layers."""
        return Needs(self.rank, share * self.rest, {kind: share * size for kind, size in self.kept.items()})

    def part(self, recompute: str, choice: PipelineLayout, microbatches: int, room: float) -> float:
        """The part of its layers that must recompute at the least; infinite if all are too few."""
        microbatches_kept = in_flight(choice, microbatches, self.rank)
        all_, none = (
            self.rest + microbatches_kept * self.kept[kind] for kind in (recompute, next(iter(self.kept)))
        )
        if all_ > room:
            return inf
        return max(0.0, none - room) / (none - all_) if all_ < none else 0.0


class RecomputeBound(NamedTuple):
    """The least time of a step with a kind of recompute.

    Attributes:
        seconds: of a step.
        part: of the layers that recompute.
    """

    seconds: float
    part: float


@dataclass
class Bounds:
    """The bounds of a search.

    Attributes:
        choices: what is searched.
        cluster: where the job is to run.
        room: of its GPUs.
        system: what computes it; None for Hexad's own.
        memo: times of layers.
    """

    choices: Choices
    cluster: Cluster
    room: DeviceRoom
    system: Implementation | None = None
    memo: dict[Any, ActionTime] = field(default_factory=dict, repr=False)
    _grids: dict[LayerLayout, ModelTimes] = field(default_factory=dict, repr=False)
    _needed: dict[tuple[LayerLayout, PipelineLayout], list[Needs]] = field(default_factory=dict, repr=False)
    _data: dict[tuple[LayerLayout, int, int, int], Sent] = field(default_factory=dict, repr=False)

    def grid(self, grid: LayerLayout) -> float:
        """Seconds of a step if a pipeline were perfect and nothing were sent over the data axis."""
        times = self._kernels(grid).plain
        base = self.choices.base.batch.global_
        microbatches = base * grid.tensor * grid.context / (grid.micro * self.choices.world)
        return sum(map(max, times.whole)) * microbatches

    def _kernels(self, grid: LayerLayout) -> ModelTimes:
        if grid not in self._grids:
            self._grids[grid] = self._measured(grid)
        return self._grids[grid]

    def _measured(self, grid: LayerLayout) -> ModelTimes:
        """Times of the complete model for a microbatch on one pipeline rank, by recompute."""
        config = self.choices.config(grid, PipelineLayout(1, 1, "1f1b", 0))
        layout = Layout.from_settings(config.parallel, self.choices.world)
        run = execution(_with_chunks(config, layout), layout)
        model = ModelInventory(config.model, config.parallel.sequence_parallel, grid.tensor)
        schedule = build_schedule("1f1b", 1, 1)
        stages, elements = stages_of(model, layout, (range(config.model.layers),), schedule)
        times, parts = {}, frozenset[RecomputedPart](self.choices.base.memory.recompute_parts)
        for recompute in dict.fromkeys(("none", *self.choices.recomputes)):
            kind = Recompute(recompute, parts=parts)  # type: ignore[arg-type]
            job = Job(model, layout, run, kind, schedule, stages, elements)
            predictor = Predictor(job, self.cluster, self.system, self.memo)
            times[recompute] = Times(predictor)
        plain = times["none"]
        return ModelTimes(
            {kind: times[kind] for kind in self.choices.recomputes}, plain, elements[0], predictor
        )

    def of(self, grid: LayerLayout, choice: PipelineLayout, tight: bool = False) -> dict[str, RecomputeBound]:
        """Lower bounds on the time of a step, by recompute: with stages as equal as whole layers allow, with
        the schedule's bubble, in which as few layers recompute as may fit. Without those that do not fit.

        Args:
            grid, choice: the layout.
            tight: memory is predicted exactly, for ``1f1b``, which holds no more than other schedules.
        """
        choices, kernels = self.choices, self._kernels(grid)
        layout = choices.layout(grid, choice.pipeline)
        room, sent = self.room.most(layout), self._sent(grid, choice, layout)
        update, bounds = kernels.update(choice, layout), {}
        least = [kernels.least(choice, layout)]
        needs = (self._needs(grid, choice) if tight else least) or least
        microbatches = choices.microbatches(grid, choice.pipeline)
        for recompute, times in kernels.times.items():
            part = max(need.part(recompute, choice, microbatches, room) for need in needs)
            if part > 1:
                continue
            if not choices.some_layers:
                part = 1.0 if choices.base.memory.recompute_layers == "all" else 0.0
            seconds = update + self._seconds(choice, kernels.plain, times, part, sent, layout)
            bounds[recompute] = RecomputeBound(seconds, part)
        return bounds

    def _needs(self, grid: LayerLayout, choice: PipelineLayout) -> list[Needs]:
        """The needs of ranks if the schedule is ``1f1b`` and as little as possible recomputes: the first one,
        and the second one, which may have more layers; none if that is refused."""
        plain = choice._replace(schedule="1f1b", virtual=1)
        if (grid, plain) not in self._needed:
            self._needed[grid, plain] = []
            with suppress(ConfigError):
                self._needed[grid, plain] = list(self._predicted(grid, plain))
        needs = self._needed[grid, plain]
        if choice.schedule in ("1f1b", "gpipe") or not needs:
            return needs
        # In other schedules all ranks hold as much as the first one, or nearly.
        layout = self.choices.layout(grid, choice.pipeline)
        microbatches = self.choices.microbatches(grid, choice.pipeline)
        average = self._kernels(grid).average(choice, layout, microbatches)
        if choice.schedule in ("zb_h1", "zb_h2"):
            return [*needs, average]
        return [needs[0].scaled(self._share(grid, choice, plain)), average]

    def _share(self, grid: LayerLayout, choice: PipelineLayout, plain: PipelineLayout) -> float:
        """The first rank's layers, in those of a pipeline with one stage per rank; at most 1."""
        numbers = []
        for variant in (choice, plain):
            stages = variant.pipeline * stages_per_rank(variant.schedule, variant.virtual)
            with suppress(ConfigError):
                layers = stage_layers(self.choices.config(grid, variant), stages)
                rank_stages = (
                    range(0, stages, variant.pipeline)
                    if variant.schedule not in V_SHAPED
                    else (0, stages - 1)
                )
                numbers.append(sum(len(layers[stage]) for stage in rank_stages))
        return min(1.0, numbers[0] / numbers[1]) if len(numbers) == 2 and numbers[1] else 0.0

    def _predicted(self, grid: LayerLayout, plain: PipelineLayout) -> Iterator[Needs]:
        choices, kernels = self.choices, self._kernels(grid)
        few = min(choices.microbatches(grid, plain.pipeline), plain.pipeline + 1)
        resolved = choices.resolved(grid, plain, few)
        order = choices.orders(resolved.layout)[0]
        variant = choices.variant(resolved, Variant(order, choices.recomputes[0]))
        if variant is None:
            return
        ranks = next(variant.layout.iter_groups("pipeline"))
        for number, rank in enumerate(ranks[:2]):
            parts = choices.parts(resolved, number)
            blocks = [block for stage in parts.stages.values() for block in stage.blocks]
            kept = {kind: times.kept_by(blocks) for kind, times in kernels.times.items()}
            activations = min(few, plain.pipeline - number) * kept[choices.recomputes[0]]
            nbytes = predict(variant, rank, parts=parts).total - activations
            yield Needs(number, _SLACK * nbytes, {kind: _SLACK * size for kind, size in kept.items()})

    def _seconds(
        self, choice: PipelineLayout, plain: Times, times: Times, part: float, sent: Sent, layout: Layout
    ) -> float:
        """Seconds of a step in which a part of the layers recomputes."""

        def mixed(without: float, all_: float) -> float:
            return (1 - part) * without + part * all_

        choices, pipeline = self.choices, choice.pipeline
        layers, virtual = choices.base.model.layers, 2 if choice.schedule in V_SHAPED else choice.virtual
        microbatches = choices.base.batch.global_ // (
            layout.degrees["data"] * plain.predictor.job.run.sequences
        )
        ways = []
        for without, all_ in zip(plain.ways(choice), times.ways(choice)):
            alone = tuple((mixed(*devices), mixed(*hosts)) for devices, hosts in map(zip, without, all_))
            ways.append(beside(alone, sent, plain.predictor.rates))
        per_rank = min(map(sum, ways)) / pipeline
        again = part * layers / pipeline * (times.layer - plain.layer)
        slowest = max(per_rank, _slowest(layers, pipeline, plain.layer, again, plain.besides))
        # Layers fill and drain the pipeline; where stages differ, the slowest rank waits less for others.
        others = (pipeline * per_rank - slowest) / max(1, pipeline - 1)
        filling = min(per_rank - plain.besides / pipeline, max(0.0, 2 * others - slowest))
        bubble = (pipeline - 1) * filling * idle(choice, ways[-1])
        # The first microbatch reaches the last stage through all others, as the last gradient does the
        # first.
        stages = pipeline * virtual
        chain = (stages - 1 + microbatches) / stages * min(sum(way[:2]) for way in ways)
        return max(microbatches * slowest + bubble, chain)

    def _sent(self, grid: LayerLayout, choice: PipelineLayout, layout: Layout) -> Sent:
        """Seconds of what is sent over the data axis for a microbatch of the whole model, each in the better
        of rank orders."""
        key = grid, choice.pipeline, choice.zero, choice.replicas
        if choice.zero < 2 or layout.gradient_ranks == 1:
            return Sent()
        if key not in self._data:
            times = [
                self._kernels(grid).sent(choice, replace(layout, order=order))
                for order in self.choices.orders(layout)
            ]
            self._data[key] = Sent(*map(min, zip(*times)))
        return self._data[key]


def _with_chunks(config: Config, layout: Layout) -> Config:
    parallel = resolved_parallel(config, layout)
    if parallel.tensor_chunks == "auto":
        parallel = parallel.model_copy(update={"tensor_chunks": tensor_chunks(config, layout)})
    return config.model_copy(update={"parallel": parallel})
