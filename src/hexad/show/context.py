"""How one microbatch is divided among context ranks: the tokens of every rank, its attention work and what it
receives: data, the terminal's bars and tables, and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hexad.model.inventory import ModelInventory
from hexad.parallel.context.rounds import Round, rounds
from hexad.parallel.context.slice import Balance, Run, Slice, Slicing
from hexad.planning import Resolved
from hexad.planning.memory import execution

from .figure import GREY, PALE, PALE_GREY, PALETTE, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MOST_RANKS = 32
"""Ranks that are shown: the first so many."""
_MIB = 2**20


class Comparison(NamedTuple):
    """What a balance gives for the same microbatch.

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
        source: where the documents come from, for people; empty where they are joined.
    """

    title: str
    method: str
    slicing: Slicing
    slice: Slice
    pair: int
    exchanged: tuple[int, ...]
    source: str = ""

    @classmethod
    def of(
        cls, resolved: Resolved, title: str, documents: tuple[int, ...] | None, source: str = ""
    ) -> Division:
        """A microbatch of a run.

        Args:
            resolved: the run.
            title: names it.
            documents: where documents begin, and the total; None where every sequence is one.
            source: see the attribute.
        """
        config = resolved.config
        slicing = Slicing.of(config.parallel, config.model)
        slice_ = slicing.divided(config.batch.micro, config.data.sequence, documents)
        parallel = config.parallel
        whole = ModelInventory(config.model, parallel.sequence_parallel, parallel.tensor)
        attention, run = whole.attention, execution(config, resolved.layout)
        sent = [each for each in attention.over_context(run) if (each.action, each.axis) == ("F", "ulysses")]
        exchanged = tuple(each.nbytes for each in sent)
        pair = attention.pair_bytes(run)
        return cls(title, config.parallel.context_method, slicing, slice_, pair, exchanged, source)

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

    def attended(self, begin: int, end: int) -> float:
        """Keys that a token of a run sees, the mean."""
        from hexad.parallel.context.balance import work_of  # numpy

        return work_of(self.slice.bounds, [(begin, end)], self.slicing.window) / (end - begin)

    @cached_property
    def relative_work(self) -> list[float]:
        """Of every rank, over the mean."""
        work = [self.work(rank) for rank in range(self.slice.ranks)]
        mean = sum(work) / len(work)
        return [each / mean for each in work]

    @property
    def slowest(self) -> float:
        """Work of the rank with the most, over the mean."""
        return max(self.relative_work)

    @cached_property
    def rounds(self) -> list[list[Round]]:
        """Of every rank, those with messages; sources and targets are context ranks."""
        size = self.slicing.ulysses
        complete = self.method == "all_gather"
        groups = [
            rounds(self.ring, group, self.slicing.window, complete=complete)[1:]
            for group in range(self.ring.ranks)
        ]
        return [
            [
                replace(each, source=each.source * size + place, target=each.target * size + place)
                for each in group
            ]
            for group in groups
            for place in range(size)
        ]

    @property
    def received(self) -> list[int]:
        """Tokens whose keys and values each rank receives in all rounds."""
        return [sum(each.received for each in mine) for mine in self.rounds]

    @property
    def gathered(self) -> int:
        """Tokens whose keys and values each rank would receive in an all-gather."""
        return self.ring.tokens - self.ring.share

    @property
    def share_received(self) -> float:
        """Tokens that ranks receive, over those of an all-gather; 0 without rounds."""
        return sum(self.received) / (len(self.received) * max(1, self.gathered))

    @property
    def sent(self) -> list[list[int]]:
        """Tokens whose keys and values a rank (row) sends to another (column)."""
        matrix = [[0] * self.slice.ranks for _ in range(self.slice.ranks)]
        for row, mine in zip(matrix, self.rounds):
            for each in mine:
                row[each.target] = each.sent
        return matrix

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """All balances; none where all ranks exchange heads: each then has some heads of all tokens."""
        if self.ring.ranks == 1:
            return []
        found = []
        for balance in sorted(get_args(Balance)):
            other = self if balance == self.slicing.balance else self._with(balance)
            mean = sum(other.received) / len(other.received)
            found.append(Comparison(balance, other.slowest, mean, other.share_received))
        return found

    def _with(self, balance: Balance) -> Division:
        slicing = replace(self.slicing, balance=balance)
        given = self.slice
        return replace(
            self, slicing=slicing, slice=slicing.divided(given.sequences, given.length, given.bounds)
        )

    def mib(self, tokens: float) -> float:
        """Of the keys and values of tokens that a rank receives in rounds, for one layer."""
        return tokens * self.pair / _MIB

    @property
    def content(self) -> str:
        """What the microbatch consists of."""
        it, lengths = self.slice, self.documents
        text = f"{it.sequences:,} sequence{'s' * (it.sequences > 1)} of {it.length:,} tokens"
        if self.source:
            span = f"{min(lengths):,} to {max(lengths):,}" if len(lengths) > 1 else f"{lengths[0]:,}"
            text += f", {len(lengths):,} document{'s' * (len(lengths) > 1)} of {span} tokens ({self.source})"
        window = self.slicing.window
        return text + (f", window {window:,}" if window is not None else "")

    @property
    def how(self) -> str:
        """Method and balance."""
        size = self.slicing.ulysses
        group = f" (groups of {size})" if self.method == "ulysses_ring" else ""
        return f"{self.method}{group}, balance {self.slicing.balance}"

    @property
    def exchange_text(self) -> str:
        """What the exchange of heads sends; empty without one."""
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
        """Balance and messages, in a line."""
        text = f"slowest rank: {self.slowest:.3f} times the mean work"
        if self.ring.ranks == 1:
            return f"{text}; no rounds: every rank computes some heads of all tokens"
        return f"{text}; keys received: {self.share_received:.1%} of an all-gather's"


def context_json(division: Division) -> dict[str, Any]:
    """Numbers of all ranks; ``work`` is in pairs of query and key."""
    it = division
    ranks = [
        {
            "rank": rank,
            "runs": [list(run) for run in runs],
            "tokens": it.slice.share,
            "work": it.work(rank),
            "received": received,
            "rounds": [_round_json(each) for each in mine],
        }
        for rank, (runs, received, mine) in enumerate(zip(it.slice.runs, it.received, it.rounds))
    ]
    balances = {
        each.balance: {
            "slowest_over_mean": each.slowest,
            "received": each.received,
            "received_over_all_gather": each.share,
        }
        for each in it.comparisons
    }
    return {
        "method": it.method,
        "balance": it.slicing.balance,
        "ulysses": it.slicing.ulysses,
        "window": it.slicing.window,
        "sequences": it.slice.sequences,
        "length": it.slice.length,
        "documents": it.documents,
        "ranks": ranks,
        "slowest_over_mean": it.slowest,
        "received_over_all_gather": it.share_received,
        "balances": balances,
    }


def _round_json(each: Round) -> dict[str, int]:
    names = ("source", "target", "sent", "received")
    return {name: getattr(each, name) for name in names}


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


MOST_BOUNDARIES = 200
"""Documents whose beginnings are drawn; lines of more would hide the tokens."""
_PIECES = 400
"""Parts of the microbatch that have a colour of their own, at least."""
_BLUES = ("#dbeaf6", "#6aaed6", "#0b559f", "#08306b")


@styled
def context_figure(division: Division) -> Figure:
    """A row per rank: its tokens, coloured by how many keys they attend to, and its work; below, what ranks
    send each other and what other balances give."""
    from matplotlib.figure import Figure

    it = division
    ranks = min(it.slice.ranks, MOST_RANKS)
    heights = [1.5 + 0.26 * ranks]
    if it.comparisons:
        heights.append(2.6 if ranks <= 8 else 3.6)
    figure = Figure((10.5, 0.4 + sum(heights)), layout="constrained", label=it.title)
    figure.suptitle(f"{it.title}: {it.how}", x=0.01, ha="left", size=12, weight="bold")
    top, *bottom = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    notes = filter(None, (it.content, it.exchange_text, it.verdict))
    top.suptitle("\n".join(notes), x=0.01, ha="left", size=9.5)
    _draw_tokens(top, it, ranks)
    for part in bottom:
        matrix, *others = part.subplots(1, 3, width_ratios=(1.25, 1, 1))
        _draw_sent(matrix, it, ranks)
        _draw_balances(others, it)
    return figure


def _draw_tokens(part: SubFigure, division: Division, ranks: int) -> None:
    """The runs of every rank, and its work."""
    it = division
    tokens, work = part.subplots(1, 2, width_ratios=(5, 1.1), sharey=True)
    tokens.barh(range(ranks), it.slice.tokens, 0.86, color=PALE_GREY)
    _draw_runs(part, tokens, it, ranks)
    starts = it.slice.bounds[1:-1]
    if len(starts) <= MOST_BOUNDARIES:
        tokens.vlines(starts, -0.5, ranks - 0.5, color=PALETTE[5], linewidth=0.6)
    omitted = f"; shown: the first {MOST_RANKS} of {it.slice.ranks}" if it.slice.ranks > ranks else ""
    lines = "" if not starts or len(starts) > MOST_BOUNDARIES else ", lines: where a document begins"
    tokens.set_title(f"Tokens of every rank{lines}{omitted}")
    tokens.set(xlim=(0, it.slice.tokens), ylim=(ranks - 0.5, -0.5), xlabel="token")
    tokens.xaxis.set_major_formatter("{x:,.0f}")
    tokens.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    shares = it.relative_work[:ranks]
    work.barh(range(ranks), shares, 0.86, color=PALE[0])
    work.axvline(1, color=GREY, linewidth=1, linestyle="--")
    for rank, share in enumerate(shares):
        work.text(0.03, rank, f"{share:.3f}", va="center_baseline")
    work.set(title="Attention work", xlabel="over the mean", xlim=(0, 1.1 * max(shares)))
    work.tick_params(labelleft=False)
    for axes in (tokens, work):
        axes.spines[:].set_visible(False)


def _draw_runs(part: SubFigure, axes: Axes, division: Division, ranks: int) -> None:
    """Boxes that are cut where a document begins and finely enough for the colour to follow the work."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap

    boxes, keys = [], []
    for rank in range(ranks):
        for begin, end in _cut(division, rank):
            low, high = rank - 0.43, rank + 0.43
            boxes.append([(begin, low), (end, low), (end, high), (begin, high)])
            keys.append(division.attended(begin, end))
    drawn = PolyCollection(
        boxes,
        array=keys,
        cmap=LinearSegmentedColormap.from_list("work", _BLUES),
        linewidths=0,
        antialiaseds=False,
    )
    drawn.set_clim(0, max(keys))
    axes.add_collection(drawn)
    scale = part.colorbar(drawn, ax=axes, pad=0.01, aspect=max(12, 5 * ranks), fraction=0.03)
    scale.set_label("keys that a token sees")
    scale.outline.set_visible(False)
    scale.ax.yaxis.set_major_formatter("{x:,.0f}")


def _cut(division: Division, rank: int) -> list[Run]:
    """The runs of a rank in pieces."""
    slice_ = division.slice
    size = -(-slice_.tokens // _PIECES)
    found: list[Run] = []
    for begin, end in slice_.runs[rank]:
        cuts = {begin, end, *range(begin - begin % size + size, end, size)}
        cuts.update(each for each in slice_.bounds if begin < each < end)
        found += pairwise(sorted(cuts))
    return found


def _draw_sent(axes: Axes, division: Division, ranks: int) -> None:
    """Tokens that ranks (rows) send to ranks (columns), with numbers where there is room."""
    from matplotlib.colors import LinearSegmentedColormap

    sent = [row[:ranks] for row in division.sent[:ranks]]
    most = max(max(row) for row in sent)
    axes.pcolormesh(
        sent,
        cmap=LinearSegmentedColormap.from_list("sent", ("#ffffff", PALE[1], PALETTE[1])),
        vmin=0,
        vmax=max(1, most),
        edgecolors=PALE_GREY,
        linewidth=0.8,
    )
    for rank in range(ranks):  # nothing is sent to itself
        axes.fill_between((rank, rank + 1), rank, rank + 1, color=PALE_GREY, linewidth=0)
    if ranks <= 8:
        for row, counts in enumerate(sent):
            for column, count in enumerate(counts):
                if count:
                    axes.text(column + 0.5, row + 0.5, f"{count:,}", ha="center", va="center", size=6.5)
    step = -(-ranks // 16)
    places = [rank + 0.5 for rank in range(0, ranks, step)]
    axes.set_xticks(places, [str(rank) for rank in range(0, ranks, step)])
    axes.set_yticks(places, [str(rank) for rank in range(0, ranks, step)])
    axes.set(xlabel="to rank", ylabel="from rank", ylim=(ranks, 0))
    axes.set_title(
        f"Keys and values sent, in tokens\n(at most {most:,}: {division.mib(most):,.2f} MiB per layer)"
    )
    axes.spines[:].set_visible(False)


def _draw_balances(panels: list[Axes], division: Division) -> None:
    """Work of the slowest rank and tokens received, for each balance."""
    found = division.comparisons
    names = [each.balance for each in found]
    colours = [PALETTE[0] if name == division.slicing.balance else PALE_GREY for name in names]
    slowest = [each.slowest for each in found]
    received = [each.received for each in found]
    labels = [
        [f"{each:.3f}" for each in slowest],
        [f"{each.received:,.0f} ({each.share:.0%})" for each in found],
    ]
    titles = (
        "Work of the slowest rank\n(over the mean)",
        "Received per rank, in tokens\n(part of an all-gather's)",
    )
    for axes, values, texts, title in zip(panels, (slowest, received), labels, titles):
        bars = axes.barh(names, values, 0.5, color=colours)
        axes.bar_label(bars, texts, padding=3)
        axes.set(title=title, xlim=(0, 1.45 * max(*values, 1)))
        axes.set_xticks([])
        axes.invert_yaxis()
        axes.spines["bottom"].set_visible(False)
    panels[0].axvline(1, color=GREY, linewidth=1, linestyle="--")
