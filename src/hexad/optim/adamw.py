"""AdamW on buckets, with the global gradient norm and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch

from hexad.comm import Pending, all_reduce, broadcast
from hexad.config.schema import OptimizerSettings
from hexad.parallel.data.buckets import Bucket
from hexad.parallel.data.state_sharding import Shardings
from hexad.parallel.inventory import Grid
from hexad.topology.mesh import Axis

from .adamw_inventory import MOMENTS


class BucketAdamW:
    """PyTorch's fused AdamW over this rank's shard of every bucket.

    Master values and state are where the buckets' master is: on the device, or in the host's memory.

    Args:
        buckets: those whose traits say so get weight decay.
        settings: ``optimizer`` settings.
        sharding: which ranks hold other shards of a bucket, or copies of it.
        pipeline: the axis whose ranks hold other stages.
        norm: an empty tensor of the gradient norm's format, on the device.
        world: all ranks.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        settings: OptimizerSettings,
        sharding: Shardings,
        pipeline: Axis,
        norm: torch.Tensor,
        world: Axis,
    ) -> None:
        self.buckets = buckets
        self._norm, self._wide = norm, norm.dtype
        self.settings = settings
        self.sharding = sharding
        self.pipeline = pipeline
        self.world = world
        self._updates = [self._adamw(bucket) for bucket in buckets]

    def _adamw(self, bucket: Bucket) -> torch.optim.AdamW:
        """One optimizer per bucket, so that a bucket can be gathered while the next is updated."""
        settings, master = self.settings, bucket.master
        decay = settings.weight_decay if bucket.traits.decay else 0.0
        adamw = torch.optim.AdamW(
            [master], lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay, fused=True
        )
        adamw.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            **{name: torch.zeros_like(master) for name in MOMENTS},
        }
        return adamw

    def gradient_norm(self) -> torch.Tensor:
        """Euclidean norm of the whole model's gradient, as a scalar tensor on the device.

        Squares are summed over the ranks that hold other shards. What several ranks of an axis hold counts
        once, and is summed over it too, in parts, so that all ranks see a NaN of any. Groups of ranks may add
        up in different orders: the first rank's number counts, so that no replica is clipped by another.
        """
        total = self._norm.new_zeros(1)
        for grid, sharding in self.sharding.items():
            part = self._norm.new_zeros(1)
            for copies, squares in sorted(self._squares(grid).items()):
                part += squares / copies
            for axis in (sharding.shards, *sharding.model):
                part = all_reduce(part, axis)
            total += part
        return broadcast(all_reduce(total, self.pipeline)[0].sqrt(), self.world)

    def _squares(self, grid: Grid) -> dict[int, torch.Tensor]:
        """Number of ranks that hold copies of the same shards -> sum of squares of such buckets' shards."""
        found: dict[int, torch.Tensor] = {}
        for bucket in self.buckets:
            traits = bucket.traits
            if traits.grid == grid and not traits.copy:
                axes = self.sharding[grid].model
                copies = prod(axis.size for axis in axes if axis.name not in traits.divided)
                norm = torch.linalg.vector_norm(bucket.gradient, dtype=self._wide)
                found[copies] = found.get(copies, torch.zeros_like(norm)) + norm.square()
        return found

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

    def set_updates(self, count: int) -> None:
        """Tell Adam's bias correction how many updates have been made (after loading a checkpoint)."""
        for bucket, adamw in zip(self.buckets, self._updates):
            adamw.state[bucket.master]["step"].fill_(count)

    def state(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in a checkpoint, values like the master's) of all that is kept of a bucket's parameters."""
        adamw = self._updates[self.buckets.index(bucket)]
        for name in MOMENTS:
            yield f"optimizer.{name}", adamw.state[bucket.master][name]
