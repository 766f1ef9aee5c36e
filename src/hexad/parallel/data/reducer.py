"""Gradients summed over the data ranks, bucket by bucket, while backward still runs.

The idea is that of PyTorch DDP (Li et al., arXiv 2006.15704) and Megatron's distributed optimizer: a bucket's
all-reduce starts as soon as its last gradient is complete. Gradients are *summed*: the loss is already
divided by the global number of target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hexad.comm import Pending, all_reduce, all_reduce_async
from hexad.topology.mesh import Axis

from ..slot import GradientSlot, ProductQueue, attach_slot
from .flat import Bucket, FlatGroup


class GradientReducer:
    """Accumulates gradients in the groups' flat buffers and reduces them.

    Buckets are started in one fixed order, the same on all ranks whatever the order in which gradients
    complete, because collectives of one group must be started in the same order everywhere.

    Args:
        groups: of this rank's stages.
        data: the axis to reduce over.
        tensor: the axis over which gradients may be partial.
        tied: the ranks that hold the two copies of a tied embedding.
        queue: where weight gradients may be put off.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], data: Axis, tensor: Axis, tied: Axis, queue: ProductQueue
    ) -> None:
        self.groups = groups
        self.data = data
        self.tensor = tensor
        self.tied = tied
        self._queue = sorted(
            ((group, bucket) for group in groups for bucket in group.buckets),
            key=lambda entry: -entry[1].earliest,
        )
        self._next = 0
        self._pending: list[Pending] = []
        self._slots: list[GradientSlot] = []
        for group in groups:
            for (_, declared, view), offset in zip(group.views(group.gradients), group.offsets):
                completer = self._completer(group.bucket_of(offset))
                slot = GradientSlot(view, declared.uses, completer, queue)
                attach_slot(declared.parameter, slot)
                self._slots.append(slot)

    def begin(self, microbatches: int) -> None:
        """Start a step in which every slot will be contributed to by this many microbatches."""
        for slot in self._slots:
            slot.begin(microbatches)
        for group in self.groups:
            for bucket in group.buckets:
                bucket.missing = bucket.members
        self._next = 0

    def finish(self) -> None:
        """Reduce what has not been reduced yet and wait for everything."""
        for slot in self._slots:
            slot.finish()
        self._start(len(self._queue))
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        # Last, so that those who share a parameter end with the same bits, whatever the order in which their
        # data ranks were added up.
        for group in self.groups:
            for axis in self._partial(group):
                all_reduce(group.gradients, axis)

    def _partial(self, group: FlatGroup) -> list[Axis]:
        """The axes besides data over which the group's gradients must be summed."""
        kind = group.kind
        return [axis for axis, sum_ in ((self.tensor, kind.partial), (self.tied, kind.tied)) if sum_]

    def _completer(self, bucket: Bucket) -> Callable[[], None]:
        def complete() -> None:
            bucket.missing -= 1
            ready = self._next
            while ready < len(self._queue) and self._queue[ready][1].missing == 0:
                ready += 1
            self._start(ready)

        return complete

    def _start(self, until: int) -> None:
        for group, bucket in self._queue[self._next : until]:
            slice_ = group.gradients[bucket.start : bucket.end]
            self._pending.append(all_reduce_async(slice_, self.data))
        self._next = max(self._next, until)
