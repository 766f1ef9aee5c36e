"""Bytes that a rank sends over each axis in a training step, before anything is started: what the ledger of
its mesh will count (``Mesh.sent_bytes``). No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hexad.model.block_inventory import BlockSpec
from hexad.model.inventory import ModelInventory
from hexad.model.recompute_inventory import Recompute, RecomputedParts
from hexad.parallel.context.rounds import rounds
from hexad.parallel.context.slice import Slicing
from hexad.parallel.data.bucket_plan import BucketPlan, state_shards
from hexad.parallel.inventory import Collective, Execution
from hexad.parallel.pipeline.schedule import Action
from hexad.topology.sent import sent_bytes

from . import Resolved
from .memory import execution, rank_buckets, rank_parameters, rank_stages
from .step import StageGathers

Documents = tuple[int, ...]
"""First tokens of a microbatch's documents, and its number of tokens."""
AXES = ("tensor", "context", "pipeline", "data", "expert")
"""Axes that traffic is counted for."""
_FLOAT64, _INT32 = 8, 4
_COUNTED = {
    "ring": "context",
    "ulysses": "context",
    "kv_copies": "tensor",
    "expert_tensor": "tensor",
    "gradient": "data",
    "shards": "data",
    "replicas": "data",
    "ties": "pipeline",
}
"""The axis whose traffic a part of an axis, or a product of axes, counts as."""


@dataclass(frozen=True)
class StepValues:
    """Values of one rank's step on which bytes depend, besides the configuration.

    Attributes:
        documents: of every microbatch of its data rank; None: each sequence is one document.
        rows: by layer and microbatch, how many rows the rank sends to experts of other ranks, and how many it
            receives from these, where the host reads these counts (``alltoall`` on a CPU); layers that are
            missing have an even load.
        imposed: experts are imposed on its tokens (``Microbatch.experts``).
        updated: the update is made: the norm is finite, and there is no veto.
        judged: the loss is compared with the limit of ``faults.spike``.
    """

    documents: Sequence[Documents | None] | None = None
    rows: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    imposed: bool = False
    updated: bool = True
    judged: bool = False


def predicted_traffic(resolved: Resolved, rank: int, values: StepValues = StepValues()) -> dict[str, int]:
    """Bytes that a rank, by its global number, sends in a training step over each of :data:`AXES`.

    Exact, given the ``values`` of the step: without them every sequence is one document, experts have an even
    load, and the update is made.
    """
    return _RankTraffic(resolved, rank, values).total()


class _RankTraffic:
    """Adds up what a rank sends in a step."""

    def __init__(self, resolved: Resolved, rank: int, values: StepValues) -> None:
        config, layout = resolved.config, resolved.layout
        self.resolved, self.values = resolved, values
        self.config, self.layout, self.places = config, layout, layout.coordinates(rank)
        self.schedule, self.pipeline = resolved.plan.schedule, self.places["pipeline"]
        self.run = replace(execution(config, layout), imposed=values.imposed)
        self.recompute = Recompute.from_settings(config.memory)
        self.stages = rank_stages(resolved, self.pipeline)
        self.held = rank_parameters(self.stages, layout)
        self.buckets = rank_buckets(config, layout, self.held)
        self.trained = [bucket for bucket in self.buckets if not bucket.frozen]
        self.actions = self.schedule.ranks[self.pipeline]
        degrees = layout.degrees
        self.sizes = {
            **{axis: degrees[axis] for axis in ("tensor", "context", "pipeline", "expert_tensor")},
            "expert": degrees["expert"] * degrees["expert_tensor"],
            "ring": self.run.ring,
            "ulysses": self.run.ulysses,
            "gradient": layout.gradient_ranks,
            "kv_copies": next(iter(self.stages.values())).model.kv_copies,
            "ties": len({self.schedule.placement[0], self.schedule.placement[-1]}),
        }
        self.sent: Counter[str] = Counter()
        self._keys: dict[Documents | None, tuple[int, int]] = {}

    def total(self) -> dict[str, int]:
        """Bytes by axis."""
        self._layers()
        self._messages()
        for bucket in self.trained:
            self._reduced(bucket)
            self._published(bucket)
        self._gathered()
        self._agreed()
        return {axis: self.sent[axis] for axis in AXES}

    def _send(self, axis: str, operation: str, nbytes: int, times: int = 1, size: int | None = None) -> None:
        size = self.sizes[axis] if size is None else size
        self.sent[_COUNTED.get(axis, axis)] += times * sent_bytes(operation, size, nbytes)

    # Layers

    def _layers(self) -> None:
        """Add what stages send for every microbatch."""
        memo: dict[tuple[object, ...], Counter[str]] = {}
        for action in self.actions:
            run = self._execution_of(action.microbatch)
            parts: list[tuple[object, ...]] = [(action.kind, action.stage, run, None)]
            parts += self._layers_of(action, run)
            for key in parts:
                if key not in memo:
                    memo[key] = self._sent_by(*key)  # type: ignore[arg-type]
                self.sent.update(memo[key])

    def _layers_of(self, action: Action, run: Execution) -> Iterator[tuple[object, ...]]:
        """The values on which the bytes of each layer depend in an action."""
        stage, rows = self.stages[action.stage], self.values.rows
        for place, (number, layer) in enumerate(zip(stage.layers, stage.recomputing(self.recompute))):
            if action.kind == "F" or place >= stage.unreached:
                routed = rows[number][action.microbatch] if number in rows else None
                how = run if routed is None else replace(run, routed=routed)
                yield action.kind, action.stage, how, (*layer, stage.reaches(place))

    def _sent_by(
        self, kind: str, stage: int, run: Execution, layer: tuple[BlockSpec, RecomputedParts, bool] | None
    ) -> Counter[str]:
        """Bytes by axis of an action of a layer; None: of what a stage has besides layers."""
        if layer is None:
            parts = [self.stages[stage].before_layers(run), self.stages[stage].after_layers(run)]
        else:
            block, parts_of_layer, reached = layer
            parts = [block.operations(run, parts_of_layer, kind in ("B", "W"), reached)]
        sent: Counter[str] = Counter()
        for op in (op for part in parts for op in part.of(kind) if isinstance(op, Collective)):
            sent[_COUNTED.get(op.axis, op.axis)] += sent_bytes(op.operation, self.sizes[op.axis], op.nbytes)
        return sent

    def _execution_of(self, microbatch: int) -> Execution:
        """How the rank computes a microbatch, with the keys that it sends and receives."""
        if self.run.ring == 1 or self.run.gathers:
            return self.run
        documents = None if self.values.documents is None else self.values.documents[microbatch]
        if documents not in self._keys:
            model, slicing = self.config.model, Slicing.of(self.config.parallel, self.config.model)
            ring = slicing.divided(self.run.sequences, self.run.length, documents).grouped(self.run.ulysses)
            place = self.places["context"] // self.run.ulysses
            of_rank = rounds(ring, place, model.sliding_window, contiguous=model.attention_dropout > 0)
            self._keys[documents] = sum(r.sent for r in of_rank), sum(r.received for r in of_rank)
        return replace(self.run, keys=self._keys[documents])

    def _messages(self) -> None:
        """Add hidden states and their gradients that go to other pipeline ranks."""
        messages = sum(self.schedule.sent(action) is not None for action in self.actions)
        self._send("pipeline", "exchange", self.run.stream(self.config.model.hidden), messages)

    # State

    def _reduced(self, bucket: BucketPlan) -> None:
        """Add a bucket's gradients: summed over the ranks with other tokens, over those that compute other
        parts, and over those that use the same values otherwise."""
        run, replicas = self.run, self.layout.state_ranks[bucket.traits.grid] // bucket.shards
        times = bucket.rounds(self.schedule.microbatches)
        self._send("shards", "reduce_scatter", bucket.size * run.reduced, times, bucket.shards)
        self._send("replicas", "all_reduce", bucket.shard_size * run.reduced, size=replicas)
        for axis in bucket.traits.partial:
            self._send(axis, "all_reduce", bucket.shard_size * run.gradient)
        if bucket.traits.tied:
            self._send("ties", "all_reduce", bucket.shard_size * run.gradient)

    def _published(self, bucket: BucketPlan) -> None:
        """Add the updated values of a bucket that is resident."""
        if self.values.updated and bucket.resident:
            self._send("shards", "all_gather", bucket.size * self.run.byte, size=bucket.shards)

    def _gathered(self) -> None:
        """Add the values that layers gather (ZeRO 3)."""
        if all(bucket.resident for bucket in self.buckets):
            return
        gathers, numbers = _Gathers(), {entry.parameter.name: n for n, entry in enumerate(self.held)}
        stages = {
            number: StageGathers(stage, numbers, self.buckets, gathers)
            for number, stage in self.stages.items()
        }
        for action in self.actions:
            stage = stages[action.stage]
            if action.kind == "F":
                stage.forward()
                stage.end_forward()
            elif action.kind != "W":
                stage.backward()
        for number, times in gathers.times.items():
            bucket = self.buckets[number]
            self._send("shards", "all_gather", bucket.size * self.run.byte, times, bucket.shards)

    # All ranks

    def _agreed(self) -> None:
        """Add the gradient norm, and sums of losses and counts."""
        zero, replicas = self.config.parallel.zero, self.config.parallel.replicas
        wide, model = self.run.wide, ModelInventory(self.config.model)
        for grid in model.grids:
            shards = state_shards(self.layout.state_ranks[grid], zero, replicas)
            self._send("shards", "all_reduce", wide, size=shards)
            for axis in ("tensor",) if grid == "dense" else ("expert_tensor", "expert"):
                self._send(axis, "all_reduce", wide, size=self.layout.degree(axis))
        for axis in ("pipeline", "tensor", "pipeline", "gradient"):
            self._send(axis, "all_reduce", wide)
        sums = len(model.losses) + model.statistics
        self._send("tensor", "all_reduce", sums * _FLOAT64)
        for axis in ("gradient", "pipeline"):
            self._send(axis, "all_reduce", (1 + sums) * _FLOAT64)
        if self.values.judged:
            for axis in ("tensor", "pipeline", "gradient"):
                self._send(axis, "all_reduce", _INT32)


class _Gathers:
    """Counts how often each bucket is gathered."""

    def __init__(self) -> None:
        self.times: Counter[int] = Counter()
        self._here: set[int] = set()

    def fetch(self, bucket: int) -> None:
        """Count a gather, unless the values are here."""
        if bucket not in self._here:
            self._here.add(bucket)
            self.times[bucket] += 1

    def free(self, bucket: int) -> None:
        self._here.discard(bucket)
