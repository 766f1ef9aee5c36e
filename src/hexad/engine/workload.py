"""The workload of an engine: a rank's pipeline stages, and what is special about a step of them.

A :class:`Workload` is everything that :class:`~hexad.engine.engine.Engine` does not decide: how microbatches
are prepared, what a stage computes, what crosses its boundary, what is reported, and the manners of another
system. :class:`~hexad.engine.language.LanguageModel` is the configured model; a :class:`ModuleWorkload` has
the user's own modules; interfaces have further ones.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hexad.comm import Pending, all_reduce_async
from hexad.config import Config, ConfigError, HexadError, one_line
from hexad.planning import PipelinePlan, check_settings, plan_of_modules, resolved_parallel
from hexad.topology.mesh import Mesh

from .forms import FormedBatch, Forms, signature
from .modules import Ties, with_common_dtype

Compute = Callable[[nn.Module, Any, Tensor | None, float | None], Tensor]
"""A stage's computation, given the stage, a microbatch, what the stage before computed of it (None on the
first), and the factor of the loss in the backward pass (None in evaluation): a tensor, on the last stage a
scalar."""

Boundary = Callable[[Any, int], Tensor]
"""Makes an empty tensor like what a stage, given by its number, computes of a microbatch."""


class Manners(NamedTuple):
    """Differences of other systems in an update.

    Attributes:
        clip_epsilon: added to the norm that ``optimizer.clip`` is divided by.
        scale_delay: steps that a dynamic loss scale waits longer before it grows.
        averages: gradients are means over data ranks, not sums.
        extends: a step may have more backward passes than announced, of any graph.
    """

    clip_epsilon: float = 0.0
    scale_delay: int = 0
    averages: bool = False
    extends: bool = False


USUAL = Manners()
"""Manners of a run of Hexad's own."""


@dataclass(frozen=True)
class Work:
    """The work of a rank in one training step.

    Attributes:
        tasks: what stages compute, by microbatch of the data rank, in order.
        sequences: of these microbatches.
        targets: positions of the global batch that have a target.
        pairs: pairs of tokens of one document in the global batch.
        total: what the sum of all ranks' losses is divided by; 0: there is nothing to learn from.
        divisor: what losses are divided by before the backward pass; gradients are divided by the rest of
            ``total`` after it.
    """

    tasks: Sequence[Any]
    sequences: int
    targets: int
    pairs: int
    total: int
    divisor: int


class Workload(ABC):
    """A rank's stages, and what is special about a step of them. Subclasses override what differs.

    Args:
        config: settings, with those of ``parallel`` resolved.
        mesh: of the run.
        plan: of the pipeline.
        ties: parameters that several stages have alike, see :data:`hexad.engine.modules.Ties`.
        manners: of an update.

    Attributes:
        configured: the stages are the model that ``config`` describes.
    """

    configured = False

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        plan: PipelinePlan,
        ties: Ties | None = None,
        manners: Manners = USUAL,
    ) -> None:
        self.config, self.mesh, self.plan = config, mesh, plan
        self.ties, self.manners = ties or {}, manners

    # What stages are, compute, and send to each other

    @abstractmethod
    def stages(self, training: bool) -> Mapping[int, nn.Module]:
        """This rank's stages by number, made once for each engine; without ``training`` all is frozen."""

    @abstractmethod
    def compute(self, stage: nn.Module, task: Any, inputs: Tensor | None, scale: float | None) -> Tensor:
        """Run a stage on a task; see :data:`Compute`."""

    @abstractmethod
    def boundary(self, task: Any, stage: int) -> Tensor:
        """An empty tensor like what a stage, which is not the last, computes of a task."""

    # Passes

    def tasks(self, microbatches: Sequence[Any]) -> Sequence[Any]:
        """The tasks of these microbatches, in order, before a schedule runs them; all ranks together."""
        return list(microbatches)

    # A training step

    def announce(self, microbatches: Sequence[Any]) -> None:  # noqa: B027 (optional)
        """Start to prepare the next step, while this one runs; all ranks together."""

    def settle(self) -> None:  # noqa: B027
        """Wait for what :meth:`announce` has started."""

    @abstractmethod
    def prepare(self, microbatches: Sequence[Any], step: int, divisor: int | None = None) -> Work:
        """The work of one training step, after ``step`` others; all ranks together.

        Args:
            microbatches: of this data rank.
            step: number of steps made so far.
            divisor: in place of what the sum of losses is divided by.
        """

    def start_summing(self, total: Tensor | None, work: Work) -> Pending:
        """Start summing what is reported of a step over the ranks that have other microbatches: float64
        ``[1 + n]``, beginning with the losses.

        Args:
            total: of this data rank's losses, on the rank of the last stage; None on others.
            work: of the step.
        """
        return all_reduce_async(self._losses(total), self.mesh.gradient_axis())

    def _losses(self, total: Tensor | None) -> Tensor:
        """A sum of losses, or 0 where this rank has none: float64 ``[1]``."""
        sums = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        if total is not None:
            sums[0] = total
        return sums

    def veto(self, sums: Tensor, veto: Pending | None) -> Pending | None:
        """``veto``, and what else forbids the update, given the sums of all ranks; see
        :meth:`BucketOptimizer.step <hexad.optim.optimizer.BucketOptimizer.step>`."""
        return veto

    def updated(self, sums: Tensor, stages: Mapping[int, nn.Module]) -> None:  # noqa: B027
        """Adopt, after an update of this rank's stages, what follows from the sums of all ranks."""

    def report(self, sums: Sequence[float], work: Work) -> dict[str, Any]:
        """Further fields of the step's :class:`~hexad.engine.faults.StepResult`, given the sums."""
        return {}

    # Evaluation

    @abstractmethod
    def prepare_evaluation(self, microbatches: Sequence[Any]) -> Work:
        """The tasks that this rank evaluates; all ranks together."""

    def evaluated(self, total: Tensor | None, work: Work) -> Tensor:
        """(sum of losses, what it is to be divided by) of this data rank: float64 ``[2]``, zeros on ranks
        without the last stage.

        Args:
            total: of the losses; None on ranks without the last stage.
            work: of :meth:`prepare_evaluation`.
        """
        result = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if total is not None:
            result += torch.stack([total, torch.full_like(total, work.targets)])
        return result

    # Progress

    def progress(self) -> dict[str, Any]:
        """Progress that a checkpoint keeps beside the state, in JSON's types."""
        return {}

    def restore(self, progress: Mapping[str, Any]) -> None:  # noqa: B027
        """Resume from :meth:`progress`."""


class ModuleWorkload(Workload):
    """Modules of the user's own, which declare their parameters
    (:class:`~hexad.parallel.sharding.ShardedModule`) or are plain.

    Args:
        stages: this rank's pipeline stages by number, or the module that is the only one.
        mesh: from :func:`hexad.launch`.
        config: settings of everything but the model.
        plan: of the pipeline; by default one stage per rank, ``parallel.schedule`` as configured.
        compute: what a stage computes of a microbatch; by default ``stage(microbatch)``, a loss. Stages may
            pass on several tensors and None, see :mod:`hexad.engine.forms`.
        boundary: given a microbatch and the number of a stage, makes an empty tensor like the one that the
            stage passes on; by default a forward pass finds it, once for each new shape of a microbatch.
        ties, manners: see :class:`Workload`.

    Raises:
        HexadError: no settings, or ones that do not fit.
    """

    def __init__(
        self,
        stages: nn.Module | Mapping[int, nn.Module],
        mesh: Mesh,
        config: Config | None,
        *,
        plan: PipelinePlan | None = None,
        compute: Compute | None = None,
        boundary: Boundary | None = None,
        ties: Ties | None = None,
        manners: Manners = USUAL,
    ) -> None:
        config = checked(config, mesh)
        super().__init__(config, mesh, plan or plan_of_modules(config, mesh.layout), ties, manners)
        self._stages = {mesh.pipeline.rank: stages} if isinstance(stages, nn.Module) else dict(stages)
        self._numbers = {stage: number for number, stage in self._stages.items()}
        self._user_compute, self._user_boundary = compute, boundary
        placement, together = self.plan.schedule.placement, config.parallel.zero == 3
        self._forms: Forms | None = None
        if boundary is None and len(placement) > 1:
            self._forms = Forms(self._stages, placement, mesh, self._result, together)

    def stages(self, training: bool) -> Mapping[int, nn.Module]:
        """The user's modules, by number."""
        return self._stages

    def tasks(self, microbatches: Sequence[Any]) -> Sequence[Any]:
        """Microbatches, with the forms of what crosses boundaries where these have to be found."""
        if self._forms is None:
            return list(microbatches)
        return self._forms.formed(microbatches, self.signatures(microbatches))

    def signatures(self, microbatches: Sequence[Any]) -> list[object]:
        """The facts that determine each microbatch's shapes, the same on all pipeline ranks."""
        return [signature(microbatch) for microbatch in microbatches]

    def compute(self, stage: nn.Module, task: Any, inputs: Tensor | None, scale: float | None) -> Tensor:
        """What a stage computes of a microbatch: the message for the next stage, or the loss."""
        if not isinstance(task, FormedBatch):
            return self._computed(stage, task, inputs, scale)
        number = self._numbers[stage]
        received = None if inputs is None else task.forms[number - 1].result(self.received(inputs))
        result = self._computed(stage, task.batch, received, scale)
        return task.forms[number].message(result) if number < len(task.forms) else result

    def received(self, message: Tensor) -> Tensor:
        """The message that a stage has received, as its layers may use it."""
        return message

    def _computed(self, stage: nn.Module, batch: Any, inputs: Any, scale: float | None) -> Any:
        """A stage's result, of the last one the loss: by the user's function, or the stage's call. An error
        says so where 16-bit weights meet other inputs."""
        try:
            if self._user_compute is not None:
                return self._user_compute(stage, batch, inputs, scale)
            return stage(batch) if inputs is None else stage(inputs)
        except RuntimeError as error:
            dtype = self.config.precision.dtype
            if dtype not in ("bf16", "fp16") or not _FORMATS_DIFFER.search(str(error)):
                raise
            raise HexadError(
                f"precision.dtype {dtype}: the modules' weights have this format, what they are given has "
                f"not ({one_line(error)}); convert it: x.to(next(module.parameters()).dtype), or use fp32"
            ) from error

    def _result(self, stage: int, batch: Any, inputs: Any) -> Any:
        """A stage's result in evaluation, to find its form."""
        return self._computed(self._stages[stage], batch, inputs, None)

    def boundary(self, task: Any, stage: int) -> Tensor:
        """An empty tensor like what a stage passes on."""
        if isinstance(task, FormedBatch):
            return task.forms[stage].empty(self.mesh.device)
        assert self._user_boundary is not None, "stages on several ranks have a boundary"
        return self._user_boundary(task, stage)

    def prepare(self, microbatches: Sequence[Any], step: int, divisor: int | None = None) -> Work:
        """Refuse complete steps, whose losses only the user can divide."""
        raise HexadError(
            "the engine was given modules: call begin, accumulate, reduce and update; complete steps are "
            "those of a language model, Engine(config, mesh)"
        )

    def prepare_evaluation(self, microbatches: Sequence[Any]) -> Work:
        """Refuse, as :meth:`prepare`."""
        return self.prepare(microbatches, 0)

    def announce(self, microbatches: Sequence[Any]) -> None:
        """Refuse, as :meth:`prepare`."""
        self.prepare(microbatches, 0)


_FORMATS_DIFFER = re.compile(r"must have the same dtype|should be the same|expected scalar type|ound dtype")
"""Matches PyTorch's messages about operands of different formats."""


def checked(config: Config | None, mesh: Mesh) -> Config:
    """The settings that come with modules.

    Raises:
        HexadError: there are none, or they do not fit.
    """
    if config is None:
        raise HexadError("config: found None; pass Engine(stages, mesh, config) with all other settings")
    check_settings(config, mesh.layout)
    if config.memory.recompute != "none":
        value = f"found {config.memory.recompute}, which is for the configured model's layers"
        raise ConfigError(
            "memory.recompute", f"{value}; use none, and torch.utils.checkpoint in your modules"
        )
    if config.memory.recompute_parts:
        value = f"found {', '.join(config.memory.recompute_parts)}, which the configured model's layers have"
        raise ConfigError("memory.recompute_parts", f"{value}; leave it out")
    if config.run.compile == "pointwise":
        value = "found pointwise, which is for the configured model's functions"
        raise ConfigError("run.compile", f"{value}; use none, and torch.compile in your modules")
    if config.precision.dtype == "fp8":
        raise ConfigError(
            "precision.dtype", "found fp8, a format of the configured model's products; use bf16"
        )
    if config.precision.exact:
        raise ConfigError("precision.exact", "found true, which is for the configured model; remove it")
    config = with_common_dtype(config, mesh)
    return config.model_copy(update={"parallel": resolved_parallel(config, mesh.layout)})
