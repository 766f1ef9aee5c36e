"""AdamW on buckets, with the global gradient norm and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hexad.comm import Pending, all_reduce
from hexad.config.schema import OptimizerSettings
from hexad.parallel.data import Bucket
from hexad.topology.mesh import Axis

_STATE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class NormAxes:
    """The axes over which squares of gradients are summed: ``tensor`` those of divided parameters, ``shards``
    (data ranks that keep different shares) and ``pipeline`` all."""

    tensor: Axis
    shards: Axis
    pipeline: Axis


class BucketAdamW:
    """PyTorch's fused AdamW over this rank's share of every bucket.

    Master values and state are where the buckets' master is: on the device, or in the host's memory.

    Args:
        buckets: those whose kind says so get weight decay.
        settings: ``optimizer`` settings.
        axes: over which the gradient norm is summed.
    """

    def __init__(self, buckets: Sequence[Bucket], settings: OptimizerSettings, axes: NormAxes) -> None:
        self.buckets = buckets
        self.settings = settings
        self.axes = axes
        self._updates = [self._adamw(bucket) for bucket in buckets]

    def _adamw(self, bucket: Bucket) -> torch.optim.AdamW:
        """One optimizer per bucket, so that a bucket can be gathered while the next is updated."""
        settings, master = self.settings, bucket.master
        decay = settings.weight_decay if bucket.kind.decay else 0.0
        adamw = torch.optim.AdamW(
            [master], lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay, fused=True
        )
        adamw.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            **{name: torch.zeros_like(master) for name in _STATE},
        }
        return adamw

    def gradient_norm(self) -> torch.Tensor:
        """Euclidean norm of the whole model's gradient, as a scalar tensor on the device.

        Parameters divided over the tensor axis are summed over it; those that several ranks hold count once.
        Those too are summed over it, in parts, so that all ranks see the same bits, and a NaN of any.
        """
        squares = torch.zeros(2, dtype=self._wide, device=self.buckets[0].gradient.device)
        for bucket in self.buckets:
            if not bucket.kind.copy:
                norm = torch.linalg.vector_norm(bucket.gradient, dtype=self._wide)
                squares[0 if bucket.kind.sharded else 1] += norm.square()
        squares[1] /= self.axes.tensor.size
        total = squares.sum(0, keepdim=True)
        for axis in (self.axes.shards, self.axes.tensor, self.axes.pipeline):
            total = all_reduce(total, axis)
        return total[0].sqrt()

    @torch.no_grad()
    def step(
        self, lr: float, scale: float, publish: Callable[[Bucket], None], veto: Pending | None = None
    ) -> float:
        """Clip to ``optimizer.clip`` and update at learning rate ``lr``; returns the norm before clipping.

        Args:
            lr: learning rate.
            scale: what the gradients are multiplied by (loss scaling).
            publish: called with each bucket after its update, in the order of the forward pass.
            veto: anything but 0 forbids the update; the same on all ranks.

        A norm that is not finite, or a veto, leaves everything unchanged.
        """
        norm = self.gradient_norm() / scale
        found = float(norm)  # waits for the device, once for all parameters
        if not math.isfinite(found) or (veto is not None and bool(veto.wait())):
            return found
        clip = self.settings.clip
        factor = (clip / norm if clip and found > clip else torch.ones_like(norm)) / scale
        plain = scale == 1.0 and not (clip and found > clip)
        gradients = self._on_master(None if plain else factor)
        for bucket, adamw, gradient in zip(self.buckets, self._updates, gradients):
            bucket.master.grad = gradient
            adamw.param_groups[0]["lr"] = lr
            adamw.step()
            bucket.master.grad = None
            publish(bucket)
        return found

    def _on_master(self, factor: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Every bucket's gradient times ``factor``, in the master's format, where the master is.

        From a GPU to the host all copies are started at once, and each is waited for when its turn comes:
        the host updates one bucket while the next are on their way.
        """
        host = self.buckets[0].master.device != self.buckets[0].gradient.device
        scaled = (self._scaled(bucket, factor) for bucket in self.buckets)
        if not host:
            yield from scaled
            return
        arriving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        for gradient in scaled:
            copy = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            copy.copy_(gradient, non_blocking=True)
            arriving.append((copy, torch.cuda.Event()))
            arriving[-1][1].record()
        for copy, arrived in arriving:
            arrived.synchronize()
            yield copy

    def _scaled(self, bucket: Bucket, factor: torch.Tensor | None) -> torch.Tensor:
        gradient = bucket.gradient
        if gradient.dtype != self._wide:
            gradient = gradient.to(self._wide)
        return gradient if factor is None else gradient.mul_(factor)

    @property
    def _wide(self) -> torch.dtype:
        return self.buckets[0].master.dtype

    def set_updates(self, count: int) -> None:
        """Tell Adam's bias correction how many updates have been made (after loading a checkpoint)."""
        for bucket, adamw in zip(self.buckets, self._updates):
            adamw.state[bucket.master]["step"].fill_(count)

    def state(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in a checkpoint, values like the master's) of all that is kept of a bucket's parameters."""
        adamw = self._updates[self.buckets.index(bucket)]
        for name in _STATE:
            yield f"optimizer.{name}", adamw.state[bucket.master][name]
