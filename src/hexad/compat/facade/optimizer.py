"""A script's ``torch.optim`` optimizer and learning-rate schedule in an engine: adopted, and what the script
holds of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hexad.config import HexadError

if TYPE_CHECKING:
    from hexad.engine.engine import Engine

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
"""What ``torch.optim`` takes: parameters, or groups of them."""
Method = Callable[[], None]


def refused(call: str, why: str) -> Callable[..., Any]:
    """A method ``call`` of another system that an engine cannot have; ``why`` says what to call instead."""

    def method(self: Any, *_: Any, **__: Any) -> Any:
        raise HexadError(f"{call}: {why}")

    method.__doc__ = f"Refused: {why}."
    return method


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that require gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def adopted_optimizer(
    module: nn.Module,
    optimizer_or_factory: Any,
    parameters: Parameters | None = None,
    keeps_groups: bool = False,
) -> torch.optim.Optimizer:
    """A script's optimizer, restricted to the parameters of a module.

    Args:
        module: whose parameters it updates; those that it does not list no longer require gradients.
        optimizer_or_factory: an optimizer, or a function of parameters that returns one.
        parameters: parameters, or groups of them; by default all that require gradients.
        keeps_groups: groups without parameters stay, so that their numbers agree on all ranks.

    Raises:
        HexadError: it is neither, has a parameter twice, or one that the module does not have.
    """
    trained_parameters: Any = trained(module) if parameters is None else list(parameters)
    parameters_of_module = set(module.parameters())
    if not trained_parameters and parameters_of_module and parameters is not None:
        raise HexadError("model_parameters: found none; pass those to train, or leave it out to train all")
    if not trained_parameters:  # of a pipeline's stage without parameters: torch refuses an empty list
        trained_parameters = [nn.Parameter(torch.zeros(1))]
    if isinstance(optimizer_or_factory, torch.optim.Optimizer):
        optimizer = optimizer_or_factory
    elif callable(optimizer_or_factory):
        optimizer = optimizer_or_factory(trained_parameters)
    else:
        raise HexadError(
            f"optimizer: found a {type(optimizer_or_factory).__name__}, expected a torch.optim.Optimizer or "
            "a function"
        )
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [tuple(parameter.shape) for parameter in listed if parameter not in parameters_of_module]
    if others and parameters_of_module:  # a pipeline's stage without parameters has a placeholder
        raise HexadError(
            f"optimizer: found {len(others)} of {len(listed)} parameters that the model does not have, the "
            f"first of shape {others[0]}; make them parameters of the model, or leave them out"
        )
    if len(set(listed)) < len(listed):
        raise HexadError("optimizer: found a parameter twice; each belongs to one group")
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in parameters_of_module]
    if not keeps_groups:
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    for parameter in set(trained(module)) - set(listed):
        parameter.requires_grad_(False)  # no optimizer would update it
    return optimizer


def adopted_scheduler(scheduler_or_factory: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """A script's learning-rate schedule of an adopted optimizer, or what its function returns for that.

    Raises:
        HexadError: it is neither, or would set the rates of another optimizer.
    """
    if not hasattr(scheduler_or_factory, "step") and not callable(scheduler_or_factory):
        raise HexadError(f"lr_scheduler: found {scheduler_or_factory!r}, expected a scheduler or a function")
    scheduler = (
        scheduler_or_factory if hasattr(scheduler_or_factory, "step") else scheduler_or_factory(optimizer)
    )
    updated = getattr(scheduler, "optimizer", None)
    while updated is not None and updated is not optimizer:
        updated = getattr(updated, "optimizer", None)
    if hasattr(scheduler, "optimizer") and updated is None:
        raise HexadError(
            "lr_scheduler: found one of another optimizer; make it of the optimizer that is passed to "
            "initialize, or pass a function that makes it"
        )
    return scheduler


class ModuleZeroGrad:
    """``zero_grad`` of a script's module, whose accumulated gradients an engine's method discards."""

    def __init__(self, module: nn.Module, discard: Method) -> None:
        self._module, self._discard = weakref.ref(module), weakref.WeakMethod(discard)

    def __call__(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated so far, and other tensors' ``grad``."""
        module = self._module()
        if module is not None:
            type(module).zero_grad(module, set_to_none)
        call_method(self._discard)

    def __reduce__(self) -> Any:
        """Copies of the module have torch's method."""
        module: Any = self._module()
        return partial, (type(module).zero_grad, module)


def call_method(method: weakref.WeakMethod[Method]) -> None:
    """Call a method of an engine that still exists: references to it would be cycles."""
    bound = method()
    if bound is not None:
        bound()


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer that ``initialize`` returns: the groups of the inner one, which the engine steps.

    Args:
        optimizer: the inner one.
        engine: that steps it.
        step: a method that reduces gradients and updates.
        discard: a method that discards the gradients accumulated so far.

    Attributes:
        optimizer: the inner one; its parameters are master values.
        overflow: the last step was skipped: its gradients were not finite.
        parameter_offload: what DeepSpeed's has at ZeRO 3; not there otherwise.
    """

    parameter_offload: Any

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Engine, step: Method, discard: Method
    ) -> None:
        # Not the base class's: groups and state are those of the inner optimizer.
        self.optimizer, self._engine, self.defaults = optimizer, engine, optimizer.defaults
        self._step, self._discard = weakref.WeakMethod(step), weakref.WeakMethod(discard)
        self.overflow, self._global_grad_norm = False, 0.0

    param_groups = property(attrgetter("optimizer.param_groups"))
    state = property(attrgetter("optimizer.state"))
    loss_scale = property(attrgetter("_engine.scaler.scale"), doc="The factor of the loss; 1 except in fp16.")
    cur_scale = loss_scale

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state, for inspection; see ``engine.save_checkpoint`` for saving."""
        return self.optimizer.state_dict()

    load_state_dict = refused("optimizer.load_state_dict", "state is sharded; use engine.load_checkpoint")
    add_param_group = refused(
        "optimizer.add_param_group", "found after initialize, which shards the state; call it before"
    )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Reduce the gradients accumulated so far and update, without a learning-rate schedule; all ranks
        together.

        Raises:
            HexadError: with a closure, or without gradients.
        """
        if closure is not None:
            raise HexadError("optimizer.step: found a closure; call backward before, and step without it")
        call_method(self._step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated for the next step, all ranks together; no effect with ZeRO 2, as
        in DeepSpeed. Not needed otherwise: a step begins without gradients."""
        call_method(self._discard)

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"
