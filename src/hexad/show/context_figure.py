"""The picture of a microbatch that is divided among context ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hexad.parallel.context.slice import Run

from .context import MOST_RANKS, Division
from .figure import GREY, PALE, PALE_GREY, PALETTE, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

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
