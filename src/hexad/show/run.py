"""A run's metrics, from its ``metrics.jsonl``: a summary, a table for the terminal, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from hexad.config import HexadError, one_line

from .figure import GREY, PALETTE, styled, tip, tip_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = "metrics.jsonl"
_MEMORY = ("peak_memory_bytes", "reserved_memory_bytes", "allocator_retries")  # the latter two of GPUs
_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 20  # the table fits into 80 columns


@dataclass(frozen=True)
class LoggedSteps:
    """The logged steps of a run, ascending; of a step logged twice (after a resume) the later line."""

    directory: Path
    lines: tuple[Mapping[str, Any], ...]

    def series(self, name: str, axis: str | None = None) -> tuple[list[int], list[float]]:
        """(steps, values) where the metric ``name``, or its entry ``axis``, is a finite number."""
        values = ((line["step"], line.get(name)) for line in self.lines)
        if axis is not None:
            values = ((step, (value or {}).get(axis)) for step, value in values)
        pairs = [
            (step, value) for step, value in values if isinstance(value, int | float) and isfinite(value)
        ]
        return [step for step, _ in pairs], [value for _, value in pairs]

    @property
    def skipped(self) -> list[int]:
        """Steps without an update of the parameters."""
        return [line["step"] for line in self.lines if line.get("skipped") is True]

    def sent(self) -> dict[str, list[float]]:
        """Bytes that one rank sent in each step, by axis, of the axes in use."""
        axes = dict.fromkeys(axis for line in self.lines for axis in line.get("comm_bytes") or ())
        sent = {axis: self.series("comm_bytes", axis)[1] for axis in axes}
        return {axis: counts for axis, counts in sent.items() if any(counts)}


def read_metrics(directory: str | Path) -> LoggedSteps:
    """Read a run directory's ``metrics.jsonl``.

    Raises:
        HexadError: no such file, no complete line, or a damaged line (named by its number).
    """
    lines = read_steps(Path(directory) / METRICS)
    return LoggedSteps(Path(directory), tuple(lines))


def read_steps(path: Path) -> list[Mapping[str, Any]]:
    """Read a file with a line of JSON for each logged step, in the order of steps; of a step that was logged
    twice the later line.

    Raises:
        HexadError: as :func:`read_metrics`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HexadError(
            f"{path}: cannot be read: {one_line(error)}; runs of hexad train write it, a custom loop its own "
            "records"
        ) from None
    steps: dict[int, Mapping[str, Any]] = {}
    # What follows the last newline was being written when the run was stopped.
    for number, line in enumerate(text.split("\n")[:-1], 1):
        if line.strip():
            parsed = _parse(line, f"{path}, line {number}")
            steps[parsed["step"]] = parsed
    if not steps:
        raise HexadError(f"{path}: has no complete line yet; wait for the first logged step")
    return [steps[step] for step in sorted(steps)]


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = json.loads(line)
        if type(parsed["step"]) is int:
            return parsed
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise HexadError(
        f"{where}: found {line[:60]!r}, expected a JSON object with an integer 'step'; "
        "restore the file, or delete this line"
    )


def summary(metrics: LoggedSteps) -> dict[str, Any]:
    """The run in a few numbers; null where a quantity was never logged."""

    def middle(name: str) -> float | None:
        # The median: start-up and checkpoints make single steps slow.
        values = metrics.series(name)[1]
        return median(values) if values else None

    def extremes(name: str) -> dict[str, float] | None:
        steps, values = metrics.series(name)
        if not values:
            return None
        low, high = min(values), max(values)
        least = {"min": low, "min_step": steps[values.index(low)], "max": high}
        return {"first": values[0], "last": values[-1], **least}

    last = metrics.lines[-1]
    return {
        "directory": str(metrics.directory),
        "lines": len(metrics.lines),
        "first_step": metrics.lines[0]["step"],
        "last_step": last["step"],
        "tokens": last.get("tokens"),
        "samples": last.get("samples"),
        "skipped_steps": len(metrics.skipped),
        **{name: extremes(name) for name in ("loss", "validation_loss", "grad_norm")},
        **{name: middle(name) for name in ("tokens_per_second", "step_seconds", "mfu")},
        **{name: max(metrics.series(name)[1], default=None) for name in _MEMORY},
        "comm_bytes_per_step": {axis: median(counts) for axis, counts in metrics.sent().items()},
    }


# Terminal


def run_text(metrics: LoggedSteps) -> RenderableType:
    """One row per quantity: first, last, smallest and largest value, and the course as a row of bars."""
    table = Table("", box=None, header_style="dim")
    for heading in ("first", "last", "min", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(f"step {metrics.lines[0]['step']} to {metrics.lines[-1]['step']}", style="blue")
    rows: list[tuple[str, list[float], Callable[[float], str]]] = [
        ("loss (nats)", metrics.series("loss")[1], "{:.4f}".format),
        ("validation loss", metrics.series("validation_loss")[1], "{:.4f}".format),
        ("gradient norm", metrics.series("grad_norm")[1], "{:.3g}".format),
        ("tokens/s", metrics.series("tokens_per_second")[1], "{:,.0f}".format),
        ("MFU", metrics.series("mfu")[1], "{:.1%}".format),
    ]
    rows += [(f"sent: {axis}", counts, readable_bytes) for axis, counts in metrics.sent().items()]
    for label, values, show in rows:
        if values:
            numbers = (values[0], values[-1], min(values), max(values))
            table.add_row(label, *map(show, numbers), sparkline(values))
    notes = [] if metrics.sent() else ["nothing was sent to other ranks"]
    if metrics.skipped:
        notes.append(f"{len(metrics.skipped)} of {len(metrics.lines)} logged steps were skipped")
    return Group(Text(str(metrics.directory), style="bold"), table, *notes)


def sparkline(values: Sequence[float]) -> str:
    """``values`` as a row of bars, each the mean of an equal part of them."""
    width = min(_MOST_BARS, len(values))
    bounds = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def readable_bytes(count: float) -> str:
    """``1500000`` as ``1.5 MB``: decimal units, as in link speeds."""
    return decimal(round(count))


# Picture


@styled
def run_figure(metrics: LoggedSteps, references: Mapping[str, float] | None = None) -> Figure:
    """The loss over the whole width; below it gradient norm, speed, and bytes sent per axis.

    ``references``: horizontal lines in the loss panel by name, in nats per token, such as the entropy of
    single-token frequencies.
    """
    from matplotlib.figure import Figure

    name = metrics.directory.resolve().name
    figure = Figure((10, 6.4), layout="constrained", label=f"Run {name}")
    panels = figure.subplot_mosaic([["loss"] * 3, ["norm", "speed", "sent"]], height_ratios=(1.5, 1))
    _draw_loss(panels["loss"], metrics, references or {})
    panels["loss"].set_title(f"{name}: loss, nats per target token")
    _draw_series(panels["norm"], "Gradient norm", *metrics.series("grad_norm"))
    _draw_series(panels["speed"], "Tokens per second", *metrics.series("tokens_per_second"))
    counts = {axis: median(counts) for axis, counts in metrics.sent().items()}
    axes = panels["sent"]
    axes.set_title("Bytes sent per step by one rank" if counts else "Nothing was sent to other ranks")
    bars = axes.barh(list(counts), list(counts.values()), 0.6, color=PALETTE[0])
    axes.bar_label(bars, list(map(readable_bytes, counts.values())), padding=3)
    tip_bars(bars, (f"{axis}: {int(count):,} bytes" for axis, count in counts.items()))
    axes.margins(x=0.25)  # room for the numbers
    axes.set_xticks([])
    axes.invert_yaxis()
    if not counts:
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    return figure


def _draw_loss(axes: Axes, metrics: LoggedSteps, references: Mapping[str, float]) -> None:
    import numpy as np

    steps, losses = metrics.series("loss")
    axes.plot(steps, losses, color=PALETTE[0], label="training", marker="o" if len(losses) == 1 else None)
    window = 2 * (len(losses) // 50) + 1
    if window > 3:
        means = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        middle = steps[window // 2 : -(window // 2)]
        axes.plot(middle, means, color=PALETTE[4], label=f"training, mean of {window} logged steps")
    if metrics.series("validation_loss")[0]:
        axes.plot(*metrics.series("validation_loss"), "o-", color=PALETTE[5], label="validation")
    for label, value in references.items():
        axes.axhline(value, color="black", linewidth=1, linestyle="--", label=f"{label}: {value:.3f}")
    if metrics.skipped:
        bottom = axes.get_xaxis_transform()  # y from 0 to 1
        axes.vlines(metrics.skipped, 0, 0.03, linewidth=1, color=GREY, transform=bottom, label="skipped step")
    axes.legend(loc="upper right")
    _label_steps(axes, "loss", steps, losses)


def _draw_series(axes: Axes, title: str, steps: list[int], values: list[float]) -> None:
    axes.set_title(title if values else f"{title}: not logged")
    axes.plot(steps, values, color=PALETTE[2], linewidth=1.2, marker="o" if len(values) == 1 else None)
    if values and max(values) > 8 * median(values) > 0:
        axes.set_yscale("log")  # one outlier does not flatten all else
    else:
        axes.set_ylim(bottom=0)
    _label_steps(axes, title.lower(), steps, values)


_MOST_TIPS = 400


def _label_steps(axes: Axes, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
    """Label the axis of steps, and each value where the pointer rests above or below it."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(axis="y")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    every = -(-len(steps) // _MOST_TIPS) or 1
    points = list(zip(steps, values))[::every]
    shown = [step for step, _ in points]
    bounds = (
        [(before + other) / 2 for before, other in pairwise([-1, *shown, 2 * steps[-1]])] if points else []
    )
    for (step, value), (left, right) in zip(points, pairwise(bounds)):
        tip(axes, left, right, 0, 1, f"step {step:,}: {name} {value:,.5g}", whole_height=True)
