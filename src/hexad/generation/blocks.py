"""The blocks of the paged key/value cache: which sequences hold which, and which keep the beginning of a text
for those that follow (Kwon et al., PagedAttention, arXiv 2309.06180). No torch.

A block holds the keys and values of ``size`` consecutive tokens of a sequence in all layers. Blocks that no
sequence holds keep their contents until they are needed: a sequence that begins with the same tokens, which
is known by a digest of all tokens up to a block's end, uses them again. The ones used longest ago go first.

Kernels of CPUs read keys that are contiguous in memory. There a sequence claims as many neighbouring blocks
as it may come to need, if there are such; claimed blocks are given to others when no other is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class SlotRun(NamedTuple):
    """Tokens of a sequence whose keys are neighbours in the cache.

    Attributes:
        slot: of the first.
        tokens: how many there are.
    """

    slot: int
    tokens: int


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence.

    Attributes:
        longest: tokens that it may come to have.
        blocks: their numbers, in the order of the tokens.
        dropped: how many blocks came before these, which no window of attention reaches any more.
        digests: of the tokens up to the end of each block, for complete blocks.
    """

    longest: int = 0
    blocks: list[int] = field(default_factory=list)
    dropped: int = 0
    digests: list[bytes] = field(default_factory=list)
    claim: int = 0
    neighbours: list[list[int]] = field(default_factory=list)
    """Runs of neighbouring blocks: the first one's number, and how many they are."""

    def append(self, block: int) -> None:
        """Add a block."""
        self.blocks.append(block)
        if self.neighbours and sum(self.neighbours[-1]) == block:
            self.neighbours[-1][1] += 1
        else:
            self.neighbours.append([block, 1])

    def pop_first(self) -> int:
        """Remove the first block."""
        first = self.neighbours[0]
        first[0], first[1] = first[0] + 1, first[1] - 1
        if not first[1]:
            self.neighbours.pop(0)
        self.dropped += 1
        return self.blocks.pop(0)


class BlockPool:
    """All blocks of a cache.

    Args:
        blocks: how many there are.
        size: tokens of a block.
        neighbours: whether the blocks of a sequence should be neighbours.
    """

    def __init__(self, blocks: int, size: int, neighbours: bool = False) -> None:
        self.blocks, self.size, self.neighbours = blocks, size, neighbours
        self.available = blocks
        self._holders: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self._claims: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        # When each was last used, of blocks whose contents may be used again; 0 of others.
        self._used: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self._digests: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._clock, self._numbers = count(1), count(1)

    def needed(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.size)

    def start(self, ids: Sequence[int], longest: int, regime: bytes = b"", reuse: bool = True) -> BlockTable:
        """The table of a new sequence, with the blocks that hold its beginning already.

        Args:
            ids: of its tokens. At least the last one's keys are computed again: what follows it is not kept.
            longest: tokens that it may come to have.
            regime: keys that were computed differently are not used again.
            reuse: whether any are.
        """
        table = BlockTable(longest)
        table.claim = next(self._numbers)
        for digest in self._chain(ids, (len(ids) - 1) // self.size if reuse else 0, regime):
            block = self._known.get(digest)
            if block is None:
                break
            self._hold(block)
            table.append(block)
            table.digests.append(digest)
        return table

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Give a sequence the blocks of so many tokens in all; returns whether there were enough."""
        missing = self.needed(tokens) - table.dropped - len(table.blocks)
        if missing > self.available:
            return False
        for _ in range(missing):
            block = self._next(table)
            if (digest := self._digests.pop(block, None)) is not None:
                del self._known[digest]
            self._hold(block)
            table.append(block)
        return True

    def keep(self, table: BlockTable, ids: Sequence[int], computed: int, regime: bytes = b"") -> None:
        """Note the contents of a sequence's complete blocks, of the first ``computed`` of its ids, so that
        others can use them."""
        complete, known = computed // self.size, len(table.digests)
        if complete == known:
            return
        before = table.digests[-1] if table.digests else None
        for number, digest in enumerate(self._chain(ids, complete, regime, known, before), known):
            table.digests.append(digest)
            block = table.blocks[number - table.dropped]
            if digest not in self._known:
                self._known[digest], self._digests[block] = block, digest

    def drop(self, table: BlockTable, tokens: int) -> None:
        """Take from a sequence the blocks before its first ``tokens``' end, which it does not need again."""
        while (table.dropped + 1) * self.size <= tokens and table.blocks:
            self._leave(table.pop_first())

    def release(self, table: BlockTable) -> None:
        """Take all blocks from a sequence."""
        for block in reversed(
            table.blocks
        ):  # the beginning, without which the others are of no use, goes last
            self._leave(block)
        table.blocks, table.digests, table.neighbours, table.dropped = [], [], [], 0
        if self.neighbours:
            self._claims[self._claims == table.claim] = 0

    def runs(self, table: BlockTable, tokens: int) -> tuple[SlotRun, ...]:
        """Slots of the keys of the first ``tokens``, without those of dropped blocks; the last of them is in
        the last block."""
        runs = [SlotRun(first * self.size, count * self.size) for first, count in table.neighbours]
        unused = (table.dropped + len(table.blocks)) * self.size - tokens
        if unused:
            runs[-1] = SlotRun(runs[-1].slot, runs[-1].tokens - unused)
        return tuple(runs)

    def forget(self) -> None:
        """No contents are used again: the weights have changed."""
        self._known.clear()
        self._digests.clear()
        self._used[:] = 0

    def _chain(
        self, ids: Sequence[int], blocks: int, regime: bytes, first: int = 0, before: bytes | None = None
    ) -> Any:
        """The digests of blocks from ``first`` on, each of all tokens up to its end."""
        digest = before if before is not None else blake2b(regime, digest_size=16).digest()
        for number in range(first, blocks):
            tokens = np.asarray(ids[number * self.size : (number + 1) * self.size], dtype=np.int64)
            digest = blake2b(digest + tokens.tobytes(), digest_size=16).digest()
            yield digest

    def _hold(self, block: int) -> None:
        self.available -= self._holders[block] == 0
        self._holders[block] += 1

    def _leave(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self.available += 1
            self._used[block] = next(self._clock) if block in self._digests else 0

    def _next(self, table: BlockTable) -> int:
        """A free block for a sequence: the neighbour of its last, or another."""
        if not self.neighbours:
            return self._oldest(self._holders == 0)
        follower = table.blocks[-1] + 1 if table.blocks else self.blocks
        if (
            follower < self.blocks
            and not self._holders[follower]
            and self._claims[follower] in (0, table.claim)
        ):
            return follower
        self._claims[self._claims == table.claim] = 0
        free = (self._holders == 0) & (self._claims == 0)
        count = self.needed(table.longest) - table.dropped - len(table.blocks)
        block = self._gap(free, count)
        if block is None:
            return self._oldest(free if free.any() else self._holders == 0)
        self._claims[block : block + count] = table.claim
        return block

    def _oldest(self, free: NDArray[np.bool_]) -> int:
        return int(np.where(free, self._used, np.iinfo(np.int64).max).argmin())

    def _gap(self, free: NDArray[np.bool_], count: int) -> int | None:
        """The first of ``count`` free neighbours: those that were used longest ago."""
        if not 0 < count <= len(free):
            return None
        taken = np.concatenate(([0], np.cumsum(~free)))
        starts = np.flatnonzero(taken[count:] == taken[:-count])
        if not len(starts):
            return None
        used = np.concatenate(([0], np.cumsum(self._used != 0)))
        # By how many of them hold something, then by when the first of these was used.
        kept = used[starts + count] - used[starts]
        best = starts[kept == kept.min()]
        return int(best[self._used[best].argmin()])
