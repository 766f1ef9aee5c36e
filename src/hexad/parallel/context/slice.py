"""The division of a microbatch's tokens over ranks: data, from which positions, labels, dropout keys, masks
and messages follow. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from hexad.config.model import ModelSettings
from hexad.config.schema import ParallelSettings

TokenRun = tuple[int, int]
"""Tokens from the first number on, up to the second."""

Balance = Literal["zigzag", "work", "none"]


@dataclass(frozen=True)
class Slice:
    """The tokens of every context rank.

    Attributes:
        sequences, length: of the microbatch; tokens are numbered through all its sequences.
        bounds: where spans (documents, or sequences) begin inside which attention stays, and the total.
        runs: of each rank, ascending; every rank has the same number of tokens.
    """

    sequences: int
    length: int
    bounds: tuple[int, ...]
    runs: tuple[tuple[TokenRun, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of context ranks."""
        return len(self.runs)

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.sequences * self.length

    @property
    def share(self) -> int:
        """Tokens of each rank."""
        return self.tokens // self.ranks

    def grouped(self, size: int) -> Slice:
        """The slice among groups of ``size`` neighbouring ranks."""
        if size == 1:
            return self
        groups = (self.runs[first : first + size] for first in range(0, self.ranks, size))
        runs = tuple(joined(sorted(run for runs in group for run in runs)) for group in groups)
        return Slice(self.sequences, self.length, self.bounds, runs)

    @cached_property
    def whole(self) -> bool:
        """Whether the ranks' tokens, one rank after the other, are those of the microbatch in their order."""
        ends = accumulate(self.share for _ in self.runs)
        return all(runs == ((end - self.share, end),) for runs, end in zip(self.runs, ends))


def joined(runs: Iterable[TokenRun]) -> tuple[TokenRun, ...]:
    """Ascending runs, of which those that touch or overlap become one."""
    longest: list[TokenRun] = []
    for begin, end in runs:
        if longest and begin <= longest[-1][1]:
            longest[-1] = (longest[-1][0], max(end, longest[-1][1]))
        elif begin < end:
            longest.append((begin, end))
    return tuple(longest)


def token_count(runs: Iterable[TokenRun]) -> int:
    """The number of tokens in some runs."""
    return sum(end - begin for begin, end in runs)


@dataclass(frozen=True)
class Slicing:
    """How the microbatches of a run are divided among context ranks.

    Attributes:
        ranks, balance, ulysses, window: see :func:`divide`.
    """

    ranks: int = 1
    balance: Balance = "none"
    ulysses: int = 1
    window: int | None = None

    @classmethod
    def of(cls, settings: ParallelSettings, model: ModelSettings) -> Slicing:
        """The slicing that resolved settings ask for."""
        if settings.context == 1:
            return cls()
        balance, window = settings.context_balance, model.sliding_window
        assert balance != "auto", "resolve the configuration first"
        return cls(settings.context, balance, settings.ulysses, window)

    def divided(self, sequences: int, length: int, documents: tuple[int, ...] | None = None) -> Slice:
        """The division of a microbatch among the ranks."""
        return divide(sequences, length, documents, self.ranks, self.balance, self.ulysses, self.window)


@lru_cache(maxsize=64)
def divide(
    sequences: int,
    length: int,
    documents: tuple[int, ...] | None,
    ranks: int,
    balance: Balance,
    ulysses: int = 1,
    window: int | None = None,
) -> Slice:
    """Divide a microbatch among context ranks.

    ``none``: in the order of the tokens. ``zigzag``: of every sequence, two blocks for each rank, the i-th
    from the front and the i-th from the back, as in Megatron-LM (the imbalance: Brandon et al., arXiv
    2311.09431). ``work``: see :func:`hexad.parallel.context.balance.by_work`.

    Args:
        sequences, length: of the microbatch.
        documents: where documents begin, and the total; None where every sequence is one.
        ranks: of the context axis; divides ``length``.
        balance: how.
        ulysses: neighbouring ranks that exchange heads: their tokens follow each other.
        window: keys that a query sees; None for all before it.
    """
    bounds = tuple(range(0, sequences * length + 1, length)) if documents is None else documents
    groups = ranks // ulysses
    if balance == "zigzag":
        runs = _zigzag(sequences, length, groups)
    elif balance == "work":
        from .balance import by_work  # numpy, which commands that only calculate do without

        runs = by_work(bounds, groups, window)
    else:
        share = sequences * length // groups
        runs = [[(rank * share, (rank + 1) * share)] for rank in range(groups)]
    parts = [part for group in runs for part in _parts(joined(group), ulysses)]
    return Slice(sequences, length, bounds, tuple(parts))


def _zigzag(sequences: int, length: int, ranks: int) -> list[list[TokenRun]]:
    """Blocks from the front are as large as each other, and so are those from the back: at most one token
    larger, where a rank's share is odd."""
    front = length // ranks // 2
    back = length // ranks - front
    runs: list[list[TokenRun]] = [[] for _ in range(ranks)]
    for begin in range(0, sequences * length, length):
        for rank, runs_of_rank in enumerate(runs):
            end = begin + length - rank * back
            runs_of_rank += [(begin + rank * front, begin + (rank + 1) * front), (end - back, end)]
    return runs


def _parts(runs: Sequence[TokenRun], count: int) -> list[tuple[TokenRun, ...]]:
    """The tokens of some runs in ``count`` parts of one size, in their order."""
    share = token_count(runs) // count
    parts: list[list[TokenRun]] = [[] for _ in range(count)]
    before = 0
    for begin, end in runs:
        while begin < end:
            part = before // share
            taken = min(end - begin, (part + 1) * share - before)
            parts[part].append((begin, begin + taken))
            begin, before = begin + taken, before + taken
    return [tuple(part) for part in parts]


def heads_of(kv_heads: int, size: int) -> int:
    """Key/value heads of one of ``size`` ranks; at least one, which several then have."""
    return max(1, kv_heads // size)


def divides_heads(size: int, heads: int, kv_heads: int) -> bool:
    """Whether ``size`` ranks can share a rank's heads."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def largest_group(ranks: int, heads: int, kv_heads: int) -> int:
    """The most of ``ranks`` ranks, in groups of one size, that can share heads."""
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and divides_heads(n, heads, kv_heads))
