"""What a run did, from its ``metrics.jsonl``: a summary, lines for the terminal, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log10
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hexad.config import HexadError

from .figure import AXIS_COLOURS, INK, MUTED, PALETTE, RULE, quiet_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

METRICS = "metrics.jsonl"
_BARS = "▁▂▃▄▅▆▇█"
_POINTS_BEFORE_SMOOTHING = 100


@dataclass(frozen=True)
class Metrics:
    """The logged steps of a run, ascending; of a step logged twice (after a resume) the later line."""

    directory: Path
    lines: tuple[Mapping[str, Any], ...]
    unfinished: bool = False
    """The file ends in half a line, as it does when a run is stopped while it writes."""

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the lines that have a finite number called ``name``; ``a.b`` looks inside a."""
        found = [(line["step"], _number(line, name)) for line in self.lines]
        pairs = [(step, value) for step, value in found if value is not None and isfinite(value)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def axes(self) -> list[str]:
        """The axes over which anything was sent."""
        names = {axis: None for line in self.lines for axis in line.get("comm_bytes") or {}}
        return [axis for axis in names if any(self.series(f"comm_bytes.{axis}")[1])]


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value: Any = line
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_metrics(directory: str | Path) -> Metrics:
    """Read a run directory's ``metrics.jsonl``.

    Raises:
        HexadError: no such directory or file, no complete line, or a damaged line (named by its number).
    """
    directory = Path(directory)
    path = directory / METRICS
    if not directory.is_dir():
        raise HexadError(f"{directory}: no such run directory")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HexadError(
            f"{path}: not found; is '{directory}' the run.dir of a run that has started?"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise HexadError(f"{path}: cannot be read: {error}") from None
    # Lines end in a newline; what follows the last one was being written when the run was stopped.
    *complete, rest = text.split("\n")
    steps: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(complete, 1):
        if line.strip():
            parsed = _parse(line, f"{path}, line {number}")
            steps[parsed["step"]] = parsed
    if not steps:
        raise HexadError(f"{path}: holds no complete line yet; wait for the first logged step")
    return Metrics(directory, tuple(steps[step] for step in sorted(steps)), bool(rest.strip()))


def _parse(line: str, where: str) -> Mapping[str, Any]:
    fix = "restore the file, or delete this line"
    try:
        parsed = json.loads(line)
    except json.JSONDecodeError as error:
        raise HexadError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); {fix}") from None
    step = parsed.get("step") if isinstance(parsed, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        raise HexadError(
            f"{where}: found {line[:60]!r}, expected an object with a whole number 'step'; {fix}"
        )
    return parsed


# Numbers


def summary(metrics: Metrics) -> dict[str, Any]:
    """The run in a few numbers; null where a quantity was never logged."""
    steps, losses = metrics.series("loss")
    last = metrics.lines[-1]
    return {
        "directory": str(metrics.directory),
        "lines": len(metrics.lines),
        "first_step": metrics.lines[0]["step"],
        "last_step": last["step"],
        "tokens": last.get("tokens"),
        "samples": last.get("samples"),
        "skipped_steps": sum(line.get("skipped") is True for line in metrics.lines),
        "loss": _range(steps, losses),
        "validation_loss": _range(*metrics.series("validation_loss")),
        "grad_norm": _range(*metrics.series("grad_norm")),
        "tokens_per_second": _middle(metrics, "tokens_per_second"),
        "step_seconds": _middle(metrics, "step_seconds"),
        "mfu": _middle(metrics, "mfu"),
        "peak_memory_bytes": max(metrics.series("peak_memory_bytes")[1], default=None),
        "comm_bytes_per_step": {axis: _middle(metrics, f"comm_bytes.{axis}") for axis in metrics.axes()},
    }


def _range(steps: Sequence[int], values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    least = min(values)
    return {
        "first": values[0],
        "last": values[-1],
        "min": least,
        "min_step": steps[values.index(least)],
        "max": max(values),
    }


def _middle(metrics: Metrics, name: str) -> float | None:
    """The median: start-up and checkpoints make single steps slow."""
    values = metrics.series(name)[1]
    return median(values) if values else None


# Terminal


def run_text(metrics: Metrics, width: int = 80) -> RenderableType:
    """One line per quantity: first, last, least, largest, and its course as a row of bars."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    first, last = metrics.lines[0]["step"], metrics.lines[-1]["step"]
    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
    for heading in ("", "first", "last", "min", "max"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    table.add_column(f"step {first} to {last}", no_wrap=True)
    bars = max(8, min(40, width - 70))
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        ("loss (nats/token)", "loss", lambda value: f"{value:.4f}"),
        ("validation loss", "validation_loss", lambda value: f"{value:.4f}"),
        ("gradient norm", "grad_norm", lambda value: f"{value:.3g}"),
        ("tokens/s", "tokens_per_second", lambda value: f"{value:,.0f}"),
        ("MFU", "mfu", lambda value: f"{value:.1%}"),
    ]
    rows += [(f"sent: {axis}", f"comm_bytes.{axis}", readable_bytes) for axis in metrics.axes()]
    for label, name, show in rows:
        values = metrics.series(name)[1]
        if values:
            numbers = (values[0], values[-1], min(values), max(values))
            table.add_row(label, *map(show, numbers), Text(sparkline(values, bars), style=PALETTE[0]))
    parts: list[RenderableType] = [Text(str(metrics.directory), style="bold"), table]
    skipped = sum(line.get("skipped") is True for line in metrics.lines)
    if skipped:
        parts.append(Text(f"{skipped} of {len(metrics.lines)} logged steps were skipped", style="dim"))
    if not metrics.axes():
        parts.append(Text("nothing was sent to other ranks", style="dim"))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` as at most ``width`` bars, each the mean of its share."""
    width = min(width, len(values))
    bounds = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return _BARS[len(_BARS) // 2] * width
    top = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / (high - low) * top)] for mean in means)


def readable_bytes(count: float) -> str:
    """``1500000`` as ``1.5 MB``: decimal units, as in links' speeds."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


# Picture


def run_figure(metrics: Metrics, references: Mapping[str, float] | None = None) -> Figure:
    """The loss over the whole width; below it gradient norm, speed, and bytes sent per axis.

    Args:
        metrics: the run.
        references: horizontal lines in the loss panel by name, in nats per token, such as the entropy of
            single-token frequencies.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    name = metrics.directory.resolve().name
    spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.06, hspace=0.06)
    figure = Figure(figsize=(10, 6.4), facecolor="white", layout=spacing, label=f"Run {name}")
    grid = figure.add_gridspec(2, 3, height_ratios=(1.5, 1))
    _loss_panel(figure.add_subplot(grid[0, :]), metrics, references or {}, name)
    _plain_panel(figure.add_subplot(grid[1, 0]), metrics, "grad_norm", "Gradient norm", PALETTE[3])
    _plain_panel(
        figure.add_subplot(grid[1, 1]), metrics, "tokens_per_second", "Tokens per second", PALETTE[2]
    )
    _bytes_panel(figure.add_subplot(grid[1, 2]), metrics)
    return figure


def _loss_panel(axes: Axes, metrics: Metrics, references: Mapping[str, float], name: str) -> None:
    _heading(axes, f"{name}: loss, nats per target token", size=11)
    quiet_axes(axes)
    steps, losses = metrics.series("loss")
    window = len(losses) // 50
    smoothing = len(losses) >= _POINTS_BEFORE_SMOOTHING
    axes.plot(
        steps,
        losses,
        color=PALETTE[0],
        alpha=0.35 if smoothing else 1.0,
        linewidth=1.0 if smoothing else 1.6,
        marker="o" if len(losses) == 1 else None,
        label="training (each step)" if smoothing else "training",
    )
    if smoothing:
        label = f"training (mean of {2 * window + 1} lines)"
        axes.plot(steps, _smooth(losses, window), color=PALETTE[0], linewidth=1.8, label=label)
    validation = metrics.series("validation_loss")
    if validation[0]:
        axes.plot(*validation, "o-", color=PALETTE[5], markersize=4, linewidth=1.2, label="validation")
    for index, (label, value) in enumerate(references.items()):
        style_of_line = ("--", ":", "-.")[index % 3]
        axes.axhline(value, color=INK, linewidth=1.0, linestyle=style_of_line, label=f"{label}: {value:.3f}")
    skipped = [line["step"] for line in metrics.lines if line.get("skipped") is True]
    if skipped:
        bottom = axes.get_xaxis_transform()
        axes.plot(skipped, [0.015] * len(skipped), "|", color=MUTED, transform=bottom, label="skipped step")
    if not losses:
        _empty(axes, "no finite loss was logged")
    elif len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="upper right", frameon=True, edgecolor=RULE, framealpha=0.9, fontsize=8.5)
    _step_axis(axes)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over up to ``window`` values on either side."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(0, i - window), min(len(values), i + window + 1)) for i in range(len(values))]
    return [(sums[b] - sums[a]) / (b - a) for a, b in bounds]


def _plain_panel(axes: Axes, metrics: Metrics, name: str, title: str, colour: str) -> None:
    from matplotlib.ticker import FuncFormatter

    _heading(axes, title)
    quiet_axes(axes)
    steps, values = metrics.series(name)
    if not values:
        _empty(axes, "not logged")
        return
    axes.plot(steps, values, color=colour, linewidth=1.3, marker="o" if len(values) == 1 else None)
    # One outlier (a slow first step, a spike) must not flatten all else; say what it was cut to.
    middle = median(values)
    top = max(values)
    if len(values) >= 20 and middle > 0 and top > 8 * middle:
        axes.set_ylim(0, 4 * middle)
        axes.text(0.98, 0.95, f"largest: {top:,.3g}", transform=axes.transAxes, ha="right", va="top", size=8)
    else:
        axes.set_ylim(0, top * 1.12 or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    _step_axis(axes)


def _bytes_panel(axes: Axes, metrics: Metrics) -> None:
    from matplotlib.ticker import FuncFormatter

    _heading(axes, "Sent per step by one rank")
    quiet_axes(axes)
    if not metrics.axes():
        _empty(axes, "nothing was sent to other ranks")
        return
    series = {axis: metrics.series(f"comm_bytes.{axis}") for axis in metrics.axes()}
    for axis, (steps, values) in series.items():
        colour = AXIS_COLOURS.get(axis, INK)
        marker = "o" if len(values) == 1 else None
        axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, label=axis)
    largest = [max(values) for _, values in series.values()]
    if min(largest) * 30 < max(largest):
        axes.set_yscale("log")
        axes.minorticks_off()
        positive = [value for _, values in series.values() for value in values if value > 0]
        low, high = log10(min(positive)), log10(max(positive))
        axes.set_ylim(10 ** (low - 0.3), 10 ** (high + 0.25 * (high - low) + 0.3))
    else:
        axes.set_ylim(0, 1.35 * max(largest))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=8)
    _step_axis(axes)


def _step_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.set_xlabel("step", color=MUTED, size=8.5)


def _heading(axes: Axes, text: str, size: float = 9.5) -> None:
    axes.set_title(text, loc="left", size=size, color=INK)


def _empty(axes: Axes, text: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", size=9, color=MUTED)
