"""The language model of a configuration: its stages, what they compute of a microbatch, and what a step of it
reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hexad.comm import Pending, all_reduce, all_reduce_async
from hexad.config import Config, ConfigError, HexadError
from hexad.config.schema import RunSettings
from hexad.dataset.load.microbatch import Microbatch
from hexad.model.auxiliary import Auxiliary
from hexad.model.dropout import DropoutKey
from hexad.model.inventory import ModelInventory
from hexad.model.recompute_inventory import Recompute
from hexad.model.replay import Replay
from hexad.model.transformer import DTYPES, Transformer, build_stages, factored_mesh, make_shard
from hexad.parallel.pointwise import compiler_options, missing_compiler
from hexad.parallel.sharding import Shard, freeze
from hexad.planning import Resolved
from hexad.topology.mesh import Mesh

from .counting import Counting
from .experts import ExpertLoads
from .losses import Loss, OwnLoss
from .workload import Work, Workload

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """One microbatch, and what stages need besides to compute with it.

    Attributes:
        microbatch: on the device.
        key: of dropout; None for evaluation.
        auxiliary: where layers add losses of their own; None where none do.
    """

    microbatch: Microbatch
    key: DropoutKey | None = None
    auxiliary: Auxiliary | None = None


@dataclass(frozen=True)
class LanguageWork(Work):
    """The work of a step of the language model.

    Attributes:
        auxiliary: sums of the layers' own losses; None where there are none.
    """

    auxiliary: Auxiliary | None


def training_shard(config: Config, mesh: Mesh) -> Shard:
    """The shard of every layer that this rank holds for training."""
    dtype = config.precision.dtype
    shard = make_shard(config.parallel, mesh, DTYPES[dtype])
    return replace(
        shard,
        deferred=True,
        fp8=dtype == "fp8",
        fp8_weight_gradients=config.precision.fp8_weight_gradients,
        exact=config.precision.exact,
        compiled=compiles(config.run, mesh.device) and not config.precision.exact,
    )


def compiles(run: RunSettings, device: torch.device) -> bool:
    """Whether pointwise functions are compiled on the device.

    Raises:
        ConfigError: they are to be, and the machine lacks what that needs.
    """
    if run.compile == "none" or (run.compile == "auto" and device.type == "cpu"):
        return False
    missing = missing_compiler(device)
    if missing is not None and run.compile != "auto":
        fix = "install it, or use none"
        raise ConfigError("run.compile", f"found {run.compile}, which needs {missing} on this machine; {fix}")
    if missing is not None:
        _say_not_compiled(missing)
    return missing is None


@cache
def _say_not_compiled(missing: str) -> None:
    log.warning("run.compile auto: functions are not compiled: this machine lacks %s", missing)


class LanguageModel(Workload):
    """The model that a configuration describes.

    Args:
        resolved: settings.
        mesh: from :func:`hexad.launch`.
        loss: in place of the model's own, see :mod:`hexad.engine.losses`.

    Attributes:
        mesh: with the model's factored axes.
        shard: which shard of every layer this rank holds, and how.
        counting: of microbatches.
        losses: names of the layers' own losses, the same on all ranks.
        loads: of experts; None without.
    """

    configured = True

    def __init__(self, resolved: Resolved, mesh: Mesh, loss: Loss | nn.Module | None = None) -> None:
        config = resolved.config
        mesh = factored_mesh(config.model, config.parallel, mesh)
        super().__init__(config, mesh, resolved.plan)
        self._loss = loss
        self.shard = training_shard(config, mesh)
        self.counting = Counting(config, mesh)
        self.losses = ModelInventory(config.model).losses
        self.loads = ExpertLoads(config.model, mesh.device) if config.model.expert_layers else None

    # Stages

    def stages(self, training: bool) -> Mapping[int, nn.Module]:
        """This rank's stages, with the loss of the caller's on the last one."""
        stages = build_stages(
            self.config.model,
            self.shard,
            self.plan.layers,
            self.plan.schedule.placement,
            self.mesh.pipeline.rank,
            Recompute.from_settings(self.config.memory),
        )
        if self.config.run.compile == "full":
            for stage in stages.values():
                for layer in stage.layers.values():
                    layer.compile(options=compiler_options())
        for stage in stages.values():
            if self._loss is not None and stage.head is not None:
                stage.loss = OwnLoss(self._loss, self.mesh)
        if not training:
            freeze(*stages.values())
        return dict(stages)

    def compute(self, stage: nn.Module, task: Task, inputs: Tensor | None, scale: float | None) -> Tensor:
        """A stage's hidden states of a microbatch; the last stage's sum of token losses."""
        assert isinstance(stage, Transformer)
        microbatch, auxiliary = task.microbatch, task.auxiliary
        if auxiliary is not None and scale is not None:
            auxiliary = auxiliary.scaled(scale)
        replay = None
        if microbatch.experts is not None:
            imposed = (microbatch.experts, microbatch.expert_weights)
            experts, weights = (None if values is None else values.flatten(0, 1) for values in imposed)
            replay = Replay(stage.model.expert_layers, experts, weights)
        passed: dict[str, Any] = {"inputs": inputs, "key": task.key, "auxiliary": auxiliary, "replay": replay}
        if stage.head is None:
            return stage(microbatch.tokens, microbatch.spans, **passed)
        if stage.loss is not None:
            hidden = stage(microbatch.tokens, microbatch.spans, **passed)
            loss: Tensor = stage.loss(stage, hidden, microbatch)
            return loss
        return stage.loss_sum(microbatch.tokens, microbatch.labels, microbatch.spans, scale=scale, **passed)

    def boundary(self, task: Task, stage: int) -> Tensor:
        """An empty tensor for the hidden states that any stage but the last computes of a microbatch."""
        shard = self.shard
        rows = task.microbatch.tokens.numel() // (shard.tensor.size if shard.sequence else 1)
        return torch.empty((rows, self.config.model.hidden), dtype=shard.dtype, device=shard.device)

    # A training step

    def announce(self, microbatches: Sequence[Microbatch]) -> None:
        """Start counting what the next step's microbatches have; :meth:`prepare` continues with this list."""
        self.counting.announce(microbatches)

    def settle(self) -> None:
        """Wait for counts that :meth:`announce` has started."""
        self.counting.settle()

    def prepare(
        self, microbatches: Sequence[Microbatch], step: int, divisor: int | None = None
    ) -> LanguageWork:
        """The work of one training step, after ``step`` others; all ranks together. ``divisor`` takes the
        place of the number of targets.

        Raises:
            HexadError: as :meth:`Counting.counted`, or another ``divisor``.
        """
        parts, counts = self.counting.counted(microbatches)
        parts = [replace(part, most=counts.longest) for part in parts]
        if divisor is not None and (not isinstance(divisor, int) or divisor < 1):
            raise HexadError(f"divisor: found {divisor!r}, expected a number of 1 or more")
        total = counts.targets if divisor is None else divisor
        auxiliary = self._auxiliary(total, len(parts))
        tasks = [Task(part, self._key(step, index, part), auxiliary) for index, part in enumerate(parts)]
        return LanguageWork(
            tasks,
            sequences=sum(part.sequences for part in parts),
            targets=total,
            pairs=counts.pairs,
            total=total,
            divisor=self.divisor(total),
            auxiliary=auxiliary,
        )

    def divisor(self, targets: int) -> int:
        """The number by which losses are divided before the backward pass.

        That is the global number of targets. In fp16 it is a microbatch's number of tokens, and gradients are
        divided by the rest in float32: a small probability over millions of targets would underflow.
        """
        if self.config.precision.dtype != "fp16":
            return targets
        return min(targets, self.config.batch.micro * self.config.data.sequence)

    def _key(self, step: int, index: int, microbatch: Microbatch) -> DropoutKey:
        """The dropout key of this data rank's microbatch number ``index``. Microbatch ``index`` of data rank
        ``r`` of ``D`` is number ``index * D + r`` of the global batch."""
        first = (index * self.mesh.data.size + self.mesh.data.rank) * microbatch.sequences
        return DropoutKey(self.config.run.seed, step, first)

    def _auxiliary(self, targets: int, microbatches: int) -> Auxiliary | None:
        """Sums of the layers' own losses, scaled by the divisor of the token losses times that of a mean over
        all microbatches, and their counts."""
        names, loads = self.losses, self.loads
        if not names and loads is None:
            return None
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        scale = targets / (microbatches * self.mesh.data.size)
        if loads is None:
            return Auxiliary(names, sums, scale)
        return Auxiliary(names, sums, scale, loads.empty(), loads.shares)

    def start_summing(self, total: Tensor | None, work: Work) -> Pending:
        """Start summing the token losses, the layers' own and their counts over the ranks that have other
        tokens: float64 ``[1 + losses + counts]``."""
        assert isinstance(work, LanguageWork)
        sums, auxiliary = self._losses(total), work.auxiliary
        if auxiliary is not None:
            counts = () if auxiliary.counts is None else (auxiliary.counts.flatten(),)
            parts = torch.cat((auxiliary.sums, *counts))
            sums = torch.cat((sums, all_reduce(parts, self.mesh.tensor)))
        return all_reduce_async(sums, self.mesh.gradient_axis())

    def veto(self, sums: Tensor, veto: Pending | None) -> Pending | None:
        """Forbid the update also where rows found no place in an expert's buffer; on a CPU buffers are as
        large as they must be."""
        if self.loads is None or self.mesh.device.type == "cpu":
            return veto
        missed = (self.loads.missed(self._counts(sums, self.loads)) > 0).to(torch.int32)
        return Pending(missed if veto is None else missed + veto.wait())

    def updated(self, sums: Tensor, stages: Mapping[int, nn.Module]) -> None:
        """Adopt the experts' loads: for the next step's losses, and for the routers' biases."""
        if self.loads is not None:
            self.loads.adopt(self._counts(sums, self.loads), stages.values())

    def _counts(self, sums: Tensor, loads: ExpertLoads) -> Tensor:
        """The counts of layers, from the sums of :meth:`start_summing`."""
        return loads.shaped(sums[1 + len(self.losses) :])

    def report(self, sums: Sequence[float], work: Work) -> dict[str, Any]:
        """The means of the layers' own losses over all microbatches, and the experts' loads, by layer.

        Raises:
            HexadError: rows found no place in a buffer.
        """
        count, beyond = len(work.tasks) * self.mesh.data.size, 1 + len(self.losses)
        means = {name: total / count for name, total in zip(self.losses, sums[1:])}
        return {"auxiliary": means, "experts": self.loads.report(sums[beyond:]) if self.loads else {}}

    # Evaluation

    def prepare_evaluation(self, microbatches: Sequence[Microbatch]) -> Work:
        """The tasks that this rank evaluates, with their targets; all ranks together. In ZeRO 3, which
        gathers weights for each microbatch, and where experts are divided, all ranks have as many.

        Raises:
            HexadError: as :meth:`Counting.counted`.
        """
        parallel = self.config.parallel
        divided = self.loads is not None and parallel.expert * parallel.expert_tensor > 1
        parts, counts = self.counting.counted_apart(microbatches, equal=parallel.zero == 3 or divided)
        tasks = [Task(replace(part.to(self.mesh.device), most=counts.longest)) for part in parts]
        targets = sum(part.targets() for part in parts)
        return Work(tasks, sum(part.sequences for part in parts), targets, counts.pairs, targets, 1)

    # Progress

    def progress(self) -> dict[str, Any]:
        """The experts' loads, where the model has experts."""
        return {} if self.loads is None else {"loads": self.loads.state()}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restore the experts' loads."""
        if self.loads is not None:
            self.loads.restore(progress.get("loads"))
