"""Layouts that there are for a model on a cluster, and their configurations. No torch.

They are chosen in three steps: what a layer's kernels depend on (:class:`LayerLayout`), what the schedule
and the state depend on (:class:`PipelineLayout`), and the rest (:class:`Variant`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Any, NamedTuple

from hexad.config import Config, ConfigError
from hexad.parallel.pipeline.schedules.published import V_SHAPED
from hexad.topology.layout import DEFAULT_ORDER, Layout

from .checks import check_config
from .memory import RankParts
from .resolve import Resolved, resolve

_SHORTEST = 1024
"""Tokens of a sequence that a context rank has at the least."""
_WIDEST = 8
"""Tensor ranks at most."""
_OFFLOAD = {False: "none", True: "optimizer"}
RECOMPUTES = ("none", "selective", "full")
"""Kinds of recompute, in the order of what they compute again."""


class LayerLayout(NamedTuple):
    """The settings on which a layer's kernels depend."""

    tensor: int
    context: int
    method: str
    expert: int
    expert_tensor: int
    micro: int


class PipelineLayout(NamedTuple):
    """The settings on which a schedule depends, besides the microbatches; the sharding of state, and whether
    the optimizer's is in the host's memory."""

    pipeline: int
    virtual: int
    schedule: str
    zero: int
    offload: bool = False
    replicas: int = 1


class Variant(NamedTuple):
    """The settings that do not change the schedule.

    Attributes:
        order: of ranks.
        recompute: one of :data:`RECOMPUTES`.
        layers: of each stage that do so; None for all.
    """

    order: str
    recompute: str = "none"
    layers: int | None = None


@dataclass
class Choices:
    """The layouts of a job.

    Attributes:
        base: the configuration whose other settings all layouts have.
        world: GPUs.
        domain: GPUs that share the fastest link.
        fixed: settings that are not searched: ``parallel.tensor`` and the like.
        rejected: how many layouts are not possible, by reason.
        refused: why the first of them was that is refused by its settings alone.
    """

    base: Config
    world: int
    domain: int
    fixed: frozenset[str] = frozenset()
    rejected: Counter[str] = field(default_factory=Counter)
    refused: ConfigError | None = None
    _layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict, repr=False)
    _parts: dict[tuple[Any, ...], RankParts] = field(default_factory=dict, repr=False)

    def _values(self, name: str, values: list[Any]) -> list[Any]:
        """The values of a setting of ``parallel``: one, if it is fixed."""
        return [getattr(self.base.parallel, name)] if f"parallel.{name}" in self.fixed else values

    def refuse(self, error: ConfigError) -> None:
        """Count a layout that is refused."""
        self.rejected[f"divisibility: {error.field}"] += 1
        self.refused = self.refused or error

    def grids(self) -> Iterator[LayerLayout]:
        """The grids that fit the model and the cluster, with some pipeline."""
        model, sequence = self.base.model, self.base.data.sequence
        tensors = self._values("tensor", _powers(min(self.domain, _WIDEST, model.heads)))
        contexts = self._values("context", _powers(max(1, sequence // _SHORTEST)))
        methods = self._values("context_method", ["ring", "ulysses", "all_gather"])
        experts = self._values("expert", _divisors(model.moe.experts) if model.moe else [1])
        micros = [self.base.batch.micro] if "batch.micro" in self.fixed else [1, 2, 4, 8]
        for tensor, context, expert, micro in product(tensors, contexts, experts, micros):
            for method in methods if context > 1 else methods[:1]:
                for expert_tensor in self._expert_tensors(tensor):
                    grid = LayerLayout(tensor, context, method, expert, expert_tensor, micro)
                    if self._possible(grid):
                        yield grid

    def _expert_tensors(self, tensor: int) -> list[int]:
        values = [1] if self.base.model.moe is None or tensor == 1 else [1, tensor]
        return self._values("expert_tensor", values)

    def _possible(self, grid: LayerLayout) -> bool:
        """Whether the degrees fit the model and the cluster, with some pipeline."""
        dense, experts = grid.tensor * grid.context, grid.expert * grid.expert_tensor
        if self.world % dense or self.world % experts:
            self.rejected["degrees that do not divide the GPUs"] += 1
            return False
        try:
            config = self.config(grid, PipelineLayout(1, 1, "1f1b", 0))
            check_config(config, Layout.from_settings(config.parallel, self.world))
        except ConfigError as error:
            if error.field != "batch.global":  # which depends on the pipeline
                self.refuse(error)
                return False
        return True

    def pipelines(self, grid: LayerLayout) -> Iterator[PipelineLayout]:
        """The pipelines of a grid that fit the model, the batch and the cluster."""
        layers, whole = self.base.model.layers, self.base.batch.global_
        for pipeline in self._values("pipeline", _divisors(self.world, layers)):
            ranks = grid.tensor * grid.context * pipeline
            experts = grid.expert * grid.expert_tensor * pipeline
            if self.world % ranks or self.world % experts:
                self.rejected["degrees that do not divide the GPUs"] += 1
                continue
            if "parallel.data" in self.fixed and self.base.parallel.data not in ("auto", self.world // ranks):
                self.rejected["parallel.data is fixed"] += 1
                continue
            if whole % (self.world // ranks * grid.micro):
                self.rejected["divisibility: batch.global"] += 1
                continue
            levels = self._values("zero", [0, 1, 2, 3] if self.world > 1 else [0])
            shardings = [candidate for zero in levels for candidate in self._shardings(grid, pipeline, zero)]
            for (name, virtual), sharding in product(self._schedules(pipeline, layers), shardings):
                yield PipelineLayout(pipeline, virtual, name, *sharding)

    def _shardings(self, grid: LayerLayout, pipeline: int, zero: int) -> Iterator[tuple[int, bool, int]]:
        """(ZeRO level, whether the optimizer's state is in the host's memory, replicas). Without sharding,
        every host would make the same updates; a CPU has all state there in any case. Replicas are as large
        as a domain."""
        layout = self.layout(grid, pipeline)
        replicas = self._values("replicas", [1, max(1, layout.gradient_ranks // self.domain)])
        offloads = [False, True] if zero or self.world == 1 else [False]
        if "memory.offload" in self.fixed or self.base.run.device == "cpu":
            offloads = [self.base.memory.offload == "optimizer"]
        for offload, number in product(offloads, dict.fromkeys(replicas)):
            if number == 1 or (zero and not any(size % number for size in layout.state_ranks.values())):
                yield zero, offload, number
            elif "parallel.replicas" in self.fixed:
                self.rejected["divisibility: parallel.replicas"] += 1

    def _schedules(self, pipeline: int, layers: int) -> Iterator[tuple[str, int]]:
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

    def orders(self, layout: Layout) -> list[str]:
        """Rank orders: data ranks are neighbours, or pipeline ranks."""
        orders = [DEFAULT_ORDER]
        if layout.pipeline > 1 and layout.expert * layout.expert_tensor == 1 and layout.degrees["data"] > 1:
            orders.append("tensor-context-expert-pipeline-data")
        return self._values("order", orders)

    @property
    def recomputes(self) -> tuple[str, ...]:
        """Kinds of recompute."""
        return (self.base.memory.recompute,) if "memory.recompute" in self.fixed else RECOMPUTES

    @property
    def some_layers(self) -> bool:
        """Whether some layers of a stage may recompute, and others not."""
        return not self.fixed & {"memory.recompute", "memory.recompute_layers"}

    def layout(self, grid: LayerLayout, pipeline: int) -> Layout:
        """The layout of the degrees, in the default order."""
        key = (*grid[:2], *grid[3:5], pipeline)
        if key not in self._layouts:
            self._layouts[key] = Layout(
                world=self.world,
                tensor=grid.tensor,
                context=grid.context,
                expert=grid.expert,
                expert_tensor=grid.expert_tensor,
                pipeline=pipeline,
            )
        return self._layouts[key]

    def microbatches(self, grid: LayerLayout, pipeline: int) -> int:
        """The number of microbatches of a step."""
        data = self.world // (grid.tensor * grid.context * pipeline)
        return self.base.batch.global_ // (data * grid.micro)

    def config(self, grid: LayerLayout, choice: PipelineLayout) -> Config:
        """The configuration of a layout, without recompute."""
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
            "replicas": choice.replicas,
        }
        memory = {"offload": _OFFLOAD[choice.offload], "recompute": "none", "recompute_layers": "all"}
        return base.model_copy(
            update={
                "parallel": base.parallel.model_copy(update=parallel),
                "batch": base.batch.model_copy(update={"micro": grid.micro}),
                "memory": base.memory.model_copy(update=memory),
            }
        )

    def resolved(self, grid: LayerLayout, choice: PipelineLayout, microbatches: int) -> Resolved:
        """A layout, with so many microbatches.

        Raises:
            ConfigError: it is refused.
        """
        config = self.config(grid, choice)
        layout = Layout.from_settings(config.parallel, self.world)
        return with_batch(config, layout, microbatches * grid.micro * layout.degrees["data"])

    def parts(self, resolved: Resolved, rank: int) -> RankParts:
        """The parts that a pipeline rank holds, which depend neither on sharding nor on the microbatches."""
        layout, plan = resolved.layout, resolved.plan
        degrees = layout.tensor, layout.expert, layout.expert_tensor, layout.pipeline
        key = rank, *degrees, tuple(plan.schedule.placement), plan.layers
        if key not in self._parts:
            self._parts[key] = RankParts.of(resolved, rank)
        return self._parts[key]

    def variant(self, resolved: Resolved, variant: Variant) -> Resolved | None:
        """A resolved configuration with another order and recompute, on which nothing else depends; None if
        it is refused."""
        config = resolved.config
        memory: dict[str, Any] = {"recompute": variant.recompute, "recompute_layers": variant.layers or "all"}
        if not self.some_layers and variant.recompute != "none":
            memory["recompute_layers"] = self.base.memory.recompute_layers
        config = config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update={"order": variant.order}),
                "memory": config.memory.model_copy(update=memory),
            }
        )
        try:
            layout = Layout.from_settings(config.parallel, self.world)
            check_config(config, layout)
        except ConfigError as error:
            self.refuse(error)
            return None
        return Resolved(config, layout, resolved.plan)


def with_batch(config: Config, layout: Layout, whole: int) -> Resolved:
    """A configuration, resolved with another ``batch.global``."""
    batch = config.batch.model_copy(update={"global_": whole})
    return resolve(config.model_copy(update={"batch": batch}), layout)


def _powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _divisors(number: int, most: float = inf) -> list[int]:
    """Divisors of a number, up to another."""
    return [n for n in range(1, int(min(number, most)) + 1) if number % n == 0]
