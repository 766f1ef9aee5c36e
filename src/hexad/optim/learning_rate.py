"""The learning rate as a function of the step. No torch."""

from __future__ import annotations

import math

from hexad.config.schema import LrScheduleSettings


def decay_steps(schedule: LrScheduleSettings, total_steps: int) -> int:
    """``lr_schedule.decay_steps`` as a number: ``auto`` is the end of the run, of wsd its last fifth."""
    if schedule.decay_steps != "auto":
        return schedule.decay_steps
    return max(1, total_steps // 5) if schedule.kind == "wsd" else total_steps


def learning_rate(schedule: LrScheduleSettings, peak: float, total_steps: int, step: int) -> float:
    """Learning rate of step ``step``, counted from 1.

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
