"""Selects the tokens that are computed next: continuous batching (Yu et al., Orca, OSDI 2022) with prompts in
chunks between the tokens of others (Agrawal et al., Sarathi-Serve, arXiv 2403.02310). No torch.

Sequences join and leave at every batch. A batch has one token of each running sequence, then as much of the
prompts that are not complete, in their order, as its budget of tokens allows. Where no block of the cache
is free, the sequence that was admitted last is preempted: its blocks are freed, and it is recomputed later.

With pipeline stages the sequences are divided into as many lanes, whose batches follow each other through the
stages: a lane's next batch begins when the tokens of its last one are known.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from .batch import TokenBatch, TokenSpan
from .blocks import BlockPool
from .sequence import Sequence


@dataclass(eq=False)
class Scheduler:
    """Decides what is computed.

    Attributes:
        pool: the cache's blocks.
        lanes: batches under way at once.
        batch_tokens: tokens of a batch at most.
        most: sequences that run at once.
        window: of attention; None where a token sees all before it.
        switch: tokens from which on LongRoPE has other frequencies, with which all keys are computed again;
            0 without.
    """

    pool: BlockPool
    lanes: int = 1
    batch_tokens: int = 2048
    most: int = 256
    window: int | None = None
    switch: int = 0
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[int, Sequence] = field(default_factory=dict)  # those that have run longest first
    preemptions: int = 0

    def __post_init__(self) -> None:
        self._busy: set[int] = set()  # lanes with a batch under way

    def add(self, sequence: Sequence) -> None:
        """Add a sequence behind those that wait."""
        self.waiting.append(sequence)

    def remove(self, number: int) -> None:
        """Forget a sequence, wherever it is."""
        sequence = self.running.pop(number, None)
        if sequence is not None and sequence.table is not None:
            self.pool.release(sequence.table)
        self.waiting = deque(waiting for waiting in self.waiting if waiting.number != number)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.waiting and not self.running

    def plan(self) -> TokenBatch | None:
        """The next batch; None where nothing can be computed, or not before a batch under way is done."""
        self._admit()
        for lane in sorted(set(range(self.lanes)) - self._busy, key=self._oldest_of):
            spans = tuple(self._spans(lane))
            if spans:
                self._busy.add(lane)
                return TokenBatch(spans, lane)
        return None

    def done(self, batch: TokenBatch) -> None:
        """Note that a batch's tokens are computed; chosen ones are added by :meth:`extend` afterwards."""
        self._busy.discard(batch.lane)
        for span in batch.spans:
            sequence = self.running.get(span.number)
            if sequence is None or sequence.table is None:
                continue
            self.pool.keep(sequence.table, sequence.ids, sequence.computed, self._regime(sequence))
            if self.window is not None:
                self.pool.drop(sequence.table, sequence.computed + 1 - self.window)

    def extend(self, sequence: Sequence, token: int) -> None:
        """Add a chosen token to a running sequence."""
        sequence.ids.append(token)
        if self.switch and len(sequence.ids) == self.switch + 1:
            self._restart(sequence)

    def _regime(self, sequence: Sequence) -> bytes:
        return b"long" if self.switch and len(sequence.ids) > self.switch else b""

    def _oldest_of(self, lane: int) -> float:
        return next((number for number, s in self.running.items() if s.lane == lane), float("inf"))

    def _admit(self) -> None:
        """Let waiting sequences run as long as the prompts of all that do have room."""
        unfilled = sum(
            self.pool.needed(len(s.ids) + 1) - s.table.dropped - len(s.table.blocks)
            for s in self.running.values()
            if s.table is not None
        )
        while self.waiting and len(self.running) < self.most:
            sequence = self.waiting[0]
            regime = self._regime(sequence)
            reuse = not (sequence.scoring or sequence.request.sampling.routing)
            table = self.pool.start(sequence.ids, sequence.request.longest, regime, reuse)
            missing = self.pool.needed(len(sequence.ids) + 1) - len(table.blocks)
            if self.running and missing + unfilled > self.pool.available:
                self.pool.release(table)
                return
            self.waiting.popleft()
            unfilled += missing
            sequence.table, sequence.computed = table, len(table.blocks) * self.pool.size
            if sequence.cached is None:
                sequence.cached = sequence.computed
            counts = [0] * self.lanes
            for other in self.running.values():
                counts[other.lane] += 1
            sequence.lane = counts.index(min(counts))
            self.running[sequence.number] = sequence

    def _spans(self, lane: int) -> Iterator[TokenSpan]:
        """The spans of a lane's batch: first those of sequences that only lack their last token."""
        budget = self.batch_tokens
        sequences = [sequence for sequence in self.running.values() if sequence.lane == lane]
        sequences.sort(key=lambda sequence: len(sequence.ids) - sequence.computed > 1)
        planned: set[int] = set()
        for sequence in sequences:
            begin = sequence.computed
            end = min(len(sequence.ids), begin + budget)
            if begin == end or sequence.table is None:  # None: preempted meanwhile
                continue
            while not self.pool.extend(sequence.table, end):
                if not self._preempt(sequence, planned):
                    break
            else:
                budget -= end - begin
                planned.add(sequence.number)
                yield self._span(sequence, end)

    def _span(self, sequence: Sequence, end: int) -> TokenSpan:
        begin, request, table = sequence.computed, sequence.request, sequence.table
        assert table is not None
        sequence.computed = end
        targets: tuple[int, ...] = ()
        if sequence.scoring:
            targets = tuple(request.prompt[begin + 1 : end + 1])
            sequence.scored = max(sequence.scored, min(end, len(request.prompt) - 1))
        return TokenSpan(
            sequence.number,
            tuple(sequence.ids[begin:end]),
            begin,
            len(sequence.ids),
            self.pool.runs(table, end),
            table.dropped * self.pool.size,
            end == len(sequence.ids) and request.sampling.tokens > 0,
            targets,
            request.sampling.routing,
        )

    def _preempt(self, sequence: Sequence, planned: set[int]) -> bool:
        """Take the blocks of the sequence that was admitted last, if that was after ``sequence`` and no batch
        under way or planned needs them; returns whether there was one."""
        for other in reversed(self.running.values()):
            if other is sequence:
                return False
            if other.lane not in self._busy and other.number not in planned and other.computed:
                self._restart(other)
                return True
        return False

    def _restart(self, sequence: Sequence) -> None:
        """Take a sequence's blocks, and compute it again before all that wait."""
        assert sequence.table is not None
        del self.running[sequence.number]
        self.pool.release(sequence.table)
        sequence.table, sequence.computed = None, 0
        self.preemptions += 1
        place = sum(waiting.number < sequence.number for waiting in self.waiting)
        self.waiting.insert(place, sequence)
