"""Bytes a rank will need, by component, before anything is started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hexad.config import Config
from hexad.config.schema import ModelSettings
from hexad.parallel.pipeline.schedule import Schedule
from hexad.topology.layout import Layout

from .activations import WIDTHS, Stage
from .division import Division
from .parameters import Unit, plan_buckets, stage_units
from .step import Peak, Step


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank when it needs the most.

    Attributes:
        rank: global number.
        parameters: in the model's format.
        gradients: this rank keeps between microbatches.
        master: wide values that the optimizer updates, where they are not the parameters themselves.
        optimizer: both moments of every parameter that this rank updates.
        activations: by kind (see :data:`hexad.plan.activations.Kept`).
        buffers: what is needed for a moment: communication, gradients of activations, slices of logits.
        host: of the above, in the host's memory (``memory.offload``), not part of the total.
        action: what the rank does at the peak, for people.
    """

    rank: int
    parameters: int
    gradients: int
    master: int
    optimizer: int
    activations: dict[str, int]
    buffers: int
    host: int
    action: str

    @property
    def state(self) -> int:
        """Without activations and buffers."""
        return self.parameters + self.gradients + self.master + self.optimizer

    @property
    def total(self) -> int:
        """The peak on the device."""
        return self.state + sum(self.activations.values()) + self.buffers

    def as_tree(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "rank": self.rank,
            "parameters": self.parameters,
            "gradients": self.gradients,
            "master": self.master,
            "optimizer": self.optimizer,
            "activations": dict(self.activations),
            "buffers": self.buffers,
            "host": self.host,
            "total": self.total,
            "action": self.action,
        }


def predict(
    config: Config, layout: Layout, schedule: Schedule, layers: tuple[range, ...], rank: int
) -> MemoryPlan:
    """What the rank needs when it needs the most.

    Args:
        config: resolved; ``model.vocab`` is a number.
        layout: of the run.
        schedule: of a training step.
        layers: of every stage.
        rank: global.
    """
    pipeline = layout.coordinates(rank)["pipeline"]
    numbers = schedule.stages_of(pipeline)
    final = schedule.stages - 1
    stages = {n: Stage(config, layout, len(layers[n]), n == 0, n == final) for n in numbers}
    units = rank_units(config, layout, schedule, layers, pipeline)
    shards = int(layout.data) // config.parallel.replicas if config.parallel.zero else 1
    zero = config.parallel.zero
    byte = WIDTHS[config.precision.dtype]
    wide = max(byte, 4)
    gradient = 2 if config.precision.reduce == "bf16" else wide
    buckets = plan_buckets(units, config.parallel.bucket_mb * 2**20, gradient, zero, shards)
    shared = sum(bucket.size // shards for bucket in buckets)
    resident = sum(bucket.size for bucket in buckets if bucket.resident)
    separate = sum(b.size // shards for b in buckets if byte != wide or not b.resident)
    whole = sum(bucket.size for bucket in buckets)
    moments = 2 * shared * wide
    offload = config.memory.offload == "optimizer"
    host = moments + shared * wide if offload else 0
    absent = sum(b.size // shards * byte for b in buckets if not b.resident) if offload else 0
    together = config.model.tied_embeddings and {0, final} <= set(numbers)
    cpu = config.run.device == "cpu"
    widths = byte, gradient
    division = Division(units, buckets, zero, shards, schedule.microbatches, widths, cpu, together)
    peak = Step(schedule, pipeline, stages, units, division).peak
    # The optimizer takes one bucket's gradients after the other in the format of its moments, each while it
    # still has those before.
    shares = [
        bucket.size // shards * wide for bucket in sorted(buckets, key=lambda bucket: min(bucket.places))
    ]
    update = max(map(sum, pairwise([0, *shares]))) if gradient < wide else 0
    if update > peak.total:
        peak = Peak(Counter(), update, "update")
    return MemoryPlan(
        rank=rank,
        parameters=resident * byte + absent,
        gradients=gradient * (whole if zero < 2 else shared),
        master=0 if offload else separate * wide,
        optimizer=0 if offload else moments,
        activations={kind: size for kind, size in peak.kept.items() if size},
        buffers=peak.transient + division.pooled,
        host=host,
        action=peak.action,
    )


def largest(config: Config, layout: Layout, schedule: Schedule, layers: tuple[range, ...]) -> MemoryPlan:
    """Of all ranks, one that needs the most: ranks differ by their pipeline coordinate only."""
    return max(per_pipeline_rank(config, layout, schedule, layers), key=lambda plan: plan.total)


def per_pipeline_rank(
    config: Config, layout: Layout, schedule: Schedule, layers: tuple[range, ...]
) -> list[MemoryPlan]:
    """One rank's plan for every pipeline coordinate."""
    ranks = next(layout.iter_groups("pipeline"))
    return [predict(config, layout, schedule, layers, rank) for rank in ranks]


def rank_units(
    config: Config, layout: Layout, schedule: Schedule, layers: tuple[range, ...], pipeline: int
) -> list[list[Unit]]:
    """The units of each of a pipeline rank's stages."""
    model = with_positions(config)
    owners, final = schedule.placement, schedule.stages - 1
    tied = "own" if not model.tied_embeddings else "here" if owners[0] == owners[final] else "copy"
    sequence = config.parallel.sequence and layout.tensor > 1
    return [
        stage_units(model, layout.tensor, sequence, len(layers[n]), n == 0, n == final, tied)
        for n in schedule.stages_of(pipeline)
    ]


def with_positions(config: Config) -> ModelSettings:
    """The model settings with ``max_positions: auto`` resolved to ``data.sequence``."""
    if config.model.max_positions != "auto":
        return config.model
    return config.model.model_copy(update={"max_positions": config.data.sequence})
