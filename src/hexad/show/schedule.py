"""A pipeline schedule in time: its data, rows of characters for the terminal, and the picture.

One row per pipeline rank, time to the right, one box per action, as in the figures of Qi et al. (arXiv
2401.10241 and 2405.15362).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hexad.config import HexadError
from hexad.config.files import read_json
from hexad.parallel.pipeline.schedule import Action, Schedule
from hexad.parallel.pipeline.simulate import Timeline
from hexad.parallel.pipeline.validate import validate

from .figure import PALE, PALE_GREY, PALETTE, styled, tip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 32
"""Ranks that are shown: the first so many."""

MEANINGS = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "both gradients"}
"""Legend of the kinds of actions."""

COLOURS = dict(zip(MEANINGS, zip(PALE, PALETTE)))
"""Colours by kind: pale for a rank's first, third, .. stage, full for its second, fourth, .. stage."""


class Box(NamedTuple):
    """An action in time; its kind is in lower case in a rank's second, fourth, .. stage."""

    kind: str
    microbatch: int
    colour: str
    start: float
    end: float


@dataclass(frozen=True)
class Chart:
    """A schedule with times, to be drawn.

    Attributes:
        timeline: a valid schedule and when each of its actions starts and ends, the first at 0.
        label: distinguishes several charts of a picture, such as ``planned``.
        unit: of time, such as ``s``; empty where only ratios have a meaning.
        basis: description of where the times come from.
    """

    timeline: Timeline
    label: str = ""
    unit: str = ""
    basis: str = ""

    @property
    def title(self) -> str:
        """Heading of the chart: ``zb_v: pipeline 4, stages 8, microbatches 8``."""
        schedule = self.timeline.schedule
        counts = f"stages {schedule.stages}, microbatches {schedule.microbatches}"
        return f"{schedule.name}: pipeline {schedule.pipeline}, {counts}"

    @property
    def facts(self) -> str:
        """Key figures: ``planned: bubble 12.5%, makespan 24``."""
        label = f"{self.label}: " if self.label else ""
        unit = f" {self.unit}" if self.unit else ""
        basis = f" ({self.basis})" if self.basis else ""
        return f"{label}bubble {self.timeline.bubble:.1%}, makespan {self.timeline.makespan:.4g}{unit}{basis}"

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Most activations held at once, per rank, in stages x microbatches."""
        return validate(self.timeline.schedule).peak_activations

    def boxes(self, rank: int) -> list[Box]:
        """The actions of a rank as boxes."""
        boxes, later = [], self.timeline.schedule.stages_of(rank)[1::2]
        for action, times in zip(self.timeline.schedule.ranks[rank], self.timeline.times[rank]):
            kind = action.kind.lower() if action.stage in later else action.kind
            boxes.append(Box(kind, action.microbatch, COLOURS[action.kind][action.stage in later], *times))
        return boxes

    def idle(self, rank: int) -> float:
        """Idle fraction of the time from first to last action of the rank where that is longest."""
        busy = sum(end - start for start, end in self.timeline.times[rank])
        return max(0.0, 1 - busy / (self.timeline.span or 1.0))

    def short(self) -> float:
        """Duration of a short action: nine in ten take as long or longer."""
        durations = sorted(end - start for row in self.timeline.times for start, end in row if end > start)
        return durations[len(durations) // 10] if durations else 0.0

    def kinds(self) -> list[str]:
        """The kinds of actions in use."""
        used = {action.kind for actions in self.timeline.schedule.ranks for action in actions}
        return [kind for kind in MEANINGS if kind in used]


def read_timeline(path: str | Path) -> tuple[int, list[Chart]]:
    """(step, charts of it as planned and as measured) from a run's ``timeline.json``, in seconds.

    Raises:
        HexadError: the file cannot be read, or its content is not a timeline.
    """
    try:
        tree = read_json(path)
        return int(tree["step"]), [_from_tree(tree[label], label) for label in ("planned", "measured")]
    except (OSError, KeyError, TypeError, ValueError, HexadError) as error:
        raise HexadError(
            f"{path}: cannot be read as a timeline ({error!r}); delete it to see the schedule as configured"
        ) from None


def _from_tree(tree: Mapping[str, Any], label: str) -> Chart:
    """The chart of a tree from :meth:`Timeline.as_tree`; only actions and times are read."""
    ranks = tuple(
        tuple(Action(entry["kind"], entry["stage"], entry["microbatch"]) for entry in entries)
        for entries in tree["ranks"]
    )
    schedule = Schedule(tree["name"], tree["microbatches"], tuple(tree["placement"]), ranks)
    validate(schedule)
    begin = min(float(entry["start"]) for entries in tree["ranks"] for entry in entries)
    times = [[(e["start"] - begin, e["end"] - begin) for e in entries] for entries in tree["ranks"]]
    chart = Chart(Timeline.of(schedule, times), label, "s")
    if not (isfinite(chart.timeline.bubble) and chart.short() > 0):
        raise ValueError(f"{label}: found times that are not finite, or no action that takes any")
    return chart


def schedule_text(charts: Sequence[Chart], width: int, note: str = "") -> RenderableType:
    """Charts of the same pipeline ranks below each other, with one time scale, in ``width`` characters."""
    first, schedule = charts[0], charts[0].timeline.schedule
    end, short = max(chart.timeline.makespan for chart in charts), min(chart.short() for chart in charts)
    room = max(10, width - 21)  # the columns rank, idle and peak take 21
    scale = room / end  # characters per unit of time
    if not first.unit:
        # Times of a model repeat: a short action has at least one character, at most those of its label.
        letters = 1 + len(str(schedule.microbatches - 1))
        scale = max(1, min(letters, int(scale * short + 1e-9))) / short
    columns = min(room, round(end * scale))
    legend = Text()
    for kind in first.kinds():
        legend.append(f" {kind} ", f"black on {COLOURS[kind][0]}").append(f" {MEANINGS[kind]}   ")
    if any(chart.idle(rank) > _LEAST_IDLE for chart in charts for rank in range(schedule.pipeline)):
        legend.append("· idle")
    if schedule.stages > schedule.pipeline:
        legend.append("   (lower case: a rank's every second stage)")
    parts: list[RenderableType] = [Text(first.title + note, style="bold"), legend]
    for chart in charts:
        table = Table("rank", "", box=None, pad_edge=False, header_style="dim")
        table.add_column("idle", justify="right")
        table.add_column("peak", justify="right")
        for rank in range(min(schedule.pipeline, MOST_RANKS)):
            row = _row(chart.boxes(rank), scale, columns)
            table.add_row(str(rank), row, f"{chart.idle(rank):.0%}", str(chart.peak_activations[rank]))
        parts += [Text(), Text(chart.facts), table]
    if schedule.pipeline > MOST_RANKS:
        parts.append(f"shown: the first {MOST_RANKS} of {schedule.pipeline:,} ranks")
    if columns < round(end * scale):
        parts.append(f"shown: time 0 to {columns / scale:.3g} of {end:.4g}; --output FILE draws more")
    return Group(*parts)


def _row(boxes: Sequence[Box], scale: float, columns: int) -> Text:
    """Actions as characters, numbered where there is room; ``scale`` is columns per unit of time."""
    row = Text(no_wrap=True)
    for box in boxes:
        left, right = max(len(row), round(box.start * scale)), min(columns, round(box.end * scale))
        if right > left:
            label = f"{box.kind}{box.microbatch}"
            text = label if len(label) <= right - left else box.kind[: right - left]
            row.append("·" * (left - len(row)), "dim")
            row.append(text.ljust(right - left), f"black on {box.colour}")
    return row.append("·" * (columns - len(row)), "dim")


_LEAST_IDLE = 1e-6
"""Parts of the time below this are rounding."""

_POINTS = 8.5 / 0.08
"""Points of a digit that is an inch wide."""

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
    if any(chart.idle(rank) > _LEAST_IDLE for chart in charts for rank in range(ranks)):
        legend.append(Patch(color=PALE_GREY, label="idle"))
    if schedule.stages > schedule.pipeline:
        legend.append(Patch(alpha=0, label="dark: a rank's every second stage"))
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), frameon=False)
    return figure


def _draw(axes: Axes, chart: Chart, count: int, scale: float) -> None:
    """The first ``count`` ranks of a chart; ``scale`` is in inches per unit of time."""
    ranks = range(count)
    idle = [rank for rank in ranks if chart.idle(rank) > _LEAST_IDLE]
    axes.barh(idle, chart.timeline.makespan, 0.88, color=PALE_GREY)
    # One size for all numbers: that in which the longest fits a short action, if it can be read.
    longest = len(str(chart.timeline.schedule.microbatches - 1))
    size = max(4.0, min(8.5, _POINTS * chart.short() * scale / longest))
    unit = f" {chart.unit}" if chart.unit else ""
    border = min(0.8, 8 * scale * chart.short())  # narrow boxes have thin borders
    for rank in ranks:
        boxes = chart.boxes(rank)[:MOST_ACTIONS]
        places = [(box.start, box.end - box.start) for box in boxes]
        colours = [box.colour for box in boxes]
        axes.broken_barh(
            places, (rank - 0.44, 0.88), facecolors=colours, edgecolors="white", linewidth=border
        )
        for box, action in zip(boxes, chart.timeline.schedule.ranks[rank]):
            number = str(box.microbatch)
            if (box.end - box.start) * scale * _POINTS >= size * longest:
                middle = (box.start + box.end) / 2
                axes.text(middle, rank, number, ha="center", va="center_baseline", size=size)
            what = f"{MEANINGS[action.kind]} of microbatch {number} in stage {action.stage}"
            when = f"{box.start:.4g} to {box.end:.4g}{unit}"
            tip(axes, box.start, box.end, rank - 0.44, rank + 0.44, f"rank {rank}: {what}, {when}")
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
