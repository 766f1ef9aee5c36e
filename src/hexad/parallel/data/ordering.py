"""The order in which buckets are reduced and gathered: which gradients are complete, which reductions are
under way, and when weights that are not resident (ZeRO 3) are gathered and released. No torch: trainer and
memory model follow the same counts."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from .bucket_plan import BucketPlan

_IN_FLIGHT = 2
"""Reductions that may be under way at a time where each holds a buffer until it is over."""

_ANY = 1 << 60
"""More microbatches than there can be."""


class Reductions(Protocol):
    """Carries out what :class:`Rounds` decides."""

    def start(self, bucket: int, first: bool, last: bool, absent: Sequence[int]) -> None:
        """All gradients of a bucket are complete: reduce them. ``first``: of the step; ``last``: none will
        follow in it. ``absent``: members that nothing was contributed to."""
        ...

    def retire(self, bucket: int, last: bool) -> None:
        """Wait for a bucket's oldest reduction. ``last``: none will follow in this step."""
        ...

    def overrun(self) -> None:
        """A parameter is contributed to more often than announced: extend the step, or raise an error."""
        ...


class Rounds:
    """Counts contributions to gradients.

    A round of a bucket ends with the last contribution to the last of its parameters; then its reduction
    starts. A round is a step; in ZeRO 2 and 3, which do not keep gradients over the step, a microbatch.
    Reductions must start in the same order on all data ranks. By themselves they do: ranks run the same
    schedule, and autograd walks each graph in reverse order of its layers. Plain modules may leave out
    parameters on some ranks, so with them buckets take turns, the last in the model first, as in PyTorch's
    DDP: one that is complete waits for those before it, and what arrives meanwhile joins its round.

    Args:
        buckets: of the rank.
        reductions: carries them out.
        beside: reductions of gradients that are kept hold buffers too; otherwise they are reduced in place,
            and the computation never waits for them before :meth:`finish`.
        turns: parameters may be left out on some data ranks.
    """

    def __init__(
        self, buckets: Sequence[BucketPlan], reductions: Reductions, beside: bool, turns: bool = False
    ) -> None:
        self._buckets = buckets
        self._reductions = reductions
        self._beside, self._turns = beside, turns
        self._turn = 0
        self._under_way: deque[int] = deque()
        count = len(buckets)
        self._left = [0] * count
        self._first = [True] * count
        self._missing = [0] * count
        self._open = True
        self._due = [[0 for _ in plan.uses] for plan in buckets]
        self._fresh: list[list[bool]] = [[] for _ in buckets]

    def begin(self, microbatches: int | None) -> None:
        """Start a step in which every parameter is contributed to by this many microbatches; what an
        interrupted step has left is retired. None: by any number, so that nothing is reduced before
        :meth:`finish`, and all gradients are kept until then."""
        self._drain()
        self._open = microbatches is None
        rounds, microbatches = (1, _ANY) if microbatches is None else (microbatches, microbatches)
        self._turn = len(self._buckets) - 1
        for bucket, plan in enumerate(self._buckets):
            self._left[bucket] = plan.rounds(rounds)
            self._first[bucket] = True
            self._due[bucket] = [microbatches * use for use in plan.uses]
            self._renew(bucket)

    def _renew(self, bucket: int) -> None:
        uses = self._buckets[bucket].uses
        self._fresh[bucket] = [True] * len(uses)
        self._missing[bucket] = sum(
            due > self._later(bucket, member) for member, due in enumerate(self._due[bucket])
        )

    def _later(self, bucket: int, member: int) -> int:
        """Contributions to a member that belong to later rounds."""
        return (self._left[bucket] - 1) * self._buckets[bucket].uses[member]

    def fresh(self, bucket: int, member: int) -> bool:
        """Whether nothing has been contributed to a parameter in this round; asked before a contribution."""
        if not self._due[bucket][member]:
            self._reductions.overrun()
        return self._fresh[bucket][member]

    def added(self, bucket: int, member: int, last: bool = True) -> None:
        """A contribution has been made; without ``last`` its next part follows."""
        self._fresh[bucket][member] = False
        if not last:
            return
        self._due[bucket][member] -= 1
        if self._due[bucket][member] == self._later(bucket, member):
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._complete(bucket)

    def extend(self) -> None:
        """Accept one microbatch more than :meth:`begin` announced, after the reductions so far; on all data
        ranks together."""
        self.finish()
        self._turn = len(self._buckets) - 1
        for bucket, plan in enumerate(self._buckets):
            self._left[bucket], self._due[bucket] = 1, list(plan.uses)
            self._renew(bucket)

    def contributed(self) -> bool:
        """Whether anything has been contributed to a gradient in this step."""
        return not all(self._first) or not all(map(all, self._fresh))

    def missing(self) -> int:
        """Microbatches of this step that no parameter has been contributed to by; 0 where their number is
        open."""
        if self._open:
            return 0
        pairs = (zip(due, plan.uses) for due, plan in zip(self._due, self._buckets))
        return min((-(-due // uses) for pair in pairs for due, uses in pair if uses), default=0)

    def first(self, bucket: int) -> bool:
        """Whether nothing of the bucket has been reduced in this step."""
        return self._first[bucket]

    def finish(self) -> None:
        """Reduce what has not been reduced yet, and retire everything."""
        while any(self._left):
            self._start_turn()
        self._drain()

    def _complete(self, bucket: int) -> None:
        if not self._turns:
            self._start(bucket)
            return
        while self._left[self._turn] and not self._missing[self._turn]:
            self._start_turn()

    def _start_turn(self) -> None:
        bucket = self._turn
        self._turn = (bucket or len(self._buckets)) - 1
        if self._left[bucket]:
            self._start(bucket)

    def _start(self, bucket: int) -> None:
        self._left[bucket] -= 1
        self._under_way.append(bucket)
        absent = [member for member, fresh in enumerate(self._fresh[bucket]) if fresh]
        self._reductions.start(bucket, self._first[bucket], not self._left[bucket], absent)
        self._first[bucket] = False
        if self._left[bucket]:
            self._renew(bucket)
        while len(self._under_way) > self._limit(self._buckets[bucket]):
            self._retire()

    def _limit(self, plan: BucketPlan) -> int:
        """Reductions that may stay under way."""
        if plan.shards == 1:
            return 0  # nothing to wait for
        return _IN_FLIGHT if self._beside or not plan.keeps_gradients else len(self._buckets)

    def _retire(self) -> None:
        bucket = self._under_way.popleft()
        last = self._left[bucket] == 0 and bucket not in self._under_way
        self._reductions.retire(bucket, last)

    def _drain(self) -> None:
        while self._under_way:
            self._retire()


class Gathers(Protocol):
    """Carries out what :class:`Gathering` decides; asking for what is there already changes nothing."""

    def fetch(self, bucket: int) -> None:
        """Start gathering a bucket's values, if they are not here."""
        ...

    def free(self, bucket: int) -> None:
        """Release the memory of a bucket's values, if they are here."""
        ...


class Gathering:
    """The units of one stage: a unit's weights are here while it computes, the next unit's are gathered
    meanwhile (FSDP: Zhao et al., arXiv 2304.11277).

    Args:
        units: for every unit, in the order of the forward pass, the numbers of its buckets.
        buckets: all of the rank.
        gathers: carries it out.

    Attributes:
        absent: for every unit, the buckets that are not resident.
        layers: for every unit, whether backward needs its weights; those of embedding and head are not.
    """

    def __init__(
        self, units: Sequence[Sequence[int]], buckets: Sequence[BucketPlan], gathers: Gathers
    ) -> None:
        self.absent = [[n for n in numbers if not buckets[n].resident] for numbers in units]
        self.layers = [not any(buckets[n].outside_layers for n in numbers) for numbers in self.absent]
        self._gathers = gathers
        self._running: set[int] = set()  # in the forward pass; a stage runs around its layers
        coming = [unit for unit, numbers in enumerate(self.absent) if numbers]
        self._after = dict(pairwise(coming))
        self._before = {after: unit for unit, after in self._after.items() if self.layers[unit]}

    def enter(self, unit: int) -> None:
        """The forward pass reaches a unit."""
        self._running.add(unit)
        self._fetch(unit, self._after.get(unit))

    def leave(self, unit: int) -> None:
        """The unit's forward or backward pass is over."""
        self._running.discard(unit)
        needed = {bucket for running in self._running for bucket in self.absent[running]}
        for bucket in self.absent[unit]:
            if bucket not in needed:
                self._gathers.free(bucket)

    def turn(self, unit: int) -> None:
        """The backward pass reaches a layer: the one after it is done, the one before it is next."""
        if unit in self._after:
            self.leave(self._after[unit])
        self._fetch(unit, self._before.get(unit))

    def _fetch(self, unit: int, ahead: int | None) -> None:
        for number in (unit,) if ahead is None else (unit, ahead):
            for bucket in self.absent[number]:
                self._gathers.fetch(bucket)
