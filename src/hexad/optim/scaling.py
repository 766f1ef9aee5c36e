"""Loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740). No torch."""

from __future__ import annotations

from typing import Any

from hexad.config.schema import PrecisionSettings


class LossScaler:
    """What the loss is multiplied by, so that small gradients do not vanish in fp16.

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

    def __init__(self, settings: PrecisionSettings) -> None:
        self._settings = settings
        self.active = settings.dtype == "fp16"
        self._dynamic = settings.loss_scale == "dynamic"
        self.scale = 1.0
        if self.active:
            fixed = settings.loss_scale
            self.scale = settings.loss_scale_initial if isinstance(fixed, str) else fixed
        self.exhausted = False
        self.delay = 0
        self._clean = 0
        self._patience = settings.loss_scale_hysteresis

    def delayed(self, steps: int) -> None:
        """Set :attr:`delay`, before the first step."""
        self.delay, self._clean = steps, -steps

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
        """For a checkpoint; empty where nothing is scaled."""
        if not self.active:
            return {}
        return {"scale": self.scale, "clean": self._clean, "patience": self._patience}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state`; a fixed scale, or a run without fp16, stays as configured."""
        if state and self.active and self._dynamic:
            self.scale, self._clean = float(state["scale"]), int(state["clean"])
            self._patience = int(state["patience"])
