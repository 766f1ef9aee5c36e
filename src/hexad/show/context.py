"""How one microbatch is divided among context ranks: the tokens of every rank, its attention work and what it
receives: data, tables for the terminal, and a picture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hexad.model.inventory import ModelInventory
from hexad.parallel.context.rounds import Round, rounds
from hexad.parallel.context.slice import Balance, Slice, Slicing
from hexad.planning import Resolved
from hexad.planning.memory import execution

from .figure import PALE_GREY, PALETTE, styled, tip
from .memory import memory_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 32
"""Ranks that are shown: the first so many."""
_MIB = 2**20


class Comparison(NamedTuple):
    """The result of a balance for the same microbatch.

    Attributes:
        balance: its name.
        slowest: work of the rank with the most, over the mean.
        received: tokens whose keys and values a rank receives, the mean over ranks.
        share: the same, over what an all-gather brings.
    """

    balance: Balance
    slowest: float
    received: float
    share: float


@dataclass(frozen=True)
class Division:
    """One microbatch of a run, divided among context ranks.

    Attributes:
        title: the model and the layout, in a line.
        method: ``parallel.context_method``.
        slicing: how tokens are divided.
        slice: the tokens of every rank.
        pair: bytes of a token's keys and values, as a ring sends them.
        exchanged: bytes of a rank's tensors whose heads are exchanged for tokens, forward, in one layer.
        source: description of where the documents come from; empty where they are joined.
    """

    title: str
    method: str
    slicing: Slicing
    slice: Slice
    pair: int
    exchanged: tuple[int, int]
    source: str = ""

    @classmethod
    def of(cls, resolved: Resolved, documents: tuple[int, ...] | None, source: str = "") -> Division:
        """Divide a microbatch of a run; ``documents``: where they begin, and the total, or None where every
        sequence is one."""
        config, parallel = resolved.config, resolved.config.parallel
        slicing = Slicing.of(parallel, config.model)
        slice_ = slicing.divided(config.batch.micro, config.data.sequence, documents)
        whole = ModelInventory(config.model, parallel.sequence_parallel, parallel.tensor)
        attention, run = whole.attention, execution(config, resolved.layout)
        pair, exchanged = attention.pair_bytes(run), attention.exchanged_bytes(run)
        return cls(memory_title(resolved), parallel.context_method, slicing, slice_, pair, exchanged, source)

    @property
    def documents(self) -> list[int]:
        """Lengths of the spans inside which attention stays: documents, or sequences."""
        return [end - begin for begin, end in pairwise(self.slice.bounds)]

    @cached_property
    def ring(self) -> Slice:
        """The tokens of every group of ranks that exchange heads; without such groups, of every rank."""
        return self.slice.grouped(self.slicing.ulysses)

    def work(self, rank: int) -> float:
        """Pairs of query and key that a rank computes; with Ulysses, its part of the group's heads."""
        from hexad.parallel.context.balance import work_of  # numpy

        group = self.ring.runs[rank // self.slicing.ulysses]
        return work_of(self.slice.bounds, group, self.slicing.window) / self.slicing.ulysses

    @cached_property
    def relative_work(self) -> list[float]:
        """Work of every rank, over the mean."""
        work = [self.work(rank) for rank in range(self.slice.ranks)]
        return [pairs * len(work) / sum(work) for pairs in work]

    @property
    def slowest(self) -> float:
        """Work of the rank with the most, over the mean."""
        return max(self.relative_work)

    @cached_property
    def rounds(self) -> list[list[Round]]:
        """The rounds of every rank in which something is sent; sources and targets are context ranks."""
        size, complete = self.slicing.ulysses, self.method == "all_gather"
        return [
            [
                replace(step, source=step.source * size + place, target=step.target * size + place)
                for step in rounds(self.ring, group, self.slicing.window, complete=complete)[1:]
            ]
            for group in range(self.ring.ranks)
            for place in range(size)
        ]

    @property
    def received(self) -> list[int]:
        """Tokens whose keys and values each rank receives in all rounds."""
        return [sum(step.received for step in steps) for steps in self.rounds]

    @property
    def share_received(self) -> float:
        """Tokens that ranks receive, over those of an all-gather; 0 without rounds."""
        gathered = self.ring.tokens - self.ring.share
        return sum(self.received) / (len(self.received) * max(1, gathered))

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The results of all balances; none where every rank has some heads of all tokens."""
        if self.ring.ranks == 1:
            return []
        comparisons = []
        for balance in sorted(get_args(Balance)):
            slicing, current = replace(self.slicing, balance=balance), self.slice
            divided = slicing.divided(current.sequences, current.length, current.bounds)
            other = self if slicing == self.slicing else replace(self, slicing=slicing, slice=divided)
            mean = sum(other.received) / len(other.received)
            comparisons.append(Comparison(balance, other.slowest, mean, other.share_received))
        return comparisons

    @property
    def content(self) -> str:
        """The content of the microbatch as text: sequences, documents, window."""
        current, lengths = self.slice, self.documents
        text = f"{current.sequences:,} sequence{'s' * (current.sequences > 1)} of {current.length:,} tokens"
        if self.source:
            span = f"{min(lengths):,} to {max(lengths):,}" if len(lengths) > 1 else f"{lengths[0]:,}"
            text += f", {len(lengths):,} document{'s' * (len(lengths) > 1)} of {span} tokens ({self.source})"
        window = self.slicing.window
        return text + (f", window {window:,}" if window is not None else "")

    @property
    def how(self) -> str:
        """The method and the balance as text."""
        size = self.slicing.ulysses
        group = f" (groups of {size})" if self.method == "ulysses_ring" else ""
        return f"{self.method}{group}, balance {self.slicing.balance}"

    @property
    def exchange_text(self) -> str:
        """The bytes that the exchange of heads sends, as text; empty without one."""
        if self.slicing.ulysses == 1:
            return ""
        size = self.slicing.ulysses
        forward, back = (nbytes * (size - 1) / size / _MIB for nbytes in self.exchanged)
        return (
            f"all-to-all of heads among {size} ranks: each sends {forward:,.2f} MiB of "
            f"queries, keys and values and {back:,.2f} MiB of output per layer, forward; backward as much"
        )

    @property
    def verdict(self) -> str:
        """The balance and the messages, in a line of text."""
        text = f"slowest rank: {self.slowest:.3f} times the mean work"
        if self.ring.ranks == 1:
            return f"{text}; no rounds: every rank computes some heads of all tokens"
        return f"{text}; keys received: {self.share_received:.1%} of an all-gather's"


def context_json(division: Division) -> dict[str, Any]:
    """Numbers of all ranks; ``work`` is in pairs of query and key."""
    names = ("source", "target", "sent", "received")
    ranks = [
        {
            "rank": rank,
            "runs": [list(run) for run in runs],
            "tokens": division.slice.share,
            "work": division.work(rank),
            "received": received,
            "rounds": [{name: getattr(step, name) for name in names} for step in steps],
        }
        for rank, (runs, received, steps) in enumerate(
            zip(division.slice.runs, division.received, division.rounds)
        )
    ]
    balances = {
        balance: {"slowest_over_mean": slowest, "received": received, "received_over_all_gather": share}
        for balance, slowest, received, share in division.comparisons
    }
    return {
        "method": division.method,
        "balance": division.slicing.balance,
        "ulysses": division.slicing.ulysses,
        "window": division.slicing.window,
        "sequences": division.slice.sequences,
        "length": division.slice.length,
        "documents": division.documents,
        "ranks": ranks,
        "slowest_over_mean": division.slowest,
        "received_over_all_gather": division.share_received,
        "balances": balances,
    }


_MOST_ROUNDS = 16
_MOST_RUNS = 4
"""Runs of a rank that the terminal shows."""


def context_text(division: Division) -> RenderableType:
    """Tables of what ranks hold, of rounds and of balances."""
    parts: list[RenderableType] = [
        Text(f"{division.title}: {division.how}", style="bold"),
        division.content,
        Text(),
        _ranks(division),
    ]
    if division.slice.ranks > MOST_RANKS:
        parts.append(f"shown: the first {MOST_RANKS} of {division.slice.ranks:,} ranks; --json lists all")
    if division.exchange_text:
        parts += [Text(), division.exchange_text]
    if division.comparisons:
        parts += [Text(), *_rounds(division), Text(), _balances(division)]
    return Group(*parts, Text(), division.verdict)


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="dim")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _ranks(division: Division) -> Table:
    table = _table("rank", "tokens", "runs", "work", "received")
    table.add_column("first to last token")
    for rank, runs in enumerate(division.slice.runs[:MOST_RANKS]):
        places = ", ".join(f"{begin:,}-{end - 1:,}" for begin, end in runs[:_MOST_RUNS])
        numbers = (f"{division.slice.share:,}", f"{len(runs):,}", f"{division.relative_work[rank]:.3f}")
        more = ", ..." * (len(runs) > _MOST_RUNS)
        table.add_row(str(rank), *numbers, f"{division.received[rank]:,}", f"{places}{more}")
    return table


def _rounds(division: Division) -> list[RenderableType]:
    """A row per round: ranks send as many tokens or fewer, and wait for the one that receives the most."""
    size = division.slicing.ulysses
    table = _table("round", "to rank", "tokens sent: least", "mean", "most", "MiB, most")
    for steps in list(zip(*division.rounds))[:_MOST_ROUNDS]:
        number, sent = steps[0].distance, [step.sent for step in steps]
        numbers = (f"{min(sent):,}", f"{sum(sent) / len(sent):,.0f}", f"{max(sent):,}")
        table.add_row(str(number), f"+ {number * size}", *numbers, f"{max(sent) * division.pair / _MIB:,.2f}")
    count = division.ring.ranks - 1
    shown = f"; the first {_MOST_ROUNDS} of {count} rounds" if count > _MOST_ROUNDS else ""
    note = Text(f"keys and values of one layer, forward{shown}; backward sends twice as much", style="dim")
    return [table, note]


def _balances(division: Division) -> Table:
    table = _table("parallel.context_balance", "slowest / mean", "received per rank", "of an all-gather")
    for balance, slowest, received, share in division.comparisons:
        used = balance == division.slicing.balance
        name, style = (f"{balance} (this run)", "bold") if used else (balance, "")
        table.add_row(name, f"{slowest:.3f}", f"{received:,.0f}", f"{share:.1%}", style=style)
    return table


MOST_BOUNDARIES = 200
"""Documents whose beginnings are drawn; lines of more would hide the tokens."""
_MOST_TIPS = 100
"""Runs of a rank that a page describes where the pointer rests on them."""
_COLUMNS = 2000
"""Parts of the microbatch that have a colour of their own: that of the token in their middle."""


@styled
def context_figure(division: Division) -> Figure:
    """A row per rank: its tokens, coloured by how many keys they attend to, its work and what it receives."""
    import numpy as np
    from matplotlib.figure import Figure

    slice_, ranks = division.slice, min(division.slice.ranks, MOST_RANKS)
    figure = Figure((10.5, 2.2 + 0.3 * ranks), layout="constrained", label=division.title)
    figure.suptitle(f"{division.title}: {division.how}", x=0.01, ha="left", size=12, weight="bold")
    tokens = ((np.arange(_COLUMNS) + 0.5) * slice_.tokens / _COLUMNS).astype(np.int64)
    bounds = np.array(slice_.bounds)
    seen = tokens + 1 - bounds[np.searchsorted(bounds, tokens, side="right") - 1]
    keys = np.minimum(seen, division.slicing.window or slice_.tokens)
    tokens_held = np.full((ranks, _COLUMNS), np.nan)
    for row, runs in zip(tokens_held, slice_.runs):
        for begin, end in runs:
            inside = slice(*np.searchsorted(tokens, (begin, end)))
            row[inside] = keys[inside]
    axes = figure.subplots()
    axes.set_facecolor(PALE_GREY)
    extent = (0, slice_.tokens, ranks - 0.5, -0.5)
    image = axes.imshow(tokens_held, "YlGnBu", aspect="auto", interpolation="nearest", vmin=0, extent=extent)
    for rank, runs in enumerate(slice_.runs[:ranks]):
        for begin, end in runs[:_MOST_TIPS]:
            text = f"rank {rank}: tokens {begin:,} to {end - 1:,}, {end - begin:,} in all"
            tip(axes, begin, end, rank - 0.4, rank + 0.4, text)
    axes.hlines(np.arange(1, ranks) - 0.5, 0, slice_.tokens, color="white", linewidth=3)
    omitted = f"; shown: the first {MOST_RANKS} of {slice_.ranks} ranks" if slice_.ranks > ranks else ""
    lines = ""
    if 0 < len(bounds) - 2 <= MOST_BOUNDARIES:
        axes.vlines(bounds[1:-1], -0.5, ranks - 0.5, color=PALETTE[5], linewidth=0.6)
        lines = "; lines: where a document begins"
    axes.set_title("\n".join(filter(None, (division.content, division.exchange_text, division.verdict))))
    axes.set_xlabel(f"token{lines}{omitted}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.spines[:].set_visible(False)
    numbers = zip(range(ranks), division.relative_work, division.received)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(ranks), [f"work {work:.3f}, received {count:,}" for _, work, count in numbers])
    right.spines[:].set_visible(False)
    scale = figure.colorbar(image, ax=axes, location="bottom", fraction=0.05, aspect=60)
    scale.set_label("keys that a token sees")
    return figure
