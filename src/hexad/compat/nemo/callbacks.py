"""NeMo 2's callbacks that scripts and recipes name."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from .experiment import ModelCheckpoint

__all__ = ["GarbageCollectionCallback", "MegatronCommOverlapCallback", "ModelCheckpoint", "TimingCallback"]


class TimingCallback(Callback):
    """Logs the seconds of each step, ``train_step_timing in s``.

    Args:
        log_tokens_per_sec, timer_kwargs: accepted without effect.
    """

    def __init__(self, log_tokens_per_sec: bool = False, timer_kwargs: dict[str, Any] | None = None) -> None:
        self._begin = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stop it."""
        seconds = time.perf_counter() - self._begin
        pl_module.log("train_step_timing in s", seconds, batch_size=1, prog_bar=True)


class GarbageCollectionCallback(Callback):
    """Accepted without effect: an engine collects garbage between steps in any case."""

    def __init__(self, gc_interval_train: int = 1, gc_interval_val: int = 1) -> None:
        """Accepted without effect."""


class MegatronCommOverlapCallback(Callback):
    """Accepted without effect: communication overlaps with computation in any case."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accepted without effect."""
