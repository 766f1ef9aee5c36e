"""Bytes a rank will need, by component, before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from hexad.config import Config
from hexad.model.inventory import ModelInventory, StageSpec
from hexad.model.recompute_inventory import Recompute
from hexad.optim.schedule import MOMENTS
from hexad.parallel.data.bucket_plan import BucketPlan, HeldParameter, plan_buckets, state_shards
from hexad.parallel.inventory import Execution, Grid, Position, tensor_positions
from hexad.parallel.pipeline.schedule import Shortened, shortened
from hexad.parallel.pipeline.transfers import Order, transfers
from hexad.topology.layout import Layout

from . import Resolved
from .step import Peak, RankStep, StageMemory, StateBuffers


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank when it needs the most.

    Attributes:
        rank: global number.
        parameters: in the model's format.
        gradients: this rank keeps between microbatches.
        master: wide values that the optimizer updates, where they are not the parameters themselves.
        optimizer: the moments of every parameter that this rank updates.
        activations: by kind (see :data:`hexad.parallel.inventory.Kept`).
        buffers: what is needed for a moment (communication, gradients of activations, slices of logits), and
            weights in 8 bits, which are kept.
        host: of the above, in the host's memory (``memory.offload``), not part of the total.
        action: what the rank does at the peak.
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
        """The bytes of weights, gradients and optimizer: without activations and buffers."""
        return self.parameters + self.gradients + self.master + self.optimizer

    @property
    def total(self) -> int:
        """The peak on the device, in bytes."""
        return self.state + sum(self.activations.values()) + self.buffers

    def as_tree(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {**asdict(self), "total": self.total}


class RankParts(NamedTuple):
    """The parts that a pipeline rank holds, whatever its sharding and recompute.

    Attributes:
        stages: by number.
        held: parameters, in the order of the model.
    """

    stages: dict[int, StageSpec]
    held: list[HeldParameter]

    @classmethod
    def of(cls, resolved: Resolved, pipeline: int) -> RankParts:
        """The parts of a pipeline rank."""
        stages = rank_stages(resolved, pipeline)
        return cls(stages, rank_parameters(stages, resolved.layout))


def predict(
    resolved: Resolved, rank: int, load: float | None = None, parts: RankParts | None = None
) -> MemoryPlan:
    """The peak memory of a rank (by its global number); ``load`` as in :func:`execution`; ``parts`` of the
    rank, if they are at hand."""
    short = shortened(resolved.plan.schedule)
    return _predict(resolved, rank, short, transfers(short.schedule, resolved.plan.costs), load, parts)


def _predict(
    resolved: Resolved,
    rank: int,
    short: Shortened,
    orders: Sequence[Order],
    load: float | None = None,
    parts: RankParts | None = None,
) -> MemoryPlan:
    """Predict memory (:func:`predict`) from the schedule with a short steady state, and the transfers of all
    pipeline ranks."""
    config, layout = resolved.config, resolved.layout
    pipeline = layout.coordinates(rank)["pipeline"]
    run = execution(config, layout, load)
    stages, parameters = parts or RankParts.of(resolved, pipeline)
    buckets = rank_buckets(config, layout, parameters)
    numbers = {entry.parameter.name: number for number, entry in enumerate(parameters)}
    recompute = Recompute.from_settings(config.memory)
    split = short.schedule.split_backward
    memory = {number: StageMemory(stage, run, recompute, numbers, split) for number, stage in stages.items()}
    buffers = StateBuffers(buckets, run, layout.state_ranks)
    peak = RankStep(short.schedule, pipeline, orders[pipeline], memory, buckets, buffers).peak
    peak = max(peak, _update(buckets, run, config), key=lambda peak: peak.total)
    if peak.position is None:
        action = "update"
    else:
        action = str(resolved.plan.schedule.ranks[pipeline][short.original(pipeline, peak.position)])
    rounded = sum(stage.rounded(run) for stage in stages.values())
    return _plan(rank, config, run, buckets, peak, action, buffers.pooled + rounded)


def _plan(
    rank: int, config: Config, run: Execution, buckets: list[BucketPlan], peak: Peak, action: str, beside: int
) -> MemoryPlan:
    """The peak, at ``action``, beside the state; ``beside``: bytes of buffers that are there all the time."""
    trained = [bucket for bucket in buckets if not bucket.frozen]
    sharded = sum(bucket.shard_size for bucket in trained)
    resident = sum(bucket.size for bucket in buckets if bucket.resident)
    separate = sum(bucket.shard_size for bucket in trained if run.byte != run.wide or not bucket.resident)
    moments = len(MOMENTS) * sharded * run.wide
    offload = config.memory.offload == "optimizer"
    # Of absent parameters, shards in the model's format: where no master values are on the device.
    absent = [bucket for bucket in buckets if not bucket.resident and (bucket.frozen or offload)]
    return MemoryPlan(
        rank=rank,
        parameters=(resident + sum(bucket.shard_size for bucket in absent)) * run.byte,
        gradients=run.gradient * sum(b.size if b.keeps_gradients else b.shard_size for b in trained),
        master=0 if offload else separate * run.wide,
        optimizer=0 if offload else moments,
        activations={kind: size for kind, size in peak.kept.items() if size},
        buffers=peak.transient + beside,
        host=moments + sharded * run.wide if offload else 0,
        action=action,
    )


def _update(buckets: list[BucketPlan], run: Execution, config: Config) -> Peak:
    """The optimizer takes one bucket's gradients after the other in the format of its moments, each while it
    still has those before; compiled, on the device, as they are."""
    shards = [bucket.shard_size * run.wide for bucket in buckets if not bucket.frozen]
    widened = run.gradient < run.wide and (config.memory.offload == "optimizer" or not _compiled(config))
    most = max(map(sum, pairwise([0, *shards])), default=0) if widened else 0
    return Peak(Counter(), most, None)


def _compiled(config: Config) -> bool:
    """Whether pointwise functions are compiled."""
    chosen = config.run.compile
    return chosen in ("pointwise", "full") or not (config.run.device == "cpu" or chosen == "none")


def execution(config: Config, layout: Layout, load: float | None = None) -> Execution:
    """How a rank computes a microbatch; ``load``: rows of its experts relative to an even load, by default as
    many as buffers of a static size hold, an even load on a CPU."""
    precision, moe = config.precision, config.model.moe
    byte, cpu = precision.width, config.run.device == "cpu"
    if load is None:
        load = moe.room if moe is not None and not cpu and layout.expert * layout.expert_tensor > 1 else 1.0
    return Execution(
        config.batch.micro,
        config.data.sequence,
        layout.tensor,
        config.parallel.sequence_parallel,
        byte,
        2 if precision.accumulate == "bf16" else max(byte, 4),
        2 if precision.reduce == "bf16" else max(byte, 4),
        config.parallel.zero < 2,
        precision.dtype == "fp8",
        precision.fp8_weight_gradients,
        precision.dtype == "fp8" and config.parallel.zero < 3 and config.run.compile != "full",
        cpu,
        _compiled(config) and not precision.exact,
        config.data.documents == "isolate",
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        load=load,
        ulysses=config.parallel.ulysses,
        gathers=config.parallel.context_method == "all_gather",
        exact=precision.exact,
        chunks=1 if config.parallel.tensor_chunks == "auto" else config.parallel.tensor_chunks,
    )


def rank_stages(resolved: Resolved, pipeline: int) -> dict[int, StageSpec]:
    """The stages of a pipeline rank, by number, ascending."""
    config, plan = resolved.config, resolved.plan
    tensor, sequence = resolved.layout.tensor, config.parallel.sequence_parallel
    whole = ModelInventory(config.model, sequence, tensor)
    return whole.stages(plan.layers, plan.schedule.placement, pipeline)


def rank_parameters(stages: dict[int, StageSpec], layout: Layout) -> list[HeldParameter]:
    """The parameters of a pipeline rank, in the order of the model; any rank along the other axes."""
    copies = next(iter(stages.values())).model.kv_copies
    positions = {
        **tensor_positions(Position(0, layout.tensor), copies),
        "expert": Position(0, layout.expert),
        "expert_tensor": Position(0, layout.expert_tensor),
    }
    tied = any(stage.head is not None and stage.head.tied == "here" for stage in stages.values())
    return [
        HeldParameter.of(number, parameter, positions, 2 if tied and parameter.unit == "embedding" else 1)
        for number, stage in stages.items()
        for parameter in stage.parameters
    ]


def rank_buckets(config: Config, layout: Layout, parameters: list[HeldParameter]) -> list[BucketPlan]:
    """The buckets of a pipeline rank."""
    parallel = config.parallel
    shards: dict[Grid, int] = {
        grid: state_shards(ranks, parallel.zero, parallel.replicas)
        for grid, ranks in layout.state_ranks.items()
    }
    gradient = execution(config, layout).gradient
    return plan_buckets(parameters, float(parallel.bucket_mb) * 2**20, gradient, parallel.zero, shards)


def largest(ranks: Sequence[MemoryPlan]) -> MemoryPlan:
    """The plan of a rank that needs the most."""
    return max(ranks, key=lambda plan: plan.total)


def per_pipeline_rank(
    resolved: Resolved, load: float | None = None, parts: Sequence[RankParts] | None = None
) -> list[MemoryPlan]:
    """One rank's plan for every pipeline coordinate; along the other axes ranks do not differ. ``load`` as in
    :func:`execution`; ``parts`` of all pipeline ranks, if they are at hand."""
    short = shortened(resolved.plan.schedule)
    orders = transfers(short.schedule, resolved.plan.costs)
    ranks = next(resolved.layout.iter_groups("pipeline"))
    all_parts = [None] * len(ranks) if parts is None else parts
    return [
        _predict(resolved, rank, short, orders, load, rank_parts)
        for rank, rank_parts in zip(ranks, all_parts)
    ]


def expert_loads(resolved: Resolved) -> dict[str, int]:
    """The largest total of any rank by the load of its experts: even, as large as buffers of a static size
    hold (``moe.allowance``), and with every token of the group; empty for models without experts."""
    moe = resolved.config.model.moe
    if moe is None:
        return {}
    loads = {"even": 1.0, "allowance": moe.room, "worst": inf}
    return {name: largest(per_pipeline_rank(resolved, load)).total for name, load in loads.items()}
