"""Buffers that buckets take turns with."""

from __future__ import annotations

import torch

from .buckets import Bucket


class BufferPool:
    """Flat tensors of a bucket's size, used again.

    Buckets of one layout share buffers, so that padding is zeroed once and stays zero. Nothing is given back
    to the system: what was needed once is needed again every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def take(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for ``bucket``, with whatever values its parameters' elements had last."""
        free = self._free.get((dtype, *bucket.plan.layout))
        if free:
            return free.pop()
        with torch.inference_mode(False):  # a buffer made while evaluating is used in training too
            return torch.zeros(bucket.plan.size, dtype=dtype, device=self._device)

    def give(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Give back what :meth:`take` returned for a bucket of the same layout."""
        self._free.setdefault((buffer.dtype, *bucket.plan.layout), []).append(buffer)
