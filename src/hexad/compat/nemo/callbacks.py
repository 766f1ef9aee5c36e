"""NeMo 2's callbacks that scripts and recipes name."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from hexad.comm import merged
from hexad.config import HexadError
from hexad.planning.costs import flops_per_token

from .experiment import ModelCheckpoint
from .models import GPTModel
from .utils import get_rank

__all__ = [
    "DdpParityChecker",
    "DeltaTimingCallback",
    "FLOPsMeasurementCallback",
    "GarbageCollectionCallback",
    "JitConfig",
    "JitTransform",
    "MegatronCommOverlapCallback",
    "MegatronEnableExperimentalCallback",
    "MegatronProgressBar",
    "MemoryProfileCallback",
    "ModelCheckpoint",
    "ModelTransform",
    "NsysCallback",
    "PreemptionCallback",
    "ProgressPrinter",
    "TimingCallback",
]

log = logging.getLogger("hexad")


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


class DeltaTimingCallback(TimingCallback):
    """Logs the seconds of each step; see :class:`TimingCallback`.

    Args:
        timer_kwargs: accepted without effect.
    """

    def __init__(self, timer_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__()


class FLOPsMeasurementCallback(Callback):
    """Logs the arithmetic of training in 10^12 FLOPs per second, ``TFLOPS`` and ``TFLOPS_per_GPU``, of the
    steps since it did so last: forward and backward pass, nothing recomputed (``planning/costs.py``).

    Args:
        model_config, data_config, model_name: accepted without effect: the model's settings are read.
    """

    def __init__(self, model_config: Any, data_config: Any, model_name: str) -> None:
        self._begin, self._samples = 0.0, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock.

        Raises:
            HexadError: another model than an ``llm.GPTModel``.
        """
        if not isinstance(pl_module, GPTModel):
            raise HexadError(
                f"FLOPsMeasurementCallback: found a {type(pl_module).__name__}; it is for an llm.GPTModel"
            )
        self._begin, self._samples = time.perf_counter(), _samples(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the rate, in steps that are logged."""
        assert isinstance(pl_module, GPTModel)
        if (trainer.global_step % trainer.log_every_n_steps) or not trainer.global_step:  # type: ignore[attr-defined]
            return
        now, samples, config = time.perf_counter(), _samples(pl_module), pl_module.config
        sequence = config.data.sequence
        flops = flops_per_token(config.model, sequence) * sequence * (samples - self._samples)
        rate = flops / (now - self._begin) / 1e12
        self._begin, self._samples = now, samples
        pl_module.log("TFLOPS", rate, batch_size=1)
        pl_module.log("TFLOPS_per_GPU", rate / trainer.world_size, batch_size=1, prog_bar=True)


def _samples(module: GPTModel) -> int:
    """The samples that a model has consumed."""
    assert module.engine is not None
    return module.engine.samples


class PreemptionCallback(Callback):
    """Stops all ranks after the step in which one of them receives a signal; the last step is saved, where
    checkpoints are.

    Args:
        sig: number of the signal; by default ``SIGTERM``.
    """

    def __init__(self, sig: int | None = None) -> None:
        self.sig = signal.SIGTERM if sig is None else sig
        self._received = False
        self._before: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the signal; only the main thread can."""
        self._received = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(self.sig, self._receive)

    def _receive(self, *_: Any) -> None:
        self._received = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stop, if any rank has received it."""
        mesh = getattr(trainer.strategy, "mesh", None)
        stop = self._received if mesh is None else merged(self._received, mesh.world, max)
        if stop:
            log.warning("signal %d: training stops after step %d", self.sig, trainer.global_step)
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle the signal as before."""
        if self._before is not None:
            signal.signal(self.sig, self._before)
            self._before = None


class NsysCallback(Callback):
    """Starts and stops the profiler of a GPU that Nsight Systems listens to; no-op on a CPU.

    Args:
        start_step, end_step: steps in front of which it is started, and after which it is stopped.
        ranks: that are profiled.
        gen_shape: record shapes of operators.
        nvtx_ranges: accepted without effect: ranges are named in any case.
    """

    def __init__(
        self,
        start_step: int,
        end_step: int,
        ranks: Sequence[int] = (0,),
        gen_shape: bool = False,
        nvtx_ranges: bool = False,
    ) -> None:
        if end_step < start_step:
            raise HexadError(f"NsysCallback: found end_step={end_step} before start_step={start_step}")
        self.start_step, self.end_step, self.ranks = start_step, end_step, tuple(ranks)
        self.gen_shape = gen_shape
        self._shapes: Any = None

    def _active(self, trainer: Trainer) -> bool:
        return trainer.strategy.root_device.type == "cuda" and get_rank() in self.ranks

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start, in front of ``start_step``."""
        if trainer.global_step == self.start_step and self._active(trainer):
            torch.cuda.profiler.start()
            self._shapes = torch.autograd.profiler.emit_nvtx(record_shapes=self.gen_shape)
            self._shapes.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop, after ``end_step``."""
        if self._shapes is not None and trainer.global_step > self.end_step:
            self._shapes.__exit__(None, None, None)
            self._shapes = None
            torch.cuda.profiler.stop()


class MemoryProfileCallback(Callback):
    """Writes a snapshot of a GPU's allocations, ``memory_snapshot-rank<N>.pickle``; no-op on a CPU.

    Args:
        dir: where it is written.
        warn_cycles: accepted without effect.
        ranks: that write one; empty for all.
    """

    def __init__(
        self, dir: str = "/mem_profile", warn_cycles: bool = True, ranks: Sequence[int] = ()
    ) -> None:
        self.dir, self.ranks = Path(dir), tuple(ranks)

    def _active(self, trainer: Trainer) -> bool:
        recorded = not self.ranks or get_rank() in self.ranks
        return recorded and trainer.strategy.root_device.type == "cuda"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to record."""
        if self._active(trainer):
            torch.cuda.memory._record_memory_history(max_entries=100_000)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the snapshot."""
        if self._active(trainer):
            self.dir.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.dir / f"memory_snapshot-rank{get_rank()}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


class GarbageCollectionCallback(Callback):
    """Accepted without effect: an engine collects garbage between steps in any case."""

    def __init__(self, gc_interval_train: int = 1, gc_interval_val: int = 1) -> None:
        """Accepted without effect."""


class MegatronCommOverlapCallback(Callback):
    """Accepted without effect: communication overlaps with computation in any case."""

    def __init__(
        self,
        tp_comm_overlap: bool | None = None,
        tp_comm_overlap_cfg: Any = None,
        tp_comm_bootstrap_backend: str | None = None,
        overlap_p2p_comm: bool | None = None,
        batch_p2p_comm: bool | None = None,
        overlap_grad_reduce: bool | None = None,
        overlap_param_gather: bool | None = None,
        overlap_param_gather_with_optimizer_step: bool | None = None,
        align_param_gather: bool | None = None,
        bucket_size: int | None = None,
        defer_embedding_wgrad_compute: bool | None = None,
        wgrad_deferral_limit: int | None = None,
    ) -> None:
        """Accepted without effect."""


class MegatronEnableExperimentalCallback(Callback):
    """Accepted without effect: Hexad has no experimental functions."""


class DdpParityChecker(Callback):
    """Accepted without effect: data ranks compare their parameters in any case (``log.check_replicas``)."""

    def __init__(self, interval: int = 0) -> None:
        """Accepted without effect."""


class ModelTransform(Callback):
    """Accepted without effect: adapters are part of a model's settings."""


class MegatronProgressBar(Callback):
    """Accepted without effect: Lightning's progress bar counts steps in any case."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accepted without effect."""


class ProgressPrinter(Callback):
    """Accepted without effect: Lightning's progress bar counts steps in any case."""

    def __init__(
        self,
        log_interval: int = 1,
        skip_accumulate_metrics: Sequence[str] = (),
        exclude_metrics: Sequence[str] = (),
    ) -> None:
        """Accepted without effect."""


@dataclass
class JitConfig:
    """Accepted without effect: ``run.compile`` names what is compiled."""

    module_selector: str = ""
    use_torch: bool = False
    torch_kwargs: dict[str, Any] = field(default_factory=dict)
    use_thunder: bool = False
    profile_thunder: bool = False


class JitTransform(Callback):
    """Accepted without effect: ``run.compile`` names what is compiled."""

    def __init__(self, config: JitConfig) -> None:
        """Accepted without effect."""
