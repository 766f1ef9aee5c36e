"""When gradients are complete, and which reductions are under way. No torch: the trainer's gradients and the
memory model are driven by the same counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from hexad.config import HexadError

from .bucket_plan import BucketPlan

_IN_FLIGHT = 2
"""Reductions that may be under way at a time: each holds a buffer until it is over."""


class Reductions(Protocol):
    """Carries out what :class:`Rounds` decides."""

    def start(self, bucket: int, first: bool) -> None:
        """All gradients of a bucket are complete: reduce them. ``first``: of the step."""
        ...

    def retire(self, bucket: int, last: bool) -> None:
        """Wait for a bucket's oldest reduction. ``last``: none will follow in this step."""
        ...


class Rounds:
    """Counts contributions to gradients.

    A round of a bucket ends with the last contribution to the last of its parameters; then its reduction
    starts. A round is a step; in ZeRO 2 and 3, which do not keep gradients over the step, a microbatch.
    Reductions start in the order in which gradients are completed, which is the same on all data ranks: they
    run the same schedule, and autograd walks each graph in reverse order of its layers.

    Args:
        buckets: of the rank.
        zero: ``parallel.zero``.
        reductions: carries them out.
    """

    def __init__(self, buckets: Sequence[BucketPlan], zero: int, reductions: Reductions) -> None:
        self._buckets = buckets
        self._keeps = zero < 2
        self._reductions = reductions
        self._under_way: deque[int] = deque()
        count = len(buckets)
        self._left = [0] * count
        self._first = [True] * count
        self._missing = [0] * count
        self._expected: list[list[int]] = [[] for _ in buckets]
        self._fresh: list[list[bool]] = [[] for _ in buckets]

    def begin(self, microbatches: int) -> None:
        """Start a step in which every parameter is contributed to by this many microbatches; what an
        interrupted step has left is retired."""
        self._drain()
        for bucket in range(len(self._buckets)):
            self._left[bucket] = 1 if self._keeps else microbatches
            self._first[bucket] = True
            self._renew(bucket, microbatches if self._keeps else 1)

    def _renew(self, bucket: int, microbatches: int) -> None:
        uses = self._buckets[bucket].uses
        self._missing[bucket] = len(uses)
        self._expected[bucket] = [microbatches * each for each in uses]
        self._fresh[bucket] = [True] * len(uses)

    def fresh(self, bucket: int, member: int) -> bool:
        """Whether nothing has been contributed to a parameter in this round.

        Raises:
            HexadError: no round is open, so that a contribution would change a sum that is already reduced.
        """
        if not self._left[bucket]:
            raise HexadError(
                "gradients: found more backward passes than begin was called with; call begin(microbatches) "
                "before each step, with the number of its backward passes"
            )
        return self._fresh[bucket][member]

    def added(self, bucket: int, member: int, last: bool = True) -> None:
        """A contribution has been made; without ``last`` its next part follows."""
        self._fresh[bucket][member] = False
        if not last:
            return
        self._expected[bucket][member] -= 1
        if self._expected[bucket][member] == 0:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._complete(bucket)

    def unfinished(self) -> list[tuple[int, list[int]]]:
        """(bucket, members without a contribution) of every bucket that still waits in this step, the last in
        the model first."""
        return [
            (bucket, [member for member, fresh in enumerate(self._fresh[bucket]) if fresh])
            for bucket in reversed(range(len(self._buckets)))
            if self._left[bucket]
        ]

    def finish(self) -> None:
        """Reduce what has not been reduced yet, and retire everything."""
        for bucket, _ in self.unfinished():
            self._left[bucket] = 1
            self._complete(bucket)
        self._drain()

    def _complete(self, bucket: int) -> None:
        self._left[bucket] -= 1
        self._under_way.append(bucket)
        self._reductions.start(bucket, self._first[bucket])
        self._first[bucket] = False
        if self._left[bucket]:
            self._renew(bucket, 1)
        while len(self._under_way) > (_IN_FLIGHT if self._buckets[bucket].shards > 1 else 0):
            self._retire()

    def _retire(self) -> None:
        bucket = self._under_way.popleft()
        last = self._left[bucket] == 0 and bucket not in self._under_way
        self._reductions.retire(bucket, last)

    def _drain(self) -> None:
        while self._under_way:
            self._retire()
