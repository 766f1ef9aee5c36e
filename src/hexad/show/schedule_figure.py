"""The picture of a pipeline schedule, or of several with one time axis. All lengths are in inches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .figure import INK, MUTED, RULE
from .schedule import MEANINGS, Chart, colours, rows, rows_note, shades, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DRAWN = 12_000
"""Boxes that a picture has room for; of longer schedules it shows the beginning and the end and says so."""

_MARGIN = 0.35
_LABELS = 0.62
_COLUMNS = 1.35
_NARROWEST, _WIDEST = 6.4, 13.0
_GAP = 0.45
_IDLE = "#e6e8ed"
_SMALLEST_FONT = 4.5
_FOOTNOTES = (
    "bubble, idle: waiting, as part of the time between the first and the last action of the slowest rank",
    "activations: the most that a rank holds at once, in stages x microbatches",
)


@dataclass(frozen=True)
class _Scale:
    """Where times stand: windows of time from left to right, with gaps between them."""

    windows: tuple[tuple[float, float], ...]
    per_time: float
    left: float = _MARGIN + _LABELS

    def pieces(self, start: float, end: float) -> list[tuple[float, float]]:
        """(left, right) of the parts of a stretch of time that are shown."""
        found = []
        left = self.left
        for begin, until in self.windows:
            if start < until and end > begin:
                shown = (max(start, begin), min(end, until))
                found.append(
                    (left + (shown[0] - begin) * self.per_time, left + (shown[1] - begin) * self.per_time)
                )
            left += (until - begin) * self.per_time + _GAP
        return found

    @property
    def width(self) -> float:
        shown = sum(until - begin for begin, until in self.windows)
        return shown * self.per_time + _GAP * (len(self.windows) - 1)


def schedule_figure(charts: Sequence[Chart], note: str = "") -> Figure:
    """One chart, or several one above the other: a row per rank, a box per action, idle time grey.

    Args:
        charts: of schedules of the same pipeline ranks.
        note: added to the title, such as the step it was measured at.
    """
    from matplotlib.figure import Figure

    first = charts[0]
    drawn = rows(first.schedule.pipeline)
    scale = _scale(charts, drawn)
    pitch = 0.3 if len(drawn) <= 16 else 0.2
    notes = _notes(charts, scale)
    each = 0.5 + pitch * len(drawn) + 0.42
    legend = 0.3 if 1 + max(first.turns) == 1 else 0.5
    width = scale.left + max(scale.width, _NARROWEST) + _COLUMNS + _MARGIN
    top = _MARGIN + 0.36 + legend
    height = top + each * len(charts) + 0.18 * (len(notes) + len(_FOOTNOTES)) + _MARGIN

    title = first.title + note
    figure = Figure(figsize=(width, height), facecolor="white", label=title)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    axes.text(_MARGIN, _MARGIN, title, size=14, weight="bold", color=INK, va="top")
    _legend(axes, first, _MARGIN + 0.36)
    font = _font(charts, scale, pitch)
    for chart in charts:
        _chart(axes, chart, drawn, scale, (top, pitch, font))
        top += each
    for text, colour in [(text, INK) for text in notes] + [(text, MUTED) for text in _FOOTNOTES]:
        axes.text(
            _MARGIN, top, text, size=8, color=colour, va="top", style="italic" if text in notes else None
        )
        top += 0.18
    return figure


def _scale(charts: Sequence[Chart], drawn: Sequence[int]) -> _Scale:
    end = max(end for chart in charts for row in chart.times for _, end in row[-1:]) or 1.0
    count = max(sum(len(chart.times[rank]) for rank in drawn) for chart in charts)
    windows: tuple[tuple[float, float], ...] = ((0.0, end),)
    if count > MOST_DRAWN:
        half = end * MOST_DRAWN / count / 2
        windows = ((0.0, half), (end - half, end))
    shown = sum(until - begin for begin, until in windows)
    shortest = min((time for chart in charts for time in chart.durations().values()), default=shown)
    # A quarter of an inch for the shortest action, as far as the page goes.
    return _Scale(windows, min(_WIDEST, max(_NARROWEST, 0.25 * shown / shortest)) / shown)


def _notes(charts: Sequence[Chart], scale: _Scale) -> list[str]:
    parts = [rows_note(charts[0].schedule.pipeline)]
    if len(scale.windows) > 1:
        half, end = scale.windows[0][1], scale.windows[1][1]
        unit = f" {charts[0].unit}" if charts[0].unit else ""
        parts.append(f"the first and the last {half:.3g}{unit} of {end:.4g}")
    parts = [part for part in parts if part]
    return [f"drawn: {'; '.join(parts)}"] if parts else []


def _font(charts: Sequence[Chart], scale: _Scale, pitch: float) -> float:
    """Points, such that most numbers fit into their boxes; 0 where they would be too small to read."""
    shortest = min((time for chart in charts for time in chart.durations().values()), default=0.0)
    font = min(9.0, 72 * pitch * 0.45, 72 * shortest * scale.per_time / (0.68 * _digits(charts)))
    return font if font >= _SMALLEST_FONT else 0.0


def _digits(charts: Sequence[Chart]) -> int:
    return max(2, len(str(max(chart.schedule.microbatches for chart in charts) - 1)))


def _legend(axes: Axes, chart: Chart, top: float) -> None:
    turns = 1 + max(chart.turns)
    shown = sorted({0, turns - 1, (turns - 1) // 2})
    x = _MARGIN
    for kind in chart.kinds:
        for turn in shown:
            fill, ink = colours(kind, turn, turns)
            _box(axes, x, top, 0.25, 0.16, fill)
            axes.text(x + 0.125, top + 0.08, kind, size=7, color=ink, ha="center", va="center")
            x += 0.27
        axes.text(x + 0.04, top + 0.08, MEANINGS[kind], size=8.5, color=INK, va="center")
        x += 0.066 * len(MEANINGS[kind]) + 0.28
    _box(axes, x, top, 0.25, 0.16, _IDLE)
    axes.text(x + 0.31, top + 0.08, "idle", size=8.5, color=INK, va="center")
    if text := shades(turns):
        axes.text(_MARGIN, top + 0.22, text, size=8.5, color=MUTED, va="top")


def _box(axes: Axes, x: float, y: float, width: float, height: float, fill: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="none"))


def _chart(
    axes: Axes, chart: Chart, drawn: Sequence[int], scale: _Scale, place: tuple[float, float, float]
) -> None:
    """One chart.

    Args:
        axes: in inches, y downwards.
        chart: what.
        drawn: its ranks in use.
        scale: where times stand.
        place: top, distance of rows, and size of numbers in points (0: none).
    """
    top, pitch, font = place
    right = scale.left + max(scale.width, 0.0)
    columns = (right + 0.55, right + _COLUMNS)
    axes.text(_MARGIN, top + 0.12, chart.facts, size=10, color=INK, va="center")
    for x, heading in zip(columns, ("idle", "activations")):
        axes.text(x, top + 0.38, heading, size=8, color=MUTED, ha="right", va="center")
    top += 0.5
    small = min(9.0, 72 * pitch * 0.55)
    for index, rank in enumerate(drawn):
        middle = top + (index + 0.5) * pitch
        axes.text(_MARGIN, middle, f"rank {rank}", size=small, color=INK, va="center_baseline")
        for x, text in zip(columns, (f"{chart.idle[rank]:.1%}", f"{chart.peak_activations[rank]:,}")):
            axes.text(x, middle, text, size=small, color=INK, ha="right", va="center_baseline")
        for left, until in scale.pieces(0.0, chart.timeline.makespan):
            _box(axes, left, middle - 0.44 * pitch, until - left, 0.88 * pitch, _IDLE)
    _boxes(axes, chart, drawn, scale, place=(top, pitch, font))
    _time_axis(axes, scale, top + len(drawn) * pitch + 0.03, chart.unit)


def _boxes(
    axes: Axes, chart: Chart, drawn: Sequence[int], scale: _Scale, place: tuple[float, float, float]
) -> None:
    from matplotlib.collections import PolyCollection

    top, pitch, font = place
    turns = 1 + max(chart.turns)
    looks = {(kind, turn): colours(kind, turn, turns) for kind in chart.kinds for turn in range(turns)}
    needed = 0.6 * font / 72
    corners, fills, widths = [], [], []
    for index, rank in enumerate(drawn):
        middle = top + (index + 0.5) * pitch
        above, below = middle - 0.44 * pitch, middle + 0.44 * pitch
        for action, start, end in chart.boxes(rank):
            fill, ink = looks[action.kind, chart.turns[action.stage]]
            number = str(action.microbatch)
            for left, right in scale.pieces(start, end):
                corners.append([(left, above), (right, above), (right, below), (left, below)])
                fills.append(fill)
                widths.append(right - left)
                if font and right - left >= needed * len(number):
                    x = (left + right) / 2
                    axes.text(x, middle, number, size=font, color=ink, ha="center", va="center_baseline")
    typical = sorted(widths)[len(widths) // 2] if widths else 0.0
    line = 0.9 if typical > 0.1 else 0.5 if typical > 0.05 else 0.2
    axes.add_collection(PolyCollection(corners, facecolors=fills, edgecolors="white", linewidths=line))


def _time_axis(axes: Axes, scale: _Scale, top: float, unit: str) -> None:
    left = scale.left
    for number, (begin, end) in enumerate(scale.windows):
        length = (end - begin) * scale.per_time
        axes.plot([left, left + length], [top, top], color=RULE, linewidth=0.8)
        for tick in ticks(begin, end, int(length / 0.8)):
            x = left + (tick - begin) * scale.per_time
            axes.plot([x, x], [top, top + 0.04], color=RULE, linewidth=0.8)
            axes.text(x, top + 0.06, f"{tick:.6g}", size=8, color=MUTED, ha="center", va="top")
        if number:
            axes.text(left - _GAP / 2, top, "...", size=10, color=MUTED, ha="center", va="center")
        left += length + _GAP
    label = f"time, {unit}" if unit else "time"
    axes.text(_MARGIN, top + 0.06, label, size=8, color=MUTED, va="top")
