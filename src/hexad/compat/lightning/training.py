"""What a fit of a LightningModule trains with: an engine, the optimizer that its hooks see, and gradients
where hooks read or change them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hexad.comm import all_gather, broadcast, identical
from hexad.config import Config, HexadError
from hexad.config.schema import ParallelSettings
from hexad.engine.engine import Engine
from hexad.engine.workload import Manners, ModuleWorkload
from hexad.model.configuration import load_config
from hexad.model.transformer import DTYPES
from hexad.optim.torch_optimizer import TorchOptimizer, is_elementwise
from hexad.parallel.data.buckets import Bucket
from hexad.topology.mesh import Axis, Mesh

from ..facade.accumulation import Accumulation
from ..facade.optimizer import EngineOptimizer, adopted_optimizer, call_method, refused, trained
from ..facade.reads import GatheredReads

log = logging.getLogger("hexad")

MANNERS = Manners(clip_epsilon=1e-6)
"""``torch.nn.utils.clip_grad_norm_`` adds this to the norm that it divides by."""
_OF_MODULES = MANNERS._replace(averages=True, extends=True)
"""Manners where gradients are means over data ranks, of any number of backward passes."""


class FitOptimizer(EngineOptimizer):
    """The optimizer that a fit's hooks and callbacks see: the module's own, stepped by the engine."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, which makes the backward passes, then reduce and update; returns its result.
        Without gradients nothing is updated, as in torch."""
        result = None if closure is None else closure()
        call_method(self._step)
        return result

    load_state_dict = refused(
        "optimizer.load_state_dict", "state is sharded; pass ckpt_path to trainer.fit, which loads it"
    )
    add_param_group = refused(
        "optimizer.add_param_group",
        "found after fit has begun, which shards the state; list all parameters in configure_optimizers, "
        "those "
        "that are frozen at first too",
    )

    def __getattr__(self, name: str) -> Any:
        """What the class does not have is the inner optimizer's."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def visible(inner: torch.optim.Optimizer) -> type[FitOptimizer]:
    """A class with the name of an optimizer's own, of which that one is an instance too."""
    return type(type(inner).__name__, (FitOptimizer, type(inner)), {})


def engine_settings(module: nn.Module, parallel: ParallelSettings, timeout: float) -> Config:
    """The settings of an engine around a module, in the format of its parameters.

    Raises:
        HexadError: as :func:`format_settings`.
    """
    return load_config(
        {
            "run": {"timeout": timeout},
            "parallel": {name: getattr(parallel, name) for name in parallel.model_fields_set},
            "precision": format_settings(module),
            "optimizer": {"clip": 0.0},
            "checkpoint": {"asynchronous": False},
        }
    )


def format_settings(module: nn.Module) -> dict[str, Any]:
    """The group ``precision`` of a module's parameters.

    Raises:
        HexadError: they have several formats, or another one than torch.optim updates.
    """
    formats = sorted({str(p.dtype).removeprefix("torch.") for p in trained(module)})
    known = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items() if name != "fp8"}
    if len(formats) != 1 or formats[0] not in known:
        raise HexadError(
            f"HexadStrategy: found trained parameters in {', '.join(formats) or 'no format'}, expected one "
            f"of {', '.join(known)}; convert the module, or choose Trainer(precision=...)"
        )
    precision: dict[str, Any] = {"dtype": known[formats[0]]}
    if precision["dtype"] == "fp16":
        precision["loss_scale"] = 1.0  # Lightning's plugins scale the loss, if at all
    return precision


class ModuleTraining:
    """An engine around a module, and the steps of its optimizer.

    Gradients are means over data ranks. They are in buckets, not in ``parameter.grad``: that has complete
    values, which may be changed, from :meth:`show` to the next step.

    Args:
        module: the same on all ranks; the first rank's values are used.
        mesh: of data ranks.
        config: of the engine.
        optimizer: of the module; parameters that it does not list are not trained.

    Attributes:
        optimizer: to be stepped.
        groups: names of the parameters in each of its groups, in their order.
        clip: the largest gradient norm of the next step; 0 for none.
        reads: parameters that hooks and steps have read with ``zero=3``.
        written: hooks may write to parameters between two steps.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, config: Config, optimizer: torch.optim.Optimizer
    ) -> None:
        self.module, self.clip, self.released = module, 0.0, False
        _check(optimizer, config, mesh)
        trained_before = trained(module)
        inner = adopted_optimizer(module, optimizer)
        self._frozen = [parameter for parameter in trained_before if not parameter.requires_grad]
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.groups = [[names[p] for p in group["params"]] for group in inner.param_groups]
        workload = ModuleWorkload(module, mesh, config, manners=_OF_MODULES)
        self.engine = Engine(workload, mesh, optimizer=inner, initialise=False)
        groups = self._rule.numbers()["groups"]
        identical("optimizer.param_groups", dict(enumerate(groups)), mesh.world)
        self.optimizer: FitOptimizer = visible(inner)(inner, self.engine, self._update, self.discard)
        self._accumulation = Accumulation(self.engine)
        self._limit: int | None = 1
        self._accumulation.begin(self._limit)
        self._overflowed = False  # all gradients have been replaced by NaN
        self._shown: list[tuple[Bucket, Tensor]] = []
        self._keep_own_weights()
        self.written = False
        self.reads = GatheredReads(self.engine)
        self.reads.checked = True
        self.engine.gatherer.absent = self.reads

    @property
    def _rule(self) -> TorchOptimizer:
        rule = self.engine.optimizer.rule
        assert isinstance(rule, TorchOptimizer)
        return rule

    def _keep_own_weights(self) -> None:
        """Keep the weights that belong to the module itself complete: Lightning calls its ``training_step``,
        not the module, so that no hook would gather them."""
        parameters = set(self.module.parameters(recurse=False))
        for bucket in self.engine.buckets:
            if any(declared.parameter in parameters for declared in bucket.members):
                self.engine.gatherer.acquire(bucket)

    # Backward passes

    def expect(self, passes: int | None) -> None:
        """Prepare for a backward pass, of a step of that many; None: their number is open, and nothing is
        reduced before :meth:`show` or the step."""
        self._adopt()
        self._limit = passes
        self._accumulation.expect(passes)

    def discard(self) -> None:
        """Discard the gradients accumulated so far."""
        self._hide()
        self._accumulation.discard(self._limit)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the module, which all ranks make alike: what it reads stays until its backward
        pass is over. What hooks have written before it counts."""
        self.take_written()
        self.reads.checked = False
        try:
            yield
        finally:
            self.reads.checked = True
            if not torch.is_grad_enabled():
                self.reads.release()

    def take_written(self) -> None:
        """Give master values what hooks have written to parameters."""
        self.reads.release(changed=True)
        copied = [bucket for bucket in self.engine.trained if bucket.plan.resident and not bucket.in_use]
        if self.written and copied:
            self.engine.gatherer.settle()
            for bucket in copied:
                bucket.adopt()

    # Gradients that hooks see

    def show(self, factor: float = 1.0) -> None:
        """Set ``grad`` of every trained parameter to its complete mean gradient, until the next step or
        backward pass, which take over what has been changed; all ranks together.

        Args:
            factor: what the gradients are about to be multiplied by, where they are sharded (a loss scaler).
        """
        self._adopt()
        if not self._accumulation.pending:
            return
        self._accumulation.reduce()
        for bucket in self.engine.trained:
            shards = self.engine.sharding[bucket.traits.grid].shards
            whole = bucket.gradient
            if shards.size > 1:
                whole = all_gather(bucket.gradient, shards)
                whole = whole * factor if factor != 1 else whole
            for member, declared in enumerate(bucket.members):
                parameter = declared.parameter
                parameter.grad = bucket.view(whole, member).view(parameter.shape).to(parameter.dtype)
            self._shown.append((bucket, whole))

    def _adopt(self) -> None:
        """Take over the gradients that hooks may have changed."""
        for bucket, whole in self._shown:
            for member, declared in enumerate(bucket.members):
                view, gradient = bucket.view(whole, member), declared.parameter.grad
                if gradient is None:
                    view.zero_()
                elif gradient.data_ptr() != view.data_ptr():
                    view.copy_(gradient.view(view.shape))
            if whole is not bucket.gradient:
                bucket.gradient.copy_(bucket.shard(whole))
        self._hide()

    def _hide(self) -> None:
        for bucket, _ in self._shown:
            for declared in bucket.members:
                declared.parameter.grad = None
        self._shown.clear()

    def main_parameters(self) -> Iterator[Any]:
        """Tensors whose ``grad`` may be changed elementwise: the parameters, while their gradients are shown,
        else this rank's shards."""
        if self._shown:
            yield from (declared.parameter for bucket, _ in self._shown for declared in bucket.members)
        elif self._accumulation.pending:
            self._accumulation.reduce()
            self._rule.show_gradients()
            for group in self.optimizer.param_groups:
                yield from group["params"]

    def agree_on_overflow(self) -> None:
        """Show a loss scaler of every rank what is not finite on any: it looks at this rank's shards."""
        if not self._accumulation.pending:
            return
        self._accumulation.reduce()
        self._overflowed = not math.isfinite(self.engine.optimizer.gradient_norm().item())
        for bucket in self.engine.trained if self._overflowed else ():
            bucket.gradient.fill_(math.nan)
        self._rule.show_gradients()

    def forget_overflow(self) -> None:
        """Discard the gradients of a step that a loss scaler has left out."""
        if self._overflowed:
            for bucket in self.engine.trained:
                bucket.gradient.zero_()  # no step writes to padding
            self._overflowed = False
            self.discard()

    # The step

    @torch.no_grad()
    def _update(self) -> None:
        self.take_written()
        self._adopt()
        self._accumulation.take_assigned("in on_before_optimizer_step")
        if not self._accumulation.pending:
            return
        self.engine.optimizer.clip, self.clip = self.clip, 0.0
        update = self._accumulation.update(self._limit, divisor=1)
        self.optimizer.overflow, self.optimizer._global_grad_norm = not update.applied, update.norm
        if not update.applied and not self.engine.mesh.rank:
            log.warning("step %d: gradients are not finite, nothing is updated", self.engine.step)

    # The end

    def release(self, gather: bool = True) -> None:
        """Make the module plain again, on the host; the state can still be saved. Without ``gather`` this is
        no collective, and parameters that are sharded have no values."""
        if self.released:
            return
        if gather:
            self.take_written()
        self._hide()
        self.engine.release(torch.device("cpu"), gather)
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self.released = True


def _check(optimizer: torch.optim.Optimizer, config: Config, mesh: Mesh) -> None:
    """Refuse optimizers that an engine cannot step."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HexadError(
            f"configure_optimizers: found {name}, which evaluates the loss several times in a step; use "
            "another"
        )
    if config.parallel.zero and mesh.data.size > 1 and not is_elementwise(optimizer):
        raise HexadError(
            f"configure_optimizers: found {name}, which may need complete parameters, with zero "
            f"{config.parallel.zero}; use zero=0, or if it treats every element by itself, set `elementwise "
            "= True` in its class"
        )


def group_states(state: Mapping[str, Any], groups: list[list[str]]) -> dict[str, dict[str, Any]]:
    """The state of every parameter by its name, in a ``state_dict`` of a ``torch.optim`` optimizer.

    Raises:
        HexadError: it is of an optimizer with other groups.
    """
    saved = [group["params"] for group in state["param_groups"]]
    if [len(group) for group in saved] != [len(group) for group in groups]:
        raise HexadError(
            f"optimizer: found groups of {[len(group) for group in saved]} parameters in the checkpoint, but "
            f"the module's have {[len(group) for group in groups]}; load it into the module that it was "
            "saved from"
        )
    numbers = {number: name for ids, names in zip(saved, groups) for number, name in zip(ids, names)}
    return {numbers[number]: values for number, values in state["state"].items()}


@torch.no_grad()
def send_buffers(buffers: list[Tensor], axis: Axis) -> None:
    """Give tensors the values of an axis's first rank, in one message for each format."""
    if axis.size == 1:
        return
    by_format: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        if buffer.numel():
            by_format.setdefault(buffer.dtype, []).append(buffer)
    for some in by_format.values():
        message = torch.cat([buffer.reshape(-1) for buffer in some])
        broadcast(message.view(torch.uint8), axis)
        if axis.rank:
            for buffer, values in zip(some, message.split([buffer.numel() for buffer in some])):
                buffer.copy_(values.view(buffer.shape))
