"""Bytes that dividing the state among data ranks takes in passing: buffers that buckets take turns with, and
what reductions under way receive into.

Follows :mod:`hexad.parallel.data.reducer`, ``gatherer`` and ``pool``, contribution by contribution.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from .parameters import Place, PlannedBucket, Unit

_IN_FLIGHT = 2  # reductions under way, as hexad.parallel.data.reducer has them


@dataclass
class _Round:
    """As :class:`hexad.parallel.data.reducer._Round`: a bucket's gradients until they are reduced."""

    bucket: PlannedBucket
    uses: int
    missing: int
    first: bool = True
    taken: bool = False


@dataclass(frozen=True)
class _Reduction:
    """One under way: bytes it receives into, and of the share that is summed from them at its end."""

    bucket: PlannedBucket
    incoming: int
    share: int


class Division:
    """Counts a step's buffers.

    Args:
        units: of each of the rank's pipeline stages.
        buckets: with all their parameters.
        zero: ``parallel.zero``.
        shards: data ranks that divide the state.
        microbatches: of the step.
        widths: bytes of a parameter and of a gradient.
        whole: reductions receive into a buffer as large as the bucket (CPUs), not into a share of it.
        tied: the head's weight is the embedding's, on this rank.

    Attributes:
        moving: bytes that reductions under way receive into.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Unit]],
        buckets: Sequence[PlannedBucket],
        zero: int,
        shards: int,
        microbatches: int,
        widths: tuple[int, int],
        whole: bool,
        tied: bool,
    ) -> None:
        self.moving = 0
        self._zero, self._shards, self._whole = zero, shards, whole
        self._width, self._gradient = widths
        self._rounds: dict[Place, _Round] = {}
        self._reducing: deque[_Reduction] = deque()
        self._used: Counter[tuple[int, ...]] = Counter()
        self._most: Counter[tuple[int, ...]] = Counter()
        self._present: set[PlannedBucket] = set()
        self._head = Place(0, 0, 0) if tied else Place(len(units) - 1, len(units[-1]) - 1, 0)
        for bucket in buckets:
            uses = len(bucket.places) + (tied and self._head in bucket.places)
            round_ = _Round(bucket, uses, uses * (microbatches if zero < 2 else 1))
            self._rounds.update(dict.fromkeys(bucket.places, round_))
        self._absent = {
            (stage, unit): self._absent_of(units[stage][unit], Place(stage, unit, 0))
            for stage, all_ in enumerate(units)
            for unit in range(len(all_))
        }

    def _absent_of(self, unit: Unit, first: Place) -> list[PlannedBucket]:
        """The bucket of the unit's matrices, where they come and go."""
        places = [first._replace(parameter=index) for index in range(len(unit.parameters))]
        found = [self._rounds[place].bucket for place in places or [self._head]]  # none: a tied head
        return [bucket for bucket in found if not bucket.resident][:1]

    @property
    def pooled(self) -> int:
        """Bytes of all buffers that were ever needed at a time: they are never given back to the system."""
        return sum(width * size * number for (width, size, *_), number in self._most.items())

    def absent(self, stage: int) -> list[int]:
        """The stage's units whose weights come and go."""
        return [unit for (owner, unit), buckets in self._absent.items() if owner == stage and buckets]

    def fetch(self, stage: int, unit: int) -> None:
        """The unit's weights are gathered, if they are not here."""
        for bucket in self._absent[stage, unit]:
            if bucket not in self._present:
                self._present.add(bucket)
                self._take(self._width, bucket)

    def release(self, stage: int, unit: int) -> None:
        """The unit's weights are not needed any more."""
        for bucket in self._absent[stage, unit]:
            if bucket in self._present:
                self._present.discard(bucket)
                self._used[self._width, *bucket.layout] -= 1

    def contribute_head(self) -> int:
        """As :meth:`contribute`, of the head's weight."""
        return self.contribute(self._head)

    def contribute(self, place: Place) -> int:
        """A microbatch's gradient of the parameter is complete. Returns the most bytes that reductions
        receive into before this returns."""
        round_ = self._rounds[place]
        if self._zero >= 2 and not round_.taken:
            round_.taken = True
            self._take(self._gradient, round_.bucket)
        round_.missing -= 1
        return self.moving if round_.missing else self._complete(round_)

    def _take(self, width: int, bucket: PlannedBucket) -> None:
        key = (width, *bucket.layout)
        self._used[key] += 1
        self._most[key] = max(self._most[key], self._used[key])

    def _complete(self, round_: _Round) -> int:
        reduction = self._reduction(round_)
        self._reducing.append(reduction)
        self.moving += reduction.incoming
        most = self.moving
        if self._zero >= 2:
            round_.taken, round_.missing = False, round_.uses
        round_.first = False
        while len(self._reducing) > (_IN_FLIGHT if self._shards > 1 else 0):
            oldest = self._reducing.popleft()
            most = max(most, self.moving + oldest.share)
            self.moving -= oldest.incoming
            if self._zero >= 2:
                self._used[self._gradient, *oldest.bucket.layout] -= 1
        return most

    def _reduction(self, round_: _Round) -> _Reduction:
        share = round_.bucket.size // self._shards * self._gradient
        # The first share is summed where it belongs, later ones beside it.
        beside = 0 if round_.first or self._shards == 1 else share
        if not self._whole:
            return _Reduction(round_.bucket, beside, 0)
        return _Reduction(round_.bucket, share * self._shards if self._shards > 1 else 0, beside)
