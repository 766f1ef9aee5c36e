"""Lower bounds on what a layout takes: seconds of its kernels, messages and bubble, and bytes. No torch.

They are those of a pipeline whose stages are equal, from what the whole model takes on one pipeline rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hexad.model.block_inventory import BlockSpec
from hexad.model.inventory import StageSpec
from hexad.model.recompute_inventory import Parts
from hexad.topology.layout import Layout

from .links import Cluster
from .step_time import Predictor

SPLIT = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")
"""Schedules in which weight gradients are actions of their own."""


class Grid(NamedTuple):
    """What a layer's kernels depend on."""

    tensor: int
    context: int
    method: str
    expert: int
    expert_tensor: int
    micro: int


class Pipeline(NamedTuple):
    """What a schedule depends on, besides the microbatches; and the level of sharding."""

    pipeline: int
    virtual: int
    schedule: str
    zero: int


Sent = tuple[float, float]
"""Seconds of gathering all weights, and of reducing all gradients."""


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
    def _parts(self) -> Parts:
        return self.predictor.job.recompute.of(0)

    @cached_property
    def _layers(self) -> Counter[BlockSpec]:
        return Counter(self._stage.blocks)

    @cached_property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return self.predictor.action(self._stage, "F", False).seconds

    @cached_property
    def backward(self) -> float:
        """Seconds of the backward pass."""
        return self.predictor.action(self._stage, "BW", False).seconds

    @cached_property
    def split(self) -> tuple[float, ...]:
        """Seconds of F, B and W where weight gradients are computed by themselves."""
        kinds = ("F", "B", "W")
        return tuple(self.predictor.action(self._stage, kind, True).seconds for kind in kinds)

    @cached_property
    def layer(self) -> float:
        """Seconds of both passes in the layer that takes the least."""
        times = (
            [self.predictor.layer(block, self._parts, kind, False).seconds for kind in ("F", "BW")]
            for block in self._layers
        )
        return min(map(sum, times))

    @cached_property
    def kept(self) -> int:
        """Bytes from forward to backward."""
        run = self.predictor.job.run
        kept = (number * block.kept(run, self._parts).total() for block, number in self._layers.items())
        return sum(kept)

    @cached_property
    def moment(self) -> int:
        """Bytes that a layer's backward pass needs besides."""
        moments = self._stage.blocks[-1].backward(self.predictor.job.run, self._parts, False)
        return max(0, *(moment.needed for moment in moments))

    @cached_property
    def loss(self) -> int:
        """Bytes when the loss is computed: with what is kept."""
        head = self._stage.head
        return 0 if head is None else self.kept + head.loss(self.predictor.job.run)[0]

    def seconds(self, choice: Pipeline, sent: Sent) -> tuple[float, ...]:
        """Seconds of a microbatch's actions, beside what is sent over the data axis."""
        gather, reduce = sent
        if choice.schedule in SPLIT:
            first, input_, weight = self.split
            return max(first, gather), max(input_, gather), max(weight, reduce)
        return max(self.forward, gather), max(self.backward, gather + reduce)


@dataclass
class Kernels:
    """What the whole model takes for a microbatch on one pipeline rank.

    Attributes:
        times: by recompute.
        elements: of trained parameters, by grid.
        predictor: of times.
    """

    times: dict[str, Times]
    elements: dict[Any, int]
    predictor: Predictor

    def least(self, times: Times, choice: Pipeline, layout: Layout, microbatches: int) -> float:
        """Bytes on the first pipeline rank at the least: of parameters, gradients, optimizer and activations,
        and of what a layer needs for a moment."""
        run, zero, model = self.predictor.job.run, choice.zero, self.predictor.job.model.settings
        part = (model.layers // choice.pipeline) / model.layers
        state, layer = 0.0, 0.0
        for grid, elements in self.elements.items():
            shards = layout.state_ranks[grid]
            state += part * elements * run.byte * (zero < 3)
            state += part * elements * run.gradient / (shards if zero >= 2 else 1)
            state += part * elements * 3 * run.wide / (shards if zero else 1)
            layer += elements / model.layers
        moment = times.moment + layer * (run.gradient * (zero >= 2) + 2 * run.byte * (zero == 3))
        kept = part * in_flight(choice, microbatches) * times.kept
        return state + max(kept + moment, times.loss if choice.pipeline == 1 else 0)

    def sent(self, zero: int, layout: Layout, cluster: Cluster) -> Sent:
        """Seconds of what is sent over the data axis for a microbatch."""
        run, layers = self.predictor.job.run, self.predictor.job.model.settings.layers
        gather = reduce = 0.0
        for grid, axes in (("dense", ("context", "data")), ("expert", ("expert_data",))):
            group = cluster.group(layout, *axes)
            part = self.elements[grid] / layers
            gather += layers * cluster.seconds("all_gather", part * run.byte, group) * (zero == 3)
            reduce += layers * cluster.seconds("reduce_scatter", part * run.reduced, group)
        slower = cluster.hardware.constants.overlap.slowdown
        return gather * slower, reduce * slower


def in_flight(choice: Pipeline, microbatches: int) -> float:
    """Microbatches of all the rank's layers that the first rank holds at the least."""
    pipeline, most = choice.pipeline, float(choice.pipeline)
    if choice.schedule == "zb_h2":
        most = 2.0 * pipeline - 1
    elif choice.schedule == "interleaved":
        most = pipeline + (pipeline - 1) / choice.virtual
    return min(float(microbatches), most)


def idle(choice: Pipeline, seconds: tuple[float, ...]) -> float:
    """The bubble of a schedule at the least, in parts of that of ``1f1b``."""
    if choice.schedule in ("1f1b", "gpipe"):
        return 1.0
    if choice.schedule == "interleaved":
        return 0.9 / choice.virtual  # filled and drained by stages without the head
    if choice.schedule == "zb_h1":  # F + B - W
        return max(0.0, seconds[0] + seconds[1] - seconds[2]) / sum(seconds)
    return 0.0
