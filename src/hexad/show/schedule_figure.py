"""The picture of a pipeline schedule, or of several with one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .figure import PALE_GREY, styled
from .schedule import COLOURS, MEANINGS, MOST_RANKS, Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ACTIONS = 256
"""Actions of a rank that are drawn: the first so many."""


@styled
def schedule_figure(charts: Sequence[Chart], note: str = "") -> Figure:
    """Charts of the same pipeline ranks below each other: a row per rank, a box per action, grey: idle."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    first = charts[0]
    schedule, title = first.timeline.schedule, first.title + note
    ranks = min(schedule.pipeline, MOST_RANKS)
    end = max(row[:MOST_ACTIONS][-1][1] for chart in charts for row in chart.timeline.times)
    # A quarter of an inch for a short action, as far as the page goes.
    length = max(6.0, min(13.0, 0.25 * end / min(chart.short() for chart in charts)))
    height = 1.0 + len(charts) * (0.6 + 0.28 * ranks)
    figure = Figure((length + 2.2, height), layout="constrained", label=title)
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold")
    panels = figure.subplots(len(charts), sharex=True, squeeze=False)[:, 0]
    for axes, chart in zip(panels, charts):
        _draw(axes, chart, ranks, length / end)
    shown = []
    if schedule.pipeline > ranks:
        shown.append(f"the first {ranks} of {schedule.pipeline} ranks")
    if (actions := max(map(len, schedule.ranks))) > MOST_ACTIONS:
        shown.append(f"the first {MOST_ACTIONS} of {actions} actions of a rank")
    unit = f", {first.unit}" if first.unit else ""
    panels[-1].set(xlabel=f"time{unit}{'; shown: ' if shown else ''}{' and '.join(shown)}", xlim=(0, end))
    legend = [Patch(color=COLOURS[kind][0], label=f"{kind}, {MEANINGS[kind]}") for kind in first.kinds()]
    legend.append(Patch(color=PALE_GREY, label="idle"))
    if schedule.stages > schedule.pipeline:
        legend.append(Patch(alpha=0, label="dark: a rank's every second stage"))
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), frameon=False)
    return figure


def _draw(axes: Axes, chart: Chart, count: int, scale: float) -> None:
    """The first ``count`` ranks of a chart; ``scale`` is in inches per unit of time."""
    ranks = range(count)
    axes.barh(ranks, chart.timeline.makespan, 0.88, color=PALE_GREY)
    border = min(0.8, 8 * scale * chart.short())  # narrow boxes have thin borders
    for rank in ranks:
        boxes = chart.boxes(rank)[:MOST_ACTIONS]
        places = [(box.start, box.end - box.start) for box in boxes]
        colours = [box.colour for box in boxes]
        axes.broken_barh(
            places, (rank - 0.44, 0.88), facecolors=colours, edgecolors="white", linewidth=border
        )
        for box in boxes:
            number = str(box.microbatch)
            if (box.end - box.start) * scale > 0.08 * len(number):  # inches that the digits take
                axes.text((box.start + box.end) / 2, rank, number, ha="center", va="center_baseline")
    axes.set_title(chart.facts)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(count - 0.5, -0.5)
    right = axes.secondary_yaxis("right")
    right.set_yticks(
        ranks,
        [f"idle {chart.idle(rank):.1%}, peak activations {chart.peak_activations[rank]}" for rank in ranks],
    )
    for spine in (*axes.spines.values(), *right.spines.values()):
        spine.set_visible(False)
