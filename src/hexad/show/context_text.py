"""The division of a microbatch among context ranks in the terminal: bars of tokens, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hexad.parallel.context.slice import Run, Slice

from .context import MOST_RANKS, Division
from .figure import PALETTE

_MOST_ROUNDS = 16
_SHADES = " ░▒▓█"
"""Of a character's tokens a rank holds none, some, about half, most, all."""


def context_text(division: Division, width: int) -> RenderableType:
    """Bars of the tokens that ranks hold, tables of rounds and balances, in ``width`` characters."""
    it = division
    parts: list[RenderableType] = [
        Text(f"{it.title}: {it.how}", style="bold"),
        it.content,
        Text(),
        _ranks(it, max(16, width - 39)),  # the other columns take 39
    ]
    if it.slice.ranks > MOST_RANKS:
        parts.append(f"shown: the first {MOST_RANKS} of {it.slice.ranks:,} ranks; --json lists all")
    if it.exchange_text:
        parts += [Text(), it.exchange_text]
    if it.comparisons:
        parts += [Text(), *_rounds(it), Text(), _balances(it)]
    return Group(*parts, Text(), it.verdict)


def _ranks(division: Division, columns: int) -> Table:
    it = division
    marks = "; |: a document begins" if it.source else ""
    table = Table("rank", f"tokens, first to last{marks}", box=None, pad_edge=False, header_style="dim")
    for heading in ("tokens", "runs", "work", "received"):
        table.add_column(heading, justify="right")
    if it.source:
        table.add_row("", Text(_marks(it.slice, columns), "dim", no_wrap=True))
    rows = zip(it.slice.runs, it.relative_work, it.received)
    for rank, (runs, work, received) in enumerate(rows):
        if rank == MOST_RANKS:
            break
        bar = Text(_bar(runs, it.slice.tokens, columns), f"{PALETTE[4]} on #e6e8ed", no_wrap=True)
        table.add_row(str(rank), bar, f"{it.slice.share:,}", f"{len(runs):,}", f"{work:.3f}", f"{received:,}")
    return table


def _marks(slice_: Slice, columns: int) -> str:
    """Where documents begin."""
    begins = {begin * columns // slice_.tokens for begin in slice_.bounds[:-1]}
    return "".join("|" if column in begins else " " for column in range(columns))


def _bar(runs: Sequence[Run], tokens: int, columns: int) -> str:
    """A character for each part of the tokens, darker the more of them are in the runs."""
    edges = [column * tokens / columns for column in range(columns + 1)]
    before = list(_held(runs, edges))
    parts = [(high - low) * columns / tokens for low, high in pairwise(before)]
    last = len(_SHADES) - 1
    return "".join(_SHADES[max(round(last * part), part > 1e-9)] for part in parts)


def _held(runs: Sequence[Run], places: Sequence[float]) -> list[float]:
    """Tokens of the runs before each of some ascending places."""
    sizes = [0, *accumulate(end - begin for begin, end in runs)]
    found, at = [], 0
    for place in places:
        while at < len(runs) and runs[at][1] <= place:
            at += 1
        found.append(sizes[at] + (max(0.0, place - runs[at][0]) if at < len(runs) else 0.0))
    return found


def _rounds(division: Division) -> list[RenderableType]:
    """A row per round: ranks send as many tokens or fewer, and wait for the one that receives the most."""
    it, size = division, division.slicing.ulysses
    table = Table("round", "to rank", box=None, pad_edge=False, header_style="dim")
    for heading in ("tokens sent: least", "mean", "most", "MiB, most"):
        table.add_column(heading, justify="right")
    for each in list(zip(*it.rounds))[:_MOST_ROUNDS]:
        sent = [message.sent for message in each]
        most = max(sent)
        table.add_row(
            str(each[0].distance),
            f"+ {each[0].distance * size}",
            f"{min(sent):,}",
            f"{sum(sent) / len(sent):,.0f}",
            f"{most:,}",
            f"{it.mib(most):,.2f}",
        )
    count = it.ring.ranks - 1
    shown = f"; the first {_MOST_ROUNDS} of {count} rounds" if count > _MOST_ROUNDS else ""
    note = Text(f"keys and values of one layer, forward{shown}; backward sends twice as much", style="dim")
    return [table, note]


def _balances(division: Division) -> Table:
    it = division
    headings = ("parallel.context_balance", "slowest / mean", "received per rank", "of an all-gather")
    table = Table(headings[0], box=None, pad_edge=False, header_style="dim")
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for each in it.comparisons:
        used = each.balance == it.slicing.balance
        table.add_row(
            f"{each.balance}{' (this run)' * used}",
            f"{each.slowest:.3f}",
            f"{each.received:,.0f}",
            f"{each.share:.1%}",
            style="bold" if used else "",
        )
    return table
