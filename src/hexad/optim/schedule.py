"""Learning rate and loss scale as functions of the steps so far (Micikevicius et al., arXiv 1710.03740), and
what AdamW keeps of every value. No torch."""

import math
from typing import Any, NamedTuple

from hexad.config.schema import LrScheduleSettings, OptimizerSettings, PrecisionSettings


def decay_steps(schedule: LrScheduleSettings, total_steps: float) -> int:
    """``lr_schedule.decay_steps`` as a number: ``auto`` is the end of the run, of wsd its last fifth."""
    if schedule.decay_steps != "auto":
        return schedule.decay_steps
    return max(1, int(total_steps // 5) if schedule.kind == "wsd" else round(total_steps))


def cut_short(schedule: LrScheduleSettings, total_steps: float) -> bool:
    """Whether a run ends before its learning rate is ``min_lr``."""
    return schedule.kind in ("linear", "cosine") and decay_steps(schedule, total_steps) > round(total_steps)


class LearningRates(NamedTuple):
    """Learning rates of a step: of most weights, and of the embedding and the output head."""

    lr: float
    decoupled: float


def learning_rates(
    optimizer: OptimizerSettings, schedule: LrScheduleSettings, total_steps: float, step: float
) -> LearningRates:
    """Learning rates of step ``step``, counted from 1; with ``batch.ramp`` numbers of steps are samples over
    ``batch.global``."""
    lr = learning_rate(schedule, optimizer.lr, total_steps, step)
    peak, low = optimizer.decoupled_lr, schedule.decoupled_min_lr
    if peak is None:
        return LearningRates(lr, lr)
    decoupled_schedule = schedule if low is None else schedule.model_copy(update={"min_lr": low})
    return LearningRates(lr, learning_rate(decoupled_schedule, peak, total_steps, step))


def learning_rate(schedule: LrScheduleSettings, peak: float, total_steps: float, step: float) -> float:
    """Learning rate of step ``step``, counted from 1, of weights whose highest rate is ``peak``.

    Linear warm-up from 0 to ``peak`` at step ``warmup``; then, until ``decay_steps``:
    ``constant``; ``linear`` or ``cosine`` (Loshchilov & Hutter, arXiv 1608.03983) to ``min_lr``;
    ``wsd``, constant with a linear decay over the last steps (Hu et al., arXiv 2404.06395);
    ``inverse_sqrt``, ``peak * sqrt(warmup / step)`` (arXiv 1706.03762), not below ``min_lr``.
    """
    warmup = schedule.warmup
    if step < warmup:
        return peak * step / warmup
    low = min(schedule.min_lr, peak)
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "inverse_sqrt":
        return max(low, peak * math.sqrt(max(warmup, 1) / max(step, 1)))
    if schedule.kind == "wsd":
        begin, end = max(warmup, total_steps - decay_steps(schedule, total_steps)), total_steps
    else:
        begin, end = warmup, decay_steps(schedule, total_steps)
    if end <= begin:  # the run ends with its warm-up
        return peak
    done = 1.0 if step >= end else max(0, step - begin) / (end - begin)
    if schedule.kind == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return peak + (low - peak) * done


class LossScaler:
    """The loss scale, which keeps small gradients from vanishing in fp16.

    Dynamic scaling follows Megatron-LM: ``loss_scale_hysteresis`` overflows without a growth
    in between halve the scale, as does every one that follows, down to ``loss_scale_min``;
    ``loss_scale_window`` steps in a row without one double it, and forgive earlier overflows. A number as
    ``loss_scale`` stays as it is. Without fp16 the scale is 1.

    Attributes:
        scale: of the next step.
        delay: clean steps at the start, and after an overflow, that do not count; 1 in DeepSpeed.
        exhausted: the last step overflowed and no smaller scale is left to try. Without fp16, or with a fixed
            scale, that is after any step whose gradients were not finite.
    """

    def __init__(self, settings: PrecisionSettings, delay: int = 0) -> None:
        self._settings = settings
        self.active = settings.dtype == "fp16"
        self._dynamic = settings.loss_scale == "dynamic"
        self.scale = 1.0
        if self.active:
            fixed = settings.loss_scale
            self.scale = settings.loss_scale_initial if isinstance(fixed, str) else fixed
        self.exhausted = False
        self.delay, self._clean = delay, -delay
        self._patience = settings.loss_scale_hysteresis

    def update(self, overflow: bool) -> None:
        """Take note of a step, whose gradients were all finite or not."""
        self.exhausted = False
        if not (self.active and self._dynamic):
            self.exhausted = overflow
            return
        settings = self._settings
        if overflow:
            self._clean = -self.delay
            self._patience -= 1
            if self._patience <= 0:
                self.exhausted = self.scale <= settings.loss_scale_min
                self.scale = max(self.scale / 2, settings.loss_scale_min)
            return
        self._clean += 1
        if settings.loss_scale_consecutive:
            self._patience = settings.loss_scale_hysteresis
        if self._clean >= settings.loss_scale_window:
            self._clean = 0
            self._patience = settings.loss_scale_hysteresis
            self.scale *= 2

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; empty where nothing is scaled."""
        if not self.active:
            return {}
        return {"scale": self.scale, "clean": self._clean, "patience": self._patience}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state`; a fixed scale, or a run without fp16, stays as configured."""
        if state and self.active and self._dynamic:
            self.scale, self._clean = float(state["scale"]), int(state["clean"])
            self._patience = int(state["patience"])


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in PyTorch's optimizer; each is as large as the master values, and in their format."""


def update_bytes(
    parameter: int, gradient: int, master: int, copied: bool, compiled: bool, scaled: bool = False
) -> int:
    """Bytes of memory that an AdamW update on the device reads and writes per parameter of a shard: for the
    norm, the update, and the copy in the model's format.

    Args:
        parameter, gradient, master: bytes of an element of each.
        copied: the values that the model computes with are a copy: where formats differ, not in ZeRO 3, which
            gathers from the master values.
        compiled: the update and the copy are one pass; else PyTorch's fused kernel and a second pass.
        scaled: gradients are clipped, or the loss was scaled: the fused kernel writes them back.
    """
    norm, state, copy = gradient, 2 * (1 + len(MOMENTS)) * master, parameter if copied else 0
    if compiled:
        return norm + gradient + state + copy
    widening = gradient + master if gradient != master else 0
    return norm + widening + (2 if scaled else 1) * master + state + (master + copy if copied else 0)
