"""The optimizer and the learning-rate schedule that a DeepSpeed configuration names, or that a script passes
in their place."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from hexad.config import ConfigError, HexadError
from hexad.config.errors import did_you_mean
from hexad.optim.torch_optimizer import is_elementwise

from ..facade.optimizer import EngineOptimizer, Parameters, adopted_optimizer, adopted_scheduler
from .keys import Keys
from .keys import Optimizer as OptimizerKeys
from .lr_schedules import SCHEDULES

DeepSpeedOptimizer = ZeROOptimizer = EngineOptimizer
"""Names of ``runtime.base_optimizer``, which scripts use with ``isinstance``."""

_DROPPED = "max_grad_norm torch_adam adam_w_mode fp32_optimizer_states freeze_step cuda_aware".split()
_MISSING = ("Lamb", "Lion", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD")
"""Optimizers of DeepSpeed that ``torch.optim`` lacks, or defines differently."""


class _Uncorrected:
    """Adam without bias correction: PyTorch's with settings, in every step, that undo it.

    Its step is ``lr / c1 * m / (sqrt(v / c2) + eps)`` with ``c = 1 - beta ** t``; with ``lr * c1 / sqrt(c2)``
    and ``eps / sqrt(c2)`` in place of ``lr`` and ``eps`` it is ``lr * m / (sqrt(v) + eps)``.
    """

    elementwise = True
    decoupled: bool

    def step(self: Any, closure: Any = None) -> Any:
        """Update."""
        kept = [(group["lr"], group["eps"], group["weight_decay"]) for group in self.param_groups]
        for group, (lr, eps, decay) in zip(self.param_groups, kept):
            updated = next((p for p in group["params"] if p.grad is not None), None)
            updates = 1 + float(self.state[updated].get("step", 0)) if updated is not None else 1
            first, second = (1 - beta**updates for beta in group["betas"])
            group["lr"], group["eps"] = lr * first / math.sqrt(second), eps / math.sqrt(second)
            group["weight_decay"] = decay * math.sqrt(second) / first if self.decoupled else decay
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            for group, settings in zip(self.param_groups, kept):
                group["lr"], group["eps"], group["weight_decay"] = settings


class UncorrectedAdamW(_Uncorrected, torch.optim.AdamW):
    """AdamW without bias correction."""

    decoupled = True


class UncorrectedAdam(_Uncorrected, torch.optim.Adam):
    """Adam without bias correction."""

    decoupled = False


def fused_adam(
    params: Parameters,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """``deepspeed.ops.adam.FusedAdam``: AdamW, unless ``adam_w_mode`` is false, with DeepSpeed's defaults;
    ``set_grad_none`` has no effect."""
    if bias_correction:
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    else:
        kind = UncorrectedAdamW if adam_w_mode else UncorrectedAdam
    betas = (betas[0], betas[1])
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def cpu_adam(
    model_params: Parameters,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """``deepspeed.ops.adam.DeepSpeedCPUAdam``: as :func:`fused_adam`. States are in float32; where they are
    depends on ``zero_optimization.offload_optimizer``.

    Raises:
        HexadError: states in 16 bits.
    """
    if not fp32_optimizer_states:
        raise HexadError("fp32_optimizer_states: found False, but states are in float32; use True")
    return fused_adam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


def from_keys(keys: OptimizerKeys, parameters: Parameters) -> torch.optim.Optimizer:
    """The optimizer that ``optimizer`` names.

    Raises:
        ConfigError: an unknown one, or arguments that it does not take.
    """
    name = keys.type
    kind: Callable[..., torch.optim.Optimizer]
    params = {key: _plain_number(key, value) for key, value in keys.params.items() if key not in _DROPPED}
    if name.lower() in ("adam", "adamw"):
        decoupled = name.lower() == "adamw" or keys.params.get("adam_w_mode", True)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not keys.params.get("torch_adam"):
            kind = partial(fused_adam, adam_w_mode=decoupled)
    else:
        kind = _named(name)
    check_names("optimizer.params", keys.params, kind, name, _DROPPED)
    try:
        return kind(parameters, **params)
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError("optimizer.params", f"found {dict(keys.params)} for {name}: {error}") from None


def check_names(
    field: str, params: Mapping[str, Any], kind: Callable[..., Any], name: str, others: Iterable[str] = ()
) -> None:
    """Refuse parameters of the section ``field`` that ``kind``, or ``name``, takes neither after its first
    argument nor among ``others``."""
    taken = [*list(signature(kind).parameters)[1:], *others]
    for key in params:
        if key not in taken:
            hint = did_you_mean(key, taken) or f"; known: {', '.join(dict.fromkeys(taken))}"
            raise ConfigError(f"{field}.{key}", f"not a parameter of {name}{hint}")


def _plain_number(key: str, value: Any) -> Any:
    """A parameter as numbers: files have ``"1e-3"``, and lists in place of tuples."""
    field = f"optimizer.params.{key}"
    if key in ("lr", "eps", "weight_decay", "momentum"):
        try:
            if isinstance(value, bool):
                raise TypeError
            return value if isinstance(value, Tensor) else float(value)
        except (TypeError, ValueError):
            raise ConfigError(field, f"found {value!r}, expected a number") from None
    if key == "betas":
        numbers = isinstance(value, list | tuple) and all(isinstance(beta, int | float) for beta in value)
        if not numbers or len(value) != 2:
            raise ConfigError(field, f"found {value!r}, expected two numbers, such as [0.9, 0.999]")
        return tuple(value)
    return value


def _named(name: str) -> type[torch.optim.Optimizer]:
    """The class of ``torch.optim`` with a name, in any case."""
    if name.lower() in map(str.lower, _MISSING):
        raise ConfigError(
            "optimizer.type",
            f"found {name}, which torch.optim lacks or defines differently; use AdamW, or, with "
            "zero_optimization.stage 0, pass an optimizer of another package to initialize(optimizer=)",
        )
    kinds = (value for value in vars(torch.optim).values() if isinstance(value, type))
    known = {kind.__name__: kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
    del known["Optimizer"]
    for key, kind in known.items():
        if key.lower() == name.lower():
            return kind
    hint = did_you_mean(name, known) or f"; known: {', '.join(sorted(known))}"
    raise ConfigError("optimizer.type", f"unknown optimizer {name!r}{hint}")


def client_optimizer(
    module: nn.Module,
    keys: Keys,
    optimizer_or_factory: Any,
    parameters: Parameters | None,
    keeps_groups: bool,
) -> torch.optim.Optimizer | None:
    """The optimizer of a script, or that its configuration names; None if there is neither. Arguments and
    errors are those of :func:`~hexad.compat.facade.optimizer.adopted_optimizer`; what may not be elementwise
    cannot be sharded."""
    if optimizer_or_factory is None:
        if keys.optimizer is None:
            return None
        optimizer_or_factory = partial(from_keys, keys.optimizer)
    optimizer = adopted_optimizer(module, optimizer_or_factory, parameters, keeps_groups)
    stage = keys.zero_optimization.stage
    if stage and not keys.zero_allow_untested_optimizer and not is_elementwise(optimizer):
        raise ConfigError(
            "zero_optimization.stage",
            f"found {stage} with {type(optimizer).__name__}, which may need complete parameters, but would "
            "receive flat shards of several; use stage 0, or set zero_allow_untested_optimizer to true",
        )
    return optimizer


def client_scheduler(scheduler_or_factory: Any, optimizer: torch.optim.Optimizer | None, keys: Keys) -> Any:
    """The learning-rate schedule of a script, or that its configuration names; None if there is neither.

    Raises:
        HexadError: it is neither, cannot be made, or would set the rates of another optimizer.
    """
    if scheduler_or_factory is not None:
        return adopted_scheduler(scheduler_or_factory, optimizer)
    if keys.scheduler is None or optimizer is None:
        return None
    name, params = keys.scheduler.type, keys.scheduler.params
    kinds = {**vars(torch.optim.lr_scheduler), **SCHEDULES}
    if not callable(kinds.get(name)):
        hint = did_you_mean(name, SCHEDULES) or f"; known: {', '.join(SCHEDULES)}"
        raise HexadError(
            f"scheduler.type: unknown scheduler {name!r}{hint}, and those of torch.optim.lr_scheduler"
        )
    check_names("scheduler.params", params, kinds[name], name)
    try:
        return kinds[name](optimizer, **params)
    except (TypeError, ValueError) as error:
        raise HexadError(f"scheduler.params: found {params} for {name}: {error}") from None
