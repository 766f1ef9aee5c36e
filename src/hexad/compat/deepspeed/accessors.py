"""What scripts ask DeepSpeed's engine: settings, sizes, rates, norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hexad.config.errors import did_you_mean
from hexad.launching.environment import environment

if TYPE_CHECKING:
    from hexad.engine.engine import Engine

    from .config import DeepSpeedConfig


_OF_MODULES = frozenset(dir(nn.Module))
"""Names that are no hint for a misspelt one."""


class Accessors(nn.Module):
    """The part of :class:`~hexad.compat.deepspeed.engine.DeepSpeedEngine` that changes nothing but rates."""

    _config: DeepSpeedConfig
    _engine: Engine
    _module: nn.Module
    _norm: float | None
    _applied: bool
    basic_optimizer: torch.optim.Optimizer | None

    @property
    def module(self) -> nn.Module:
        """The module, with the values of the last update where it is not sharded (ZeRO 3)."""
        self._engine.gatherer.settle()
        return self._module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("_module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            names = {*vars(self), *dir(type(self))} - _OF_MODULES
            own = sorted(each for each in names if not each.startswith("_"))
            hint = did_you_mean(name, own)
            raise AttributeError(
                f"{type(self).__name__} and its module have no {name!r}{hint or '; see docs/deepspeed.md'}"
            ) from None

    @property
    def config(self) -> Mapping[str, Any]:
        """What was read."""
        return self._config.tree

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return self._engine.mesh.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return environment().local_rank

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self._engine.mesh.layout.world

    @property
    def dp_world_size(self) -> int:
        """The number of data ranks."""
        return self._engine.mesh.data.size

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self._config.batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a backward pass."""
        return self._config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Backward passes of a step."""
        return self._config.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a backward pass, and backward passes of a step."""
        batch = self._config.batch
        return batch.total, batch.micro, batch.accumulation

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0 for none."""
        return self._engine.optimizer.clip

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self._config.keys.zero_optimization.stage

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self._config.keys.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self._config.keys.bf16.enabled

    def wall_clock_breakdown(self) -> bool:
        """As configured; it has no effect."""
        return self._config.keys.wall_clock_breakdown

    def steps_per_print(self) -> int | None:
        """Steps between lines of the log."""
        return self._config.keys.steps_per_print

    def loss_scale(self) -> float:
        """Of the next step."""
        return self._engine.scaler.scale

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, before clipping; None before the first."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the weights."""
        return self._applied

    def get_lr(self) -> list[float]:
        """Of every group."""
        return (
            []
            if self.basic_optimizer is None
            else [group["lr"] for group in self.basic_optimizer.param_groups]
        )

    def get_mom(self) -> list[Any]:
        """Momentum or betas of every group."""
        groups = [] if self.basic_optimizer is None else self.basic_optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def set_lr(self, lr: float) -> None:
        """Of every group."""
        for group in [] if self.basic_optimizer is None else self.basic_optimizer.param_groups:
            group["lr"] = lr

    def empty_partition_cache(self) -> None:
        """Nothing: complete values of sharded parameters are released after use."""

    def destroy(self) -> None:
        """No effect: an engine is freed when nothing refers to it."""
