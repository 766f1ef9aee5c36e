"""Bytes a rank will need, by component, before anything is started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hexad.config import Config
from hexad.config.schema import ModelSettings
from hexad.parallel.pipeline.schedule import Schedule
from hexad.topology.layout import Layout

from .activations import WIDTHS, Kept, Stage
from .parameters import PlannedBucket, Unit, plan_buckets, stage_units

_IN_FLIGHT = 2  # reductions under way, as hexad.parallel.data.reducer has them


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
    # On a CPU a reduction receives into a buffer as large as the bucket.
    parts = config.run.device == "cpu" and zero >= 1 and shards > 1
    largest = max((bucket.size for bucket in buckets), default=0) * gradient if parts else 0
    kept, transient, action = _peak(schedule, pipeline, stages, largest, zero)
    heads = 0
    if zero >= 2 and shards > 1 and final in stages:
        # Forward passes in a row each leave a gradient of the head, whose bucket is the first to be complete.
        heads = (min(_forwards(schedule, pipeline), 1 + _IN_FLIGHT) - 1) * buckets[0].size * gradient
    return MemoryPlan(
        rank=rank,
        parameters=resident * byte + absent,
        gradients=gradient * (whole if zero < 2 else shared),
        master=0 if offload else separate * wide,
        optimizer=0 if offload else moments,
        activations={kind: size for kind, size in kept.items() if size},
        buffers=transient + heads + _communication(buckets, zero, shards, gradient, byte),
        host=host,
        action=action,
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


def _communication(buckets: list[PlannedBucket], zero: int, shards: int, gradient: int, byte: int) -> int:
    """Buffers that buckets take turns with in stages 2 and 3, never given back.

    A gradient's buffer is in use until its reduction, of which ``_IN_FLIGHT`` may be under way, is over, also
    while the next microbatch begins; in stage 3 a unit's weights and the next one's are there.
    """
    if zero < 2:
        return 0
    window = 1 + (_IN_FLIGHT if shards > 1 else 0)
    total = 0
    for layout, bucket in {bucket.layout: bucket for bucket in buckets}.items():
        same = [other.layout == layout for other in (*buckets, *buckets[: window - 1])]
        total += bucket.size * gradient * max(sum(same[i : i + window]) for i in range(len(same)))
        if not bucket.resident:
            total += bucket.size * byte * max(sum(same[i : i + 2]) for i in range(len(same)))
    return total


def _peak(
    schedule: Schedule, pipeline: int, stages: dict[int, Stage], parts: int, zero: int
) -> tuple[Kept, int, str]:
    """(kept by kind, transient bytes, action) where their sum is largest, walking the rank's actions.

    ``parts`` is what a reduction of gradients receives into. From stage 2 on some are under way from the
    first microbatch's backward pass on, and the head's in ``F``; in stage 1 only in the last backward pass.
    """
    held: Kept = Counter()
    best: tuple[Kept, int, str] = (Counter(), 0, "")
    # What was sent may still be on its way, and what comes next may be there already.
    streams = 2 * len(stages) if schedule.pipeline > 1 else 0
    moving = streams * next(iter(stages.values())).sizes.stream
    arriving = 0
    for action in schedule.ranks[pipeline]:
        stage = stages[action.stage]
        if action.kind == "F":
            held.update(stage.kept())
            transient = stage.forward_peak()
            if stage.last and zero >= 2 and not arriving:
                transient += parts * min(_forwards(schedule, pipeline), _IN_FLIGHT)
        elif action.kind == "W":
            transient = stage.sizes.gathered
        else:
            transient = stage.backward_peak(split=action.kind == "B") + (parts if zero == 1 else 0)
        transient += moving + arriving
        if sum(held.values()) + transient > sum(best[0].values()) + best[1]:
            best = (Counter(held), transient, str(action))
        if action.kind in ("BW", "W") and zero >= 2:
            arriving = parts
        if action.kind in ("B", "BW"):
            held.subtract(stage.kept())
        if action.kind == "B":
            held.update(stage.products())
        if action.kind == "W":
            held.subtract(stage.products())
    return best


def _forwards(schedule: Schedule, pipeline: int) -> int:
    """Most forward passes of the last stage that this rank makes in a row."""
    longest = current = 0
    for action in schedule.ranks[pipeline]:
        if action.kind != "F":
            current = 0
        elif action.stage == schedule.stages - 1:
            current += 1
            longest = max(longest, current)
    return longest
