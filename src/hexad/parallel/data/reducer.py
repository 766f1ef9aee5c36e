"""Gradients summed over the data ranks, bucket by bucket, while backward still runs.

A bucket's reduction starts as soon as its last gradient is complete, as in PyTorch DDP (Li et al., arXiv
2006.15704), Megatron's distributed optimizer and ZeRO (arXiv 1910.02054). Gradients are *summed*: the loss is
already divided by the global number of target tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from hexad.comm import Pending, all_reduce, all_reduce_async, reduce_scatter_async
from hexad.topology.mesh import Axis

from ..slot import GradientSlot, ProductQueue, attach_slot
from .buckets import Bucket
from .pool import BufferPool
from .sharding import StateSharding

_IN_FLIGHT = 2
"""Buckets whose reduction may be under way where each holds a buffer until it is over."""


class GradientReducer:
    """Accumulates gradients in buckets and reduces them.

    In stages 0 and 1 a bucket is reduced once per step, after the last microbatch. In stages 2 and 3 its
    gradients exist from the first contribution of a microbatch to the last one only; then they are reduced
    and this rank's share is added up. Reductions start in the order in which gradients are completed, which
    is the same on all data ranks: they run the same schedule, and autograd walks each graph in reverse order
    of its layers.

    Args:
        buckets: of this rank's pipeline stages.
        sharding: over which data ranks to reduce, and what remains here.
        tensor: the axis over which gradients may be partial.
        tied: the ranks that hold the two copies of a tied embedding.
        queue: where weight gradients may be put off.
        pool: buffers for gradients that are not kept.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        sharding: StateSharding,
        tensor: Axis,
        tied: Axis,
        queue: ProductQueue,
        pool: BufferPool,
    ) -> None:
        self.tensor = tensor
        self.tied = tied
        self._sharding = sharding
        self._pool = pool
        self._scattering: deque[tuple[_Round, Pending]] = deque()
        self._summing: list[Pending] = []
        self._rounds = [_Round(bucket, self._complete, self._gradients, queue) for bucket in buckets]

    def begin(self, microbatches: int) -> None:
        """Start a step in which every parameter will be contributed to by this many microbatches.

        What an interrupted step has left behind is thrown away.
        """
        while self._scattering:
            self._retire()
        self._wait()
        for round_ in self._rounds:
            if self._sharding.stage >= 2 and round_.bucket.gradients is not None:
                self._pool.give(round_.bucket, round_.bucket.gradients)
                round_.bucket.gradients = None
        kept = self._sharding.stage < 2
        for round_ in self._rounds:
            round_.left, round_.first = 1 if kept else microbatches, True
            round_.begin(microbatches if kept else 1)

    def finish(self) -> None:
        """Reduce what has not been reduced yet and wait for everything."""
        for round_ in reversed(self._rounds):
            if round_.left:
                round_.left = 1
                round_.finish()
                self._complete(round_)
        while self._scattering:
            self._retire()
        self._wait()
        # Last, so that those who share a parameter end with the same bits, whatever the order in which their
        # data ranks were added up.
        for round_ in self._rounds:
            for axis in self._partial(round_.bucket):
                all_reduce(round_.bucket.gradient, axis)

    def _wait(self) -> None:
        for pending in self._summing:
            pending.wait()
        self._summing.clear()

    def _partial(self, bucket: Bucket) -> list[Axis]:
        """The axes besides data over which the bucket's gradients must be summed."""
        kind = bucket.kind
        return [axis for axis, sum_ in ((self.tensor, kind.partial), (self.tied, kind.tied)) if sum_]

    def _gradients(self, bucket: Bucket) -> torch.Tensor:
        if bucket.gradients is None:
            bucket.gradients = self._pool.take(bucket, bucket.gradient.dtype)
        return bucket.gradients

    def _complete(self, round_: _Round) -> None:
        """All gradients of the bucket are there: start reducing them."""
        bucket = round_.bucket
        gradients = self._gradients(bucket)
        round_.left -= 1
        # The first share of a step is written where it belongs, later ones are added to it.
        out = bucket.gradient if round_.first else None
        shards = self._sharding.shards
        self._scattering.append((round_, reduce_scatter_async(gradients, shards, out)))
        if self._sharding.stage >= 2:
            bucket.gradients = None
            round_.buffers.append(gradients)
            if round_.left:
                round_.begin(1)
        round_.first = False
        while len(self._scattering) > (_IN_FLIGHT if shards.size > 1 else 0):
            self._retire()

    def _retire(self) -> None:
        """Wait for the oldest reduction."""
        round_, pending = self._scattering.popleft()
        bucket, share = round_.bucket, pending.wait()
        if share.data_ptr() != bucket.gradient.data_ptr():
            bucket.gradient.add_(share)
        if round_.buffers:
            self._pool.give(bucket, round_.buffers.popleft())
        if round_.left == 0 and all(other is not round_ for other, _ in self._scattering):
            self._summing.append(all_reduce_async(bucket.gradient, self._sharding.replicas))


class _Round:
    """A bucket's gradients on their way: what is missing until they can be reduced.

    Attributes:
        left: reductions to come in this step.
        first: no share has been written in this step.
        buffers: gradients that are being reduced.
    """

    def __init__(
        self,
        bucket: Bucket,
        complete: Callable[[_Round], None],
        gradients: Callable[[Bucket], torch.Tensor],
        queue: ProductQueue,
    ) -> None:
        self.bucket = bucket
        self.left = 0
        self.first = True
        self.buffers: deque[torch.Tensor] = deque()
        self._missing = 0
        self._complete = complete
        self._slots: list[GradientSlot] = []
        for offset, declared in zip(bucket.offsets, bucket.members):
            slot = GradientSlot(self._source(gradients, offset, declared.parameter.shape), declared.uses,
                                self._arrived, queue)  # fmt: skip
            attach_slot(declared.parameter, slot)
            self._slots.append(slot)

    def begin(self, microbatches: int) -> None:
        """Wait for the contributions of this many microbatches."""
        self._missing = len(self._slots)
        for slot in self._slots:
            slot.begin(microbatches)

    def finish(self) -> None:
        """Zero what nothing contributed to."""
        for slot in self._slots:
            slot.finish()

    def _source(
        self, gradients: Callable[[Bucket], torch.Tensor], offset: int, shape: torch.Size
    ) -> Callable[[], torch.Tensor]:
        bucket, end = self.bucket, offset + shape.numel()
        return lambda: gradients(bucket)[offset:end].view(shape)

    def _arrived(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._complete(self)
