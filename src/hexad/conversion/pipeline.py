"""Pipelines of users' models: a complete model that is cut (:mod:`.cut`), or a list of layers
(:mod:`.stages`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hexad.config import Config, HexadError
from hexad.engine.engine import Engine
from hexad.engine.modules import Tie
from hexad.engine.workload import USUAL, Boundary, Compute, Manners, ModuleWorkload
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.planning import PipelinePlan
from hexad.topology.mesh import Mesh

from .cut import CutModel
from .stages import LayerStage, Split, StageLoss, call, divided, free, loss_of


@dataclass(frozen=True)
class PipelinedModel:
    """A model's stages on this rank.

    Attributes:
        stages: by number.
        plan: of the pipeline.
        mesh: of the run.
        ties: parameters that the first and the last stage have in common.
        schedule, virtual_stages: the arguments of :func:`pipeline`.
        compute: what a stage computes of a microbatch; see :class:`hexad.Engine`.
        boundary: makes an empty tensor like what crosses boundaries; None: a forward pass finds it.
    """

    stages: Mapping[int, nn.Module]
    plan: PipelinePlan
    mesh: Mesh
    ties: Mapping[nn.Parameter, Tie]
    schedule: str
    virtual_stages: int
    compute: Compute = field(repr=False)
    boundary: Boundary | None = field(repr=False)

    def engine(
        self,
        config: Config,
        optimizer: torch.optim.Optimizer | Callable[[Mapping[int, nn.Module]], Any] | None = None,
        training: bool = True,
        manners: Manners = USUAL,
    ) -> Engine:
        """An engine of these stages, with the values that the model came with.

        Args:
            config: settings of everything but the model and the schedule.
            optimizer: of ``torch.optim``, made of :meth:`parameters`, or a function, as of
                :class:`hexad.Engine`; AdamW by default.
            training: False for evaluation only.
            manners: of an update.
        """
        settings = {"schedule": self.schedule, "virtual_stages": self.virtual_stages}
        parallel = config.parallel.model_copy(update=settings)
        workload = ModuleWorkload(
            self.stages,
            self.mesh,
            config.model_copy(update={"parallel": parallel}),
            plan=self.plan,
            compute=self.compute,
            boundary=self.boundary,
            ties=self.ties,
            manners=manners,
        )
        return Engine(workload, self.mesh, training=training, optimizer=optimizer, initialise=False)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return list(dict.fromkeys(p for stage in self.stages.values() for p in stage.parameters()))

    def train(self, mode: bool = True) -> None:
        """Set the stages to training, or to evaluation."""
        for stage in self.stages.values():
            stage.train(mode)


def pipeline(
    module: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    *,
    layers: str | None = None,
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    loss: StageLoss | None = None,
    boundary: Callable[[Any], tuple[int, ...]] | None = None,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    split: Split = "cost",
) -> PipelinedModel:
    """Divide a model into the stages of a mesh's pipeline ranks.

    The model is used up: layers of other ranks give up their memory. Make it tensor-parallel before
    (:func:`hexad.parallelize`).

    Args:
        module: a model with a list of layers, each of which takes and returns one tensor first, the same on
            all ranks; or the layers themselves, in a list.
        mesh: of the run; its pipeline ranks.
        layers: the path of the list (``nn.ModuleList`` or ``nn.Sequential``); by default what ``pp_plan`` of
            a ``transformers`` model says.
        before: the paths of modules that the first stage has: embeddings. As ``layers``.
        after: the paths of modules that the last stage has: final norm, head. As ``layers``.
        loss: of the model's output and the microbatch; by default ``output.loss``, or the output itself.
        boundary: the shape of the tensor that crosses boundaries, given a microbatch; by default a forward
            pass finds it, once for each new shape of a microbatch.
        schedule: a name of ``parallel.schedule`` but ``auto``.
        virtual_stages: stages of a rank.
        split: numbers of layers of the stages, or how they are found: by numbers of parameters, or evenly.

    Returns:
        the stages; ``.engine(config)`` trains them. A microbatch is a dictionary of the model's arguments, a
        tuple of them, or the only one.

    Raises:
        HexadError: the modules' places are not known or do not fit.
    """
    _check(mesh, schedule)
    if not isinstance(module, nn.Module):
        return pipelined_layers(module, mesh, call, loss, boundary, schedule, virtual_stages, split)
    ranks = mesh.pipeline.size
    planned = build_schedule(schedule, ranks, ranks, virtual_stages)
    model = CutModel.of(module, layers, before, after)
    parts = model.parts(split, planned.stages)
    cut = {number: model.stage(parts, number, loss) for number in planned.stages_of(mesh.pipeline.rank)}
    stages = {number: stage for number, (stage, _) in cut.items()}
    ties = model.ties(planned.placement, mesh.pipeline.rank)
    free(module.parameters(), stages.values())
    plan = PipelinePlan(planned, parts)
    return PipelinedModel(
        stages,
        plan,
        mesh,
        ties,
        schedule,
        virtual_stages,
        _compute(dict(cut.values())),
        _empty(boundary, stages, mesh),
    )


def pipelined_layers(
    layers: Sequence[nn.Module],
    mesh: Mesh,
    first: Callable[[nn.Module, Any], Any],
    loss: StageLoss | None,
    boundary: Callable[[Any], Sequence[int]] | None,
    schedule: str,
    virtual_stages: int,
    split: Split,
) -> PipelinedModel:
    """Divide a list of layers into stages (:func:`pipeline`); each layer takes the result of the one before.

    Args:
        layers: the same on all ranks; those of other ranks give up their memory.
        first: calls the first stage with a microbatch.
        mesh, loss, boundary, schedule, virtual_stages, split: see :func:`pipeline`.
    """
    ranks = mesh.pipeline.size
    planned = build_schedule(schedule, ranks, ranks, virtual_stages)
    parts = divided(layers, "layers", split, planned.stages)
    numbers = planned.stages_of(mesh.pipeline.rank)
    stages = {number: LayerStage.of(layers, parts[number]) for number in numbers}
    last = planned.stages - 1

    def pass_(number: int, batch: Any, inputs: Any) -> Any:
        output = stages[number](inputs) if number else first(stages[number], batch)
        return loss_of(output, batch, loss) if number == last else output

    free((parameter for layer in layers for parameter in layer.parameters()), stages.values())
    passed: dict[nn.Module, Any] = {stage: partial(pass_, number) for number, stage in stages.items()}
    plan = PipelinePlan(planned, parts)
    compute, empty = _compute(passed), _empty(boundary, stages, mesh)
    return PipelinedModel(stages, plan, mesh, {}, schedule, virtual_stages, compute, empty)


def _compute(passed: Mapping[nn.Module, Callable[[Any, Any], Any]]) -> Compute:
    """Run a stage on a microbatch and the result of the stage before."""
    return lambda stage, batch, inputs, _: passed[stage](batch, inputs)


def _empty(
    boundary: Callable[[Any], Sequence[int]] | None, stages: Mapping[int, nn.Module], mesh: Mesh
) -> Boundary | None:
    """Makes empty tensors of the shape that the user names; None: a forward pass finds it."""
    if boundary is None:
        return None
    shape = boundary

    def empty(batch: Any, _: int) -> Tensor:
        kind = next(p.dtype for stage in stages.values() for p in stage.parameters() if p.is_floating_point())
        return torch.empty(tuple(shape(batch)), dtype=kind, device=mesh.device)

    return empty


def _check(mesh: Mesh, schedule: str) -> None:
    """Refuse ranks and schedules that a user's model cannot have.

    Raises:
        HexadError: naming the argument.
    """
    if mesh.context.size > 1:
        raise HexadError(
            f"mesh: found {mesh.context.size} context ranks, of whose tokens a user's attention would see "
            "its own; use tensor, pipeline and data ranks"
        )
    if schedule == "auto":
        raise HexadError("schedule: found auto, which needs costs of layers; name one, such as 1f1b")
