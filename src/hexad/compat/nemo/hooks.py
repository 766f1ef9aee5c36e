"""Modules with NeMo 2's hooks, as BioNeMo's are, whose steps an engine's schedule makes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from hexad.config import Config, HexadError
from hexad.engine.engine import Engine
from hexad.engine.faults import StepResult
from hexad.model.transformer import DTYPES
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.planning.stages import PipelinePlan
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..lightning.module import ConfiguredOptimizer, EngineModule, check_fault, layout_of_module
from ..megatron.schedules import ScriptWorkload, build_stages

log = logging.getLogger("hexad")


class HookedModule(EngineModule):
    """Drives a LightningModule with NeMo 2's hooks, on the ranks of any layout without context ranks.

    ``configure_model`` sets ``module``: this rank's stage, which ``parallel_state`` describes, made of
    Megatron-LM's parallel layers or others. In a step, for every microbatch and stage, ``data_step`` takes it
    from the loader, ``forward_step`` (on the last stage ``training_step``) computes, and the loss reduction
    that ``training_loss_reduction`` returns makes a loss of the result. ``validation_step``, ``test_step``
    and ``predict_step`` have their own of each.

    Args:
        user: the trainer's module.
        settings: makes the configuration of an engine.
    """

    def __init__(self, user: LightningModule, settings: Callable[[], Config]) -> None:
        super().__init__()
        self._user = [user]  # not a submodule
        self.settings = settings
        self._owners: dict[nn.Module, LightningModule] = {}
        self._kind = "training"
        self._last = 0
        self._finish: Callable[[], StepResult] | None = None

    @property
    def user(self) -> LightningModule:
        """The trainer's module."""
        return self._user[0]

    # Setting up

    def layout(self, ranks: int, named: Mapping[str, Any]) -> Layout:
        """The layout of so many ranks."""
        return layout_of_module(type(self.user).__name__, named, ranks)

    def make_engine(self, mesh: Mesh, training: bool, optimizer: Any) -> Engine:
        """An engine of this rank's stages, with the values that ``configure_model`` gives them."""
        config = self.settings()
        if getattr(getattr(self.user, "config", None), "calculate_per_token_loss", False):
            raise HexadError(
                f"{type(self.user).__name__}.config: found calculate_per_token_loss=True; losses are "
                "averaged over microbatches: leave it out"
            )
        parallel, ranks = config.parallel, mesh.pipeline.size
        schedule = build_schedule(parallel.schedule, ranks, ranks, parallel.virtual_stages)
        self._last = schedule.stages - 1
        numbers = schedule.stages_of(mesh.pipeline.rank)
        self._owners = {}
        dtype = DTYPES[config.precision.dtype]

        def stage(number: int) -> nn.Module:
            owner = self.user if number == numbers[0] else _again(self.user, numbers.index(number))
            module = _module_of(owner)
            self._owners[module] = owner
            return _in_format(module.to(mesh.device), dtype, number == 0, number == self._last)

        stages = build_stages(schedule, mesh, stage)
        workload = self._workload = ScriptWorkload(
            stages,
            mesh,
            config,
            plan=PipelinePlan(schedule, (range(0),) * schedule.stages),
            boundary=partial(_empty, self.user, config, mesh),
            forward_step=self._forward_step,
        )
        return Engine(workload, mesh, training=training, optimizer=optimizer, initialise=False)

    def set_up(self, mesh: Mesh, training: bool, optimizer: Callable[[Any], Any] | None) -> None:
        """Set up the engine, like :class:`EngineModule`; ``configure_model``, which a trainer calls before
        each fit and evaluation, may have created other stages, which are not used."""
        if training and self.engine is not None and not self.engine.training:
            self.engine = None  # of an evaluation before the fit
        super().set_up(mesh, training, optimizer)
        for module, owner in self._owners.items():  # Lightning would move, synchronise and save it
            owner._modules.pop("module", None)
            owner.__dict__["module"] = module

    # Passes

    def _forward_step(self, iterator: Iterator[Any], stage: nn.Module) -> tuple[Any, Callable[[Any], Any]]:
        """What a stage computes of the next microbatch, and the function that makes a loss of it."""
        owner = self._owners[stage]
        batch = self._hook(owner, "data_step", _data_step)(iterator)
        engine = self._made()
        last = engine.stages.get(self._last) is stage
        if last:
            output = getattr(owner, f"{self._kind}_step")(batch)
        else:
            output = self._hook(owner, "forward_step", owner)(batch)
        reduction = self._reduction(owner) if last else None
        return output, partial(_loss, reduction, batch)

    def _hook(self, owner: LightningModule, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of the current kind of step, or of all kinds."""
        hook = next((f for n in (f"{self._kind}_{name}", name) if (f := getattr(owner, n, None))), None)
        return default if hook is None else hook

    def _reduction(self, owner: LightningModule) -> Any:
        """The loss reduction of the current kind of step: a property, or a method that makes one."""
        for name in (f"{self._kind}_loss_reduction", "loss_reduction"):
            reduction = getattr(owner, name, None)
            if reduction is not None:
                return reduction if hasattr(reduction, "reduce") else reduction()
        raise HexadError(
            f"{type(owner).__name__}.{self._kind}_loss_reduction: found none; return a "
            "MegatronLossReduction, which makes a loss of what the step returns"
        )

    def training_step(self, microbatches: Sequence[Any]) -> Tensor:
        """Forward and backward passes of a step by the pipeline's schedule; what is reduced of the losses is
        returned, and logged as ``reduced_train_loss``."""
        self._kind = "training"
        engine = self._made()
        self._finish = engine.start_step(
            [(microbatch, number, 0) for number, microbatch in enumerate(microbatches)]
        )
        loss = self._everywhere(self._reduced())
        self.user.log("reduced_train_loss", loss, prog_bar=True, batch_size=1, sync_dist=True)
        self.user.log("global_step", float(engine.step), batch_size=1)
        return loss

    def update(self) -> None:
        """Clip and update with the gradients of :meth:`training_step`; the optimizer's step calls it."""
        assert self._finish is not None
        result, self._finish = self._finish(), None
        check_fault(self._made().guard, result)
        optimizer = self.user.optimizers(use_pl_optimizer=False)
        if isinstance(optimizer, ConfiguredOptimizer):
            optimizer.param_groups[0]["lr"] = result.lr
        norm = torch.tensor(result.grad_norm, dtype=torch.float64)
        self.user.log("grad_norm", norm, batch_size=1)
        self.user.log("lr", result.lr, batch_size=1, prog_bar=True)

    def evaluated(self, kind: str, microbatches: Sequence[Any]) -> Any:
        """What the loss reduction of ``validation``, ``test`` or ``predict`` makes of a step's microbatches,
        without gradients; all ranks together. Predictions on the ranks of the last stage, None on others."""
        self._kind = kind
        engine = self._made()
        with self.evaluation_mode():
            engine.evaluate([(microbatch, number, 0) for number, microbatch in enumerate(microbatches)])
        reduced = self._reduced()
        return reduced if kind == "predict" else self._everywhere(reduced)

    def validation_step(self, microbatches: Sequence[Any]) -> Tensor:
        """The loss of a step, without gradients; ``val_loss`` is logged, the mean over steps."""
        loss: Tensor = self.evaluated("validation", microbatches)
        self.user.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=1, add_dataloader_idx=False)
        return loss

    def test_step(self, microbatches: Sequence[Any]) -> Tensor:
        """Evaluate like :meth:`validation_step`; ``test_loss`` is logged."""
        loss: Tensor = self.evaluated("test", microbatches)
        self.user.log("test_loss", loss, sync_dist=True, batch_size=1, add_dataloader_idx=False)
        return loss

    def predict_step(self, microbatches: Sequence[Any]) -> Any:
        """What the loss reduction makes of the results, on the ranks of the last stage."""
        return self.evaluated("predict", microbatches)

    def _reduced(self) -> Any:
        """What the loss reduction makes of all that was reported; None on other stages' ranks."""
        engine = self._made()
        if self._last not in engine.stages:
            return None
        owner = self._owners[engine.stages[self._last]]
        return self._reduction(owner).reduce(self._workload.reported)

    def _everywhere(self, reduced: Any) -> Tensor:
        """A scalar of the last stage's rank, or of its dictionary, on all pipeline ranks; float64."""
        engine = self._made()
        if isinstance(reduced, Mapping) and "loss" not in reduced:
            raise HexadError(
                f"{self._kind}_loss_reduction.reduce: found {', '.join(map(str, reduced))}; return a "
                "scalar, or a dictionary with loss"
            )
        value = reduced["loss"] if isinstance(reduced, Mapping) else reduced
        if value is None:
            return engine.on_all_stages(None)
        value = value.detach() if isinstance(value, Tensor) else value
        total = torch.as_tensor(value, dtype=torch.float64, device=engine.mesh.device).reshape(())
        return engine.on_all_stages(total.clone())


def has_hooks(module: object) -> bool:
    """Whether a module is one for :class:`HookedModule`."""
    names = ("training_loss_reduction", "loss_reduction", "predict_loss_reduction")
    return isinstance(module, LightningModule) and any(hasattr(type(module), name) for name in names)


def _again(user: LightningModule, place: int) -> LightningModule:
    """A copy of a module with another stage."""
    owner = copy(user)
    owner._modules = {name: child for name, child in user._modules.items() if name != "module"}
    owner.__dict__.pop("module", None)
    staged = "vp_stage" in inspect.signature(owner.configure_model).parameters
    owner.configure_model(**({"vp_stage": place} if staged else {}))
    return owner


def _module_of(owner: LightningModule) -> nn.Module:
    module = getattr(owner, "module", None)
    name = type(owner).__name__
    if not isinstance(module, nn.Module):
        raise HexadError(
            f"{name}.configure_model: found no self.module afterwards; set it to this rank's stage"
        )
    if not callable(getattr(module, "set_input_tensor", None)):
        raise HexadError(
            f"{name}.configure_model: found a {type(module).__name__} without set_input_tensor(tensor), "
            "by which it is given the previous stage's result; define it"
        )
    return module


def _in_format(module: nn.Module, dtype: torch.dtype, first: bool, last: bool) -> nn.Module:
    """A stage with parameters of a 16-bit format: the first one's inputs are converted to it, and the last
    one's result to fp32, as Megatron-LM's ``Float16Module`` does."""
    if dtype.itemsize != 2:
        return module
    module.to(dtype)

    def narrow(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _converted(args, torch.float32, dtype), _converted(kwargs, torch.float32, dtype)

    if first:
        module.register_forward_pre_hook(narrow, with_kwargs=True)
    if last:
        module.register_forward_hook(lambda _, __, output: _converted(output, dtype, torch.float32))
    return module


def _converted(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """A nested value with its tensors of one format in another."""
    if isinstance(value, Tensor):
        return value.to(after) if value.dtype == before else value
    if isinstance(value, Mapping):
        return {key: _converted(item, before, after) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_converted(item, before, after) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _empty(user: LightningModule, config: Config, mesh: Mesh, *_: Any) -> Tensor:
    """An empty tensor like what a stage passes on: ``[sequence (/ tensor ranks), microbatch, hidden]``."""
    settings = getattr(user, "config", None)
    hidden = getattr(settings, "hidden_size", None)
    if hidden is None:
        raise HexadError(
            f"{type(user).__name__}.config.hidden_size: found none, which pipeline stages need: they pass on "
            "[sequence, microbatch, hidden_size]"
        )
    rows = config.data.sequence // (mesh.tensor.size if config.parallel.sequence_parallel else 1)
    dtype = getattr(settings, "pipeline_dtype", None) or DTYPES[config.precision.dtype]
    return torch.empty((rows, config.batch.micro, hidden), dtype=dtype, device=mesh.device)


def _data_step(iterator: Iterator[Any]) -> Any:
    """The next microbatch, which is where the engine computes."""
    batch, _, _ = next(iterator)
    return batch


def _loss(reduction: Any, batch: Any, output: Any) -> tuple[Any, ...]:
    """(loss, reported) or (sum, count, reported) of a microbatch."""
    result = reduction(batch, output)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        kind = type(reduction).__name__
        raise HexadError(f"{kind}.forward: found a {type(result).__name__}; return (loss, reported)")
    return result
