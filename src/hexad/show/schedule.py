"""A pipeline schedule in time: its data, lines for the terminal, and a picture.

One row per pipeline rank, time to the right, one box per action, as in the figures of Qi et al. (arXiv
2401.10241 and 2405.15362). The picture itself is in :mod:`hexad.show.schedule_figure`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexad.config import HexadError
from hexad.parallel.pipeline.schedule import KINDS, Action, Schedule, ScheduleError
from hexad.parallel.pipeline.simulate import Costs, Timeline, simulate
from hexad.parallel.pipeline.validate import validate

from .figure import INK, PALETTE, tint

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST_ROWS = 32
"""Ranks that are drawn; of more, evenly chosen ones, and it is said."""
MEANINGS = {
    "F": "forward",
    "B": "input gradient",
    "W": "weight gradient",
    "BW": "both gradients",
}
_COLOURS = {"F": PALETTE[0], "B": PALETTE[1], "W": PALETTE[2], "BW": PALETTE[3]}
_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved 1F1B",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb_v": "ZB-V",
    "dualpipe_v": "DualPipe-V",
    "auto": "Found by search",
}


@dataclass(frozen=True)
class Chart:
    """A schedule with times, to be drawn.

    Attributes:
        timeline: the schedule and when each of its actions starts and ends, the first at 0.
        peak_activations: most activations held at once, per rank, in stages x microbatches.
        label: tells several charts of a picture apart, such as ``planned``.
        unit: of time, such as ``s``; empty where only ratios have a meaning.
        basis: what the times were computed from, in words.
    """

    timeline: Timeline
    peak_activations: tuple[int, ...]
    label: str = ""
    unit: str = ""
    basis: str = ""

    @property
    def schedule(self) -> Schedule:
        """The actions."""
        return self.timeline.schedule

    @property
    def times(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """(start, end) of every action."""
        return self.timeline.times

    @property
    def title(self) -> str:
        """``ZB-V: 4 ranks with 2 stages each, 8 microbatches``."""
        schedule = self.schedule
        name = _NAMES.get(schedule.name, schedule.name)
        each = schedule.stages / schedule.pipeline
        stages = f" with {each:g} stages each" if each > 1 else ""
        microbatches = _count(schedule.microbatches, "microbatch")
        return f"{name}: {_count(schedule.pipeline, 'rank')}{stages}, {microbatches}"

    @property
    def facts(self) -> str:
        """``planned: bubble 12.5%, makespan 24``."""
        unit = f" {self.unit}" if self.unit else ""
        label = f"{self.label}: " if self.label else ""
        basis = f" ({self.basis})" if self.basis else ""
        return f"{label}bubble {self.timeline.bubble:.1%}, makespan {self.timeline.makespan:.4g}{unit}{basis}"

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Idle part of each rank, of the time from first to last action of the rank where that is longest."""
        span = self.timeline.span or 1.0
        return tuple(max(0.0, 1 - sum(end - start for start, end in row) / span) for row in self.times)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """Which of its rank's stages each stage is: 0 for the first."""
        seen: dict[int, int] = {}
        turns = []
        for rank in self.schedule.placement:
            turns.append(seen.get(rank, 0))
            seen[rank] = turns[-1] + 1
        return tuple(turns)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Those in use."""
        used = {action.kind for actions in self.schedule.ranks for action in actions}
        return tuple(kind for kind in KINDS if kind in used)

    def boxes(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """(action, start, end) of a rank."""
        for action, (start, end) in zip(self.schedule.ranks[rank], self.times[rank]):
            yield action, start, end

    def durations(self) -> dict[str, float]:
        """A short time of each kind of action that takes any: nine in ten take longer, or as long."""
        found: dict[str, list[float]] = {}
        for rank in rows(self.schedule.pipeline):
            for action, start, end in self.boxes(rank):
                if end > start:
                    found.setdefault(action.kind, []).append(end - start)
        return {kind: sorted(values)[len(values) // 10] for kind, values in found.items()}


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("h") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


# Charts from schedules and files


def simulated(schedule: Schedule, costs: Costs, basis: str = "") -> Chart:
    """A schedule as it would run with these costs; ``basis`` says in words what they are.

    Raises:
        ScheduleError: it is not valid.
    """
    peaks = validate(schedule).peak_activations
    return Chart(simulate(schedule, costs), peaks, basis=basis)


def read_timeline(path: str | Path) -> tuple[int, list[Chart]]:
    """(step, charts of it as planned and as measured) from a run's ``timeline.json``, in seconds.

    Raises:
        HexadError: the file cannot be read, or holds something else.
    """
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise HexadError(f"{path}: cannot be read as a timeline: {error}") from None
    try:
        labels = [label for label in ("planned", "measured") if label in tree]
        if not labels:
            raise KeyError("planned")
        return int(tree["step"]), [_from_tree(tree[label], label) for label in labels]
    except (KeyError, TypeError, ValueError, ScheduleError) as error:
        raise HexadError(
            f"{path}: not a timeline, which holds 'step', 'planned' and 'measured' ({error!r}); "
            "delete the file and let the run write it again"
        ) from None


def _from_tree(tree: Mapping[str, Any], label: str) -> Chart:
    """A tree as of :meth:`Timeline.as_tree`; of what it says, only actions and times are needed."""
    ranks = tuple(
        tuple(Action(str(e["kind"]), int(e["stage"]), int(e["microbatch"])) for e in entries)
        for entries in tree["ranks"]
    )
    schedule = Schedule(str(tree["name"]), int(tree["microbatches"]), tuple(tree["placement"]), ranks)
    peaks = validate(schedule).peak_activations
    times = [[(float(e["start"]), float(e["end"])) for e in entries] for entries in tree["ranks"]]
    moments = [moment for row in times for pair in row for moment in pair]
    if not all(map(isfinite, moments)):
        raise ValueError(f"{label} has times that are none")
    begin = min(moments)
    shifted = [[(start - begin, end - begin) for start, end in row] for row in times]
    return Chart(Timeline.of(schedule, shifted), peaks, label, "s")


# What the picture and the terminal share


def rows(pipeline: int) -> list[int]:
    """The ranks that are drawn: all, or evenly chosen ones with the first and the last."""
    if pipeline <= MOST_ROWS:
        return list(range(pipeline))
    return [round(index * (pipeline - 1) / (MOST_ROWS - 1)) for index in range(MOST_ROWS)]


def rows_note(pipeline: int) -> str:
    """What to say of ranks left out, or nothing."""
    return f"{MOST_ROWS} of {pipeline:,} ranks" if pipeline > MOST_ROWS else ""


def colours(kind: str, turn: int, turns: int) -> tuple[str, str]:
    """(fill, text) of a box: the later the stage among its rank's, the darker."""
    strength = 0.5 if turns == 1 else 0.35 + 0.65 * turn / (turns - 1)
    fill = tint(_COLOURS[kind], strength)
    red, green, blue = (int(fill[start : start + 2], 16) / 255 for start in (1, 3, 5))
    dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.25
    return fill, "#ffffff" if dark else INK


def shades(turns: int) -> str:
    """How a rank's stages are told apart, or nothing."""
    if turns == 1:
        return ""
    return "dark: a rank's second stage" if turns == 2 else "the darker, the later among a rank's stages"


def ticks(begin: float, end: float, most: int) -> list[float]:
    """At most about ``most`` round numbers from ``begin`` to ``end``."""
    if end <= begin:
        return [begin]
    rough = (end - begin) / max(1, most)
    power = 10.0 ** int(log10(rough) // 1)
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = ceil(begin / step - 1e-9)
    return [step * index for index in range(first, int(end / step + 1e-9) + 1)]


# Terminal


def schedule_text(charts: Sequence[Chart], width: int = 80, note: str = "") -> RenderableType:
    """Charts one above the other with one time axis, for a terminal of ``width`` characters.

    Args:
        charts: of schedules of the same pipeline ranks.
        width: in characters.
        note: added to the heading.
    """
    from rich.console import Group
    from rich.text import Text

    first = charts[0]
    turns = 1 + max(first.turns)
    grid = _Grid(charts, width)
    parts: list[RenderableType] = [Text(first.title + note, style="bold")]
    legend = Text()
    for kind in first.kinds:
        fill, ink = colours(kind, 0, turns)
        legend.append(f" {kind} ", style=f"{ink} on {fill}").append(f" {MEANINGS[kind]}   ")
    parts.append(legend.append("· idle"))
    if turns > 1:
        parts.append(
            Text(
                "lower case, dark: a rank's second stage"
                if turns == 2
                else f"{shades(turns)}; every other one in lower case",
                style="dim",
            )
        )
    for chart in charts:
        parts += [Text(), Text(chart.facts), *grid.lines(chart)]
    if notes := [part for part in (rows_note(first.schedule.pipeline), grid.note) if part]:
        parts.append(Text(f"drawn: {'; '.join(notes)}", style="italic"))
    return Group(*parts)


class _Grid:
    """Characters for times. The scale is chosen once, for all charts."""

    def __init__(self, charts: Sequence[Chart], width: int) -> None:
        pipeline = charts[0].schedule.pipeline
        self.label = len(str(pipeline - 1)) + 1
        self.peak = max(5, 1 + max(len(str(peak)) for chart in charts for peak in chart.peak_activations))
        self.room = max(10, width - self.label - 5 - self.peak)
        self.end = max(end for chart in charts for row in chart.times for _, end in row[-1:]) or 1.0
        digits = len(str(max(chart.schedule.microbatches for chart in charts) - 1))
        durations = [(kind, time) for chart in charts for kind, time in chart.durations().items()]
        letters = max((len(kind) / time for kind, time in durations), default=1.0)
        whole = max(((len(kind) + digits) / time for kind, time in durations), default=1.0)
        self.numbers = self.end * whole <= self.room + 0.5
        # Letters at least, one box at a time; what does not fit then is cut off at the right. Measured times
        # vary so much that this would leave little: there the whole step is shown.
        measured = any(chart.unit for chart in charts)
        fitted = min(letters, self.room / self.end) if measured else letters
        self.scale = whole if self.numbers else fitted
        self.columns = min(self.room, ceil(self.end * self.scale - 1e-6))
        parts = []
        if self.columns < ceil(self.end * self.scale - 1e-6):
            shown = self.columns / self.scale
            parts.append(f"time 0 to {shown:.3g} of {self.end:.4g} (--output FILE draws more)")
        if not self.numbers:
            needed = ceil(self.end * whole) + width - self.room
            parts.append(f"without microbatch numbers, which need {needed:,} columns")
        self.note = "; ".join(parts)

    def lines(self, chart: Chart) -> Iterator[Text]:
        from rich.text import Text

        heading = "rank".ljust(self.label + self.columns)
        yield Text(f"{heading} idle{'peak':>{self.peak}}", style="dim")
        for rank in rows(chart.schedule.pipeline):
            line = Text(str(rank).ljust(self.label), no_wrap=True)
            self._boxes(chart, rank, line)
            line.append(f"{chart.idle[rank]:5.0%}{chart.peak_activations[rank]:>{self.peak}}")
            yield line
        yield self._ruler(chart.unit)

    def _boxes(self, chart: Chart, rank: int, line: Text) -> None:
        turns = 1 + max(chart.turns)
        at = 0
        for action, start, end in chart.boxes(rank):
            left, right = round(start * self.scale), min(self.columns, round(end * self.scale))
            if left >= self.columns:
                break
            left = max(left, at)
            if right <= left:
                continue
            line.append("·" * (left - at), style="dim")
            turn = chart.turns[action.stage]
            fill, ink = colours(action.kind, turn, turns)
            line.append(self._word(action, right - left, turn), style=f"{ink} on {fill}")
            at = right
        line.append("·" * (self.columns - at), style="dim")

    def _word(self, action: Action, space: int, turn: int) -> str:
        kind = action.kind.lower() if turn % 2 else action.kind
        words = [f"{kind}{action.microbatch}"] if self.numbers else []
        word = next((word for word in (*words, kind) if len(word) <= space), kind[:space])
        return word.ljust(space)

    def _ruler(self, unit: str) -> Text:
        from rich.text import Text

        line = ""
        for tick in ticks(0.0, self.columns / self.scale, max(1, self.columns // 9)):
            place = round(tick * self.scale)
            if place >= len(line):
                line = line.ljust(place) + f"{tick:.6g} "
        return Text(" " * self.label + line[: self.columns] + f" {unit}", style="dim", no_wrap=True)
