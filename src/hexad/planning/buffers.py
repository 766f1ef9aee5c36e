"""Bytes that sharding the state needs in passing: buffers that buckets take turns with, and what reductions
under way receive into. Driven by the trainer's own :class:`Rounds` and :class:`Gathering`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hexad.parallel.data.bucket_plan import BucketPlan
from hexad.parallel.data.reductions import Rounds
from hexad.parallel.inventory import Execution


class StateBuffers:
    """Counts a step's buffers, in the place of tensors.

    Args:
        buckets: of the rank.
        run: how a microbatch is computed; on a CPU a reduction receives into a buffer as large as the bucket,
            on a GPU into the shard.
        replicas: data ranks that hold the same shard.

    Attributes:
        moving: bytes that reductions under way receive into.
        most: largest ``moving`` since :meth:`restart`.
    """

    def __init__(self, buckets: Sequence[BucketPlan], run: Execution, replicas: int) -> None:
        self.moving = self.most = 0
        self._buckets, self._whole, self._replicas = buckets, run.cpu, replicas
        self._parameter, self._gradient, self._sent = run.byte, run.gradient, run.reduced
        self._narrowed = run.reduced != run.gradient
        self._reducing: deque[tuple[int, int]] = deque()  # bytes received into, and summed beside them
        self._used: Counter[tuple[int, ...]] = Counter()
        self._peak: Counter[tuple[int, ...]] = Counter()
        self._here: set[int] = set()
        self._accumulating: set[int] = set()
        # As the trainer numbers them: frozen parameters have no gradients.
        self._trained = [plan for plan in buckets if not plan.frozen]
        self._rounds = Rounds(self._trained, self, run.cpu or self._narrowed)
        self._places = {
            number: (bucket, member)
            for bucket, plan in enumerate(self._trained)
            for member, number in enumerate(plan.members)
        }

    @property
    def pooled(self) -> int:
        """Bytes of all buffers that were ever needed at a time: they are never given back to the system."""
        return sum(width * size * number for (width, size, *_), number in self._peak.items())

    def begin(self, microbatches: int) -> None:
        """As :meth:`hexad.parallel.data.gradients.Gradients.begin`."""
        self._rounds.begin(microbatches)

    def contribute(self, parameters: Sequence[int]) -> None:
        """A microbatch's gradients of these parameters (by number) are complete; frozen ones have none."""
        for bucket, member in (self._places[number] for number in parameters if number in self._places):
            plan = self._trained[bucket]
            if not plan.keeps_gradients and bucket not in self._accumulating:
                self._accumulating.add(bucket)
                self._take(self._gradient, plan)
            self._rounds.added(bucket, member)

    def restart(self) -> None:
        """Begin a new ``most``."""
        self.most = self.moving

    # As Rounds decides

    def start(self, bucket: int, first: bool, absent: Sequence[int]) -> None:
        """A reduction starts."""
        plan = self._trained[bucket]
        several = plan.shards > 1
        # The first shard is summed where it belongs, later ones and those in another format beside it.
        beside = plan.shard_size * self._sent if several and (self._narrowed or not first) else 0
        received = (plan.size * self._sent if several else 0) if self._whole else beside
        if self._narrowed and several:
            received += plan.size * self._sent  # the copy that is sent
        self._reducing.append((received, beside if self._whole else 0))
        self.moving += received
        self.most = max(self.most, self.moving)
        self._accumulating.discard(bucket)

    def retire(self, bucket: int, last: bool) -> None:
        """A reduction is over."""
        received, beside = self._reducing.popleft()
        self.most = max(self.most, self.moving + beside)
        self.moving -= received
        if last and self._narrowed and self._replicas > 1:
            # Sent in a copy, which is there until the end of the step.
            self.moving += self._trained[bucket].shard_size * self._sent
            self.most = max(self.most, self.moving)
        if not self._trained[bucket].keeps_gradients:
            self._used[self._gradient, *self._trained[bucket].layout] -= 1

    # As Gathering decides

    def fetch(self, bucket: int) -> None:
        """Values are gathered, if they are not here."""
        if bucket not in self._here:
            self._here.add(bucket)
            self._take(self._parameter, self._buckets[bucket])

    def release(self, bucket: int) -> None:
        """Values are given up, if they are here."""
        if bucket in self._here:
            self._here.discard(bucket)
            self._used[self._parameter, *self._buckets[bucket].layout] -= 1

    def _take(self, width: int, plan: BucketPlan) -> None:
        key = (width, *plan.layout)
        self._used[key] += 1
        self._peak[key] = max(self._peak[key], self._used[key])
