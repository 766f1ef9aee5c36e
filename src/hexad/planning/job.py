"""What a step's time depends on: a model in a layout, and how ranks compute it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        layers: of every stage.
        zero: level of sharding.
        replicas: of the sharded state.
        bucket: bytes of gradients that are reduced together.
        update: bytes moved for each parameter that a rank updates.
        offload: the optimizer's state is in the host's memory.
        attention_again: attention's forward kernel is repeated in the backward pass.
        eight: the format of products in 8 bits (or fewer).
    """

    model: ModelInventory
    layout: Layout
    run: Execution
    recompute: Recompute
    schedule: Schedule
    layers: tuple[range, ...]
    zero: int = 0
    replicas: int = 1
    bucket: float = 25 * 2**20
    update: float = 28.0
    offload: bool = False
    attention_again: bool = False
    eight: Format = "fp8"

    @classmethod
    def of(cls, resolved: Resolved) -> Job:
        """The job that a resolved configuration describes."""
        config, layout, plan = resolved.config, resolved.layout, resolved.plan
        parallel, run = config.parallel, execution(resolved.config, resolved.layout)
        return cls(
            ModelInventory(config.model, parallel.sequence_parallel, layout.tensor),
            layout,
            run,
            Recompute.from_settings(config.memory),
            plan.schedule,
            plan.layers,
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

    @cached_property
    def stages(self) -> dict[int, StageSpec]:
        """All stages, by number."""
        stages: dict[int, StageSpec] = {}
        for rank in range(self.layout.pipeline):
            stages |= self.model.stages(self.layers, self.schedule.placement, rank)
        return stages

    def elements(self, stage: StageSpec, trained: bool = True) -> dict[Grid, int]:
        """Elements of a rank's shard of a stage's parameters, by grid; ``trained``: of those only."""
        counts: dict[Grid, int] = {"dense": 0, "expert": 0}
        for parameter in stage.parameters:
            if not (trained and parameter.frozen):
                counts[parameter.weights[0].grid] += parameter.elements(self._positions)
        return counts

    @cached_property
    def _positions(self) -> dict[str, Position]:
        layout, copies = self.layout, self.model.kv_copies
        return {
            **tensor_positions(Position(0, layout.tensor), copies),
            "expert": Position(0, layout.expert),
            "expert_tensor": Position(0, layout.expert_tensor),
        }

    def shards(self, grid: Grid) -> int:
        """Ranks over which state is sharded."""
        return state_shards(self.layout.state_ranks[grid], self.zero, self.replicas)


def _update_bytes(config: Config, run: Execution) -> float:
    copied, clipped = run.byte != run.wide and config.parallel.zero < 3, config.optimizer.clip > 0
    return update_bytes(run.byte, run.gradient, run.wide, copied, run.compiled, scaled=clipped)
