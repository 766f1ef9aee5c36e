"""NeMo 2's optimizer and learning-rate modules, as settings of Hexad's AdamW and schedules."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule

from hexad.config import HexadError

from ..lightning.module import HexadModule
from ..megatron.settings import OptimizerConfig, check_update


class LRSchedulerModule:
    """The base class of learning-rate schedules.

    Args:
        warmup_steps: of linear warm-up: step ``n`` has ``n / (warmup_steps + 1)`` of the rate.
        warmup_ratio: in place of that, a fraction of ``max_steps``.
        max_steps: where a schedule ends; that of the trainer counts.
        min_lr: at the end.
        interval, frequency, monitor: ``step`` and 1; the last has no effect.

    Raises:
        HexadError: values that are not supported.
    """

    kind = "constant"

    def __init__(
        self,
        warmup_steps: int | None = 750,
        warmup_ratio: float | None = None,
        max_steps: int | None = None,
        min_lr: float = 0.0,
        interval: str = "step",
        frequency: int = 1,
        monitor: str = "val_loss",
    ) -> None:
        if (interval, frequency) != ("step", 1):
            raise HexadError(
                f"{type(self).__name__}: found interval={interval!r} and frequency={frequency}; rates change "
                "in every step: use step and 1"
            )
        self.max_steps, self.warmup_steps, self.warmup_ratio = max_steps, warmup_steps, warmup_ratio
        self.min_lr = min_lr

    def settings(self, steps: int) -> dict[str, Any]:
        """The group ``lr_schedule`` of a run of so many steps.

        Raises:
            HexadError: the schedule depends on their number, which is not known.
        """
        if steps < 1 and (self.kind != "constant" or self.warmup_ratio is not None):
            raise HexadError(
                f"Trainer: found max_steps={steps} with {type(self).__name__}, whose rates depend on it; set "
                "max_steps"
            )
        warmup = self.warmup_steps or 0
        if self.warmup_ratio is not None:
            warmup = int(self.warmup_ratio * steps)
        # NeMo's step n - 1 with w steps of warm-up has n / (w + 1); its decay begins at step w.
        settings = {"kind": self.kind, "warmup": warmup + 1}
        if self.kind == "constant":
            return settings
        # A run may end within its warm-up.
        return {**settings, "min_lr": self.min_lr, "decay_steps": max(steps, warmup + 1) + 1}


class WarmupPolicyScheduler(LRSchedulerModule):
    """Constant after warm-up."""


class CosineAnnealingScheduler(LRSchedulerModule):
    """A cosine from the highest rate to ``min_lr``, which the last ``constant_steps`` have.

    Args:
        max_steps: the trainer's count.
        warmup_steps: of linear warm-up; with ``constant_steps`` the first has the rate 0.
        constant_steps: at the end.
        min_lr: at the end.
        interval, frequency, monitor: as of the base class.
    """

    kind = "cosine"

    def __init__(
        self,
        max_steps: int = 10,
        warmup_steps: int = 750,
        constant_steps: int = 80000,
        min_lr: float = 6e-5,
        interval: str = "step",
        frequency: int = 1,
        monitor: str = "val_loss",
    ) -> None:
        super().__init__(warmup_steps, None, max_steps, min_lr, interval, frequency, monitor)
        self.constant_steps = constant_steps

    def settings(self, steps: int) -> dict[str, Any]:
        """The group ``lr_schedule`` of a run of so many steps.

        Raises:
            HexadError: warm-up and constant steps are all of them.
        """
        settings = super().settings(steps)
        if not self.constant_steps:
            return settings
        end = steps - self.constant_steps
        if end <= self.warmup_steps:  # type: ignore[operator]
            raise HexadError(
                f"CosineAnnealingScheduler: found warmup_steps={self.warmup_steps} and constant_steps="
                f"{self.constant_steps} of {steps} steps; lower them, constant_steps=0 for none"
            )
        return {**settings, "warmup": self.warmup_steps, "decay_steps": end}


class WarmupAnnealingScheduler(LRSchedulerModule):
    """Linear from the highest rate to ``min_lr``."""

    kind = "linear"


class OptimizerModule:
    """The base class of optimizer modules.

    Args:
        lr_scheduler: the schedule of learning rates.
    """

    def __init__(self, lr_scheduler: LRSchedulerModule | None = None) -> None:
        self.lr_scheduler = lr_scheduler


class MegatronOptimizerModule(OptimizerModule):
    """AdamW as ``config`` says, whose learning rates follow a schedule.

    Args:
        config: of the optimizer.
        lr_scheduler: its schedule; None: a constant rate.
        no_weight_decay_cond, scale_lr_cond: None.
        lr_mult: 1.

    Raises:
        HexadError: values that are not supported.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        lr_scheduler: LRSchedulerModule | None = None,
        no_weight_decay_cond: Callable[..., Any] | None = None,
        scale_lr_cond: Callable[..., Any] | None = None,
        lr_mult: float = 1.0,
    ) -> None:
        if no_weight_decay_cond is not None or scale_lr_cond is not None or lr_mult != 1.0:
            raise HexadError(
                "MegatronOptimizerModule: found no_weight_decay_cond, scale_lr_cond or lr_mult; return an "
                "optimizer of torch.optim with groups from configure_optimizers, and leave them out"
            )
        if lr_scheduler is not None and not isinstance(lr_scheduler, LRSchedulerModule):
            raise HexadError(
                f"MegatronOptimizerModule: found lr_scheduler={type(lr_scheduler).__name__}, expected one of "
                "hexad.compat.nemo.lr_scheduler"
            )
        self.config, self.lr_scheduler = config, lr_scheduler

    def connect(self, model: LightningModule) -> None:
        """Make it the optimizer of a module."""
        model.optim = self  # type: ignore[assignment]
        if isinstance(model, HexadModule):  # whose settings have it
            return

        def configured(module: LightningModule) -> Any:
            strategy: Any = module.trainer.strategy
            engine_module = strategy.engine_module
            if engine_module is None:
                raise HexadError(
                    f"MegatronOptimizerModule: found a {type(module).__name__} without NeMo's hooks; "
                    "return an optimizer of torch.optim from its configure_optimizers"
                )
            return engine_module.configured_optimizer(engine_module.settings())

        model.configure_optimizers = MethodType(configured, model)  # type: ignore[method-assign]

    def settings(self, steps: int) -> dict[str, dict[str, Any]]:
        """The groups ``optimizer``, ``lr_schedule`` and ``memory`` of a run of so many steps.

        Raises:
            HexadError: another optimizer, or no learning rate.
        """
        config = self.config
        check_update(config)
        if config.optimizer != "adam":
            raise HexadError(
                f"OptimizerConfig.optimizer: found {config.optimizer!r}; use adam, which is AdamW"
            )
        if config.lr is None:
            raise HexadError("OptimizerConfig.lr: found None; name the learning rate")
        optimizer = {
            "name": "adamw",
            "lr": config.lr,
            "betas": [config.adam_beta1, config.adam_beta2],
            "eps": config.adam_eps,
            "weight_decay": config.weight_decay,
            "clip": config.clip_grad,
        }
        if config.decoupled_lr is not None:
            optimizer["decoupled_lr"] = config.decoupled_lr
        constant = {"kind": "constant", "warmup": 0}
        schedule = constant if self.lr_scheduler is None else self.lr_scheduler.settings(steps)
        if config.decoupled_min_lr is not None and config.decoupled_lr is not None:
            schedule = {**schedule, "decoupled_min_lr": config.decoupled_min_lr}
        tree = {"optimizer": optimizer, "lr_schedule": schedule}
        return {**tree, "memory": {"offload": "optimizer"}} if config.optimizer_cpu_offload else tree
