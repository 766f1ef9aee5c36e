"""AdamW on buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hexad.config.schema import OptimizerSettings
from hexad.parallel.data.buckets import Bucket

from .optimizer import Publish, Rule
from .schedule import MOMENTS


class AdamW(Rule):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) in PyTorch's fused kernel. It is called directly:
    ``torch.optim`` imports the compiler, which takes longer than torch.

    Args:
        buckets: those whose traits say so get weight decay.
        settings: ``optimizer`` settings.
        device: of the update, where there is no bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], settings: OptimizerSettings, device: torch.device) -> None:
        self.buckets, self.settings = buckets, settings
        self._moments = [[torch.zeros_like(bucket.master) for _ in MOMENTS] for bucket in buckets]
        device = buckets[0].master.device if buckets else device
        self._updates = torch.zeros((), dtype=torch.float32, device=device)  # made so far

    def update(
        self, gradients: Iterator[torch.Tensor], lr: float | None, factor: float, publish: Publish
    ) -> None:
        """Bucket by bucket, so that a bucket can be gathered while the next is updated."""
        assert lr is not None, "AdamW has no learning rate of its own"
        divisor = self._divisor(factor)
        self._updates.add_(1)
        for bucket, moments, gradient in zip(self.buckets, self._moments, gradients):
            if factor != 1 and divisor is None:
                gradient.mul_(factor)
            self._update(bucket, moments, gradient, lr, divisor)
            publish(bucket)

    def _update(
        self,
        bucket: Bucket,
        moments: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        lr: float,
        divisor: torch.Tensor | None,
    ) -> None:
        first, second = moments
        beta1, beta2 = self.settings.betas
        torch._fused_adamw_(
            [bucket.master],
            [gradient],
            [first],
            [second],
            [],
            [self._updates],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.settings.weight_decay if bucket.traits.decay else 0.0,
            eps=self.settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )

    def _divisor(self, factor: float) -> torch.Tensor | None:
        """What AdamW's kernel divides gradients by as it reads them (``GradScaler``'s way): a float32. None
        where that is too narrow, and for a factor of 1: the kernel writes the quotients back."""
        if factor == 1 or any(bucket.master.dtype == torch.float64 for bucket in self.buckets[:1]):
            return None
        return torch.full((), 1 / factor, dtype=torch.float32, device=self._updates.device)

    def restored(self, updates: int, numbers: Mapping[str, Any]) -> None:
        """Resume Adam's bias correction after this many updates."""
        self._updates.fill_(updates)

    def state(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in a checkpoint, values like the master's) of all that is kept of a bucket's parameters."""
        for name, values in zip(MOMENTS, self._moments[self.buckets.index(bucket)]):
            yield f"optimizer.{name}", values
