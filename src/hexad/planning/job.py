"""The facts on which a step's time depends: a model in a layout, and how ranks compute it. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hexad.config import Config
from hexad.model.inventory import ModelInventory, StageSpec
from hexad.model.recompute_inventory import Recompute
from hexad.optim.schedule import update_bytes
from hexad.parallel.data.bucket_plan import state_shards
from hexad.parallel.inventory import Execution, Grid, Position, tensor_positions
from hexad.parallel.pipeline.schedule import Schedule
from hexad.topology.hardware.constants import Format
from hexad.topology.layout import Layout

from . import Resolved
from .memory import execution


@dataclass(frozen=True)
class Job:
    """A step of training.

    Attributes:
        model: its specifications.
        layout: of all ranks.
        run: how a rank computes a microbatch.
        recompute: what layers recompute.
        schedule: of the pipeline.
        stages: of all pipeline ranks, by number.
        elements: of a rank's shards of each stage's trained parameters, by grid.
        zero: level of sharding.
        replicas: of the sharded state.
        bucket: bytes of gradients that are reduced together.
        update: bytes moved for each parameter that a rank updates.
        offload: the optimizer's state is in the host's memory.
        attention_again: attention's forward kernel is repeated in the backward pass.
        repeated: part of the forward pass's products that the backward pass repeats, besides ``recompute``.
        eight: the format of products in 8 bits (or fewer).
        eight_attention: fused attention computes in 8 bits, too.
    """

    model: ModelInventory
    layout: Layout
    run: Execution
    recompute: Recompute
    schedule: Schedule
    stages: Mapping[int, StageSpec]
    elements: Mapping[int, Mapping[Grid, int]]
    zero: int = 0
    replicas: int = 1
    bucket: float = 25 * 2**20
    update: float = 28.0
    offload: bool = False
    attention_again: bool = False
    repeated: float = 0.0
    eight: Format = "fp8"
    eight_attention: bool = False

    @classmethod
    def of(cls, resolved: Resolved) -> Job:
        """The job that a resolved configuration describes."""
        config, layout, plan = resolved.config, resolved.layout, resolved.plan
        parallel, run = config.parallel, execution(resolved.config, resolved.layout)
        model = ModelInventory(config.model, parallel.sequence_parallel, layout.tensor)
        return cls(
            model,
            layout,
            run,
            Recompute.from_settings(config.memory),
            plan.schedule,
            *stages_of(model, layout, plan.layers, plan.schedule),
            parallel.zero,
            parallel.replicas,
            float(parallel.bucket_mb) * 2**20,
            _update_bytes(config, run),
            config.memory.offload == "optimizer",
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        microbatches = self.schedule.microbatches
        return self.run.sequences * self.run.length * microbatches * self.layout.degrees["data"]

    def shards(self, grid: Grid) -> int:
        """Ranks over which state is sharded."""
        return state_shards(self.layout.state_ranks[grid], self.zero, self.replicas)


def stages_of(
    model: ModelInventory, layout: Layout, layers: Sequence[range], schedule: Schedule
) -> tuple[dict[int, StageSpec], dict[int, dict[Grid, int]]]:
    """All stages of a schedule by number, and elements of a rank's shards of their trained parameters."""
    stages: dict[int, StageSpec] = {}
    for rank in range(schedule.pipeline):
        stages |= model.stages(layers, schedule.placement, rank)
    stages = dict(sorted(stages.items()))
    positions = {
        **tensor_positions(Position(0, layout.tensor), model.kv_copies),
        "expert": Position(0, layout.expert),
        "expert_tensor": Position(0, layout.expert_tensor),
    }
    counts: dict[Any, Counter[Grid]] = {}  # layers of one kind are equal
    elements: dict[int, dict[Grid, int]] = {}
    for number, stage in stages.items():
        total: Counter[Grid] = Counter({"dense": 0, "expert": 0})
        for part in (stage.embedding, stage.positions, *stage.blocks, stage.norm, stage.head):
            if part is not None and part not in counts:
                counts[part] = Counter()
                for parameter in part.parameters:
                    size = 0 if parameter.frozen else parameter.elements(positions)
                    counts[part][parameter.weights[0].grid] += size
            if part is not None:
                total.update(counts[part])
        elements[number] = dict(total)
    return stages, elements


def _update_bytes(config: Config, run: Execution) -> float:
    copied, clipped = run.byte != run.wide and config.parallel.zero < 3, config.optimizer.clip > 0
    return update_bytes(run.byte, run.gradient, run.wide, copied, run.compiled, scaled=clipped)
