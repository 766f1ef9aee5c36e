"""Drawings of a layout: one cell per rank, boxes within boxes for its groups.

From the inside out the boxes are tensor, context, data and pipeline (expert layers: expert_tensor, expert,
expert_data, pipeline), so that the ranks which exchange most stand closest together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, log, prod
from typing import TYPE_CHECKING

from hexad.topology.layout import AXES, DENSE_AXES, EXPERT_AXES, Layout

from .figure import INK, MUTED, RULE, stage_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType
    from rich.table import Table

MOST_DRAWN = 512
"""Ranks a picture shows one by one; of larger worlds it shows a corner and says so."""
MOST_PRINTED = 256
"""Ranks the terminal shows one by one."""

_MARGIN = 0.35
_TABLE_ROW = 0.22
_HEADING = 0.6
_WIDEST = 13.0


@dataclass(frozen=True)
class _Level:
    """How the boxes of one axis are arranged inside the box around them. Lengths are in inches."""

    axis: str
    count: int
    columns: int
    item: tuple[float, float]
    gap: float
    label: float

    @property
    def rows(self) -> int:
        return ceil(self.count / self.columns)

    @property
    def size(self) -> tuple[float, float]:
        """Of all boxes together."""
        width, height = self.item
        return (
            self.columns * (width + self.gap) - self.gap,
            self.rows * (height + self.label + self.gap) - self.gap,
        )

    def places(self) -> Iterator[tuple[int, float, float]]:
        """(coordinate, left, top) of each box, below its label."""
        width, height = self.item
        for index in range(self.count):
            row, column = divmod(index, self.columns)
            left = column * (width + self.gap)
            yield index, left, row * (height + self.label + self.gap) + self.label


# Public drawings


def layout_figure(layout: Layout) -> Figure:
    """The grid of dense layers, that of expert layers where it differs, and a table of all axes."""
    from matplotlib.figure import Figure

    grids = [("Dense layers", DENSE_AXES)]
    if layout.expert * layout.expert_tensor > 1:
        grids.append(("Expert layers", EXPERT_AXES))
    plans = [_plan(layout, axes) for _, axes in grids]
    table = _axis_rows(layout)
    noted = [f"{name}: {note}" for name, axes in grids if (note := _abbreviation(layout, axes))]
    width = max(6.4, max(_extent(levels)[0] for levels in plans) + 2 * _MARGIN)
    height = sum(_extent(levels)[1] + _HEADING + 0.2 for levels in plans)
    height += 2 * _MARGIN + 0.55 + _TABLE_ROW * (len(table) + 1.2 + len(noted))

    figure = Figure(figsize=(width, height), facecolor="white", label=_title(layout))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    axes.text(_MARGIN, _MARGIN, _title(layout), size=14, weight="bold", color=INK, va="top")
    axes.text(
        _MARGIN, _MARGIN + 0.29, f"order, fastest first: {layout.order}", size=8.5, color=MUTED, va="top"
    )
    top = _MARGIN + 0.55
    for (name, names), levels in zip(grids, plans):
        axes.text(_MARGIN, top + 0.12, _grid_title(layout, name, names), size=10, color=INK, va="top")
        axes.text(_MARGIN, top + 0.33, _reading(levels), size=8.5, color=MUTED, va="top")
        _draw(axes, layout, levels, _MARGIN, top + _HEADING)
        top += _extent(levels)[1] + _HEADING + 0.2
    for note in noted:
        axes.text(_MARGIN, top, note, size=8.5, color=INK, style="italic", va="top")
        top += _TABLE_ROW
    _draw_table(axes, table, top + 0.1, width)
    return figure


def layout_text(layout: Layout, width: int = 80) -> RenderableType:
    """The same for a terminal of ``width`` characters."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(_title(layout), style="bold")]
    parts.append(Text(f"order, fastest first: {layout.order}", style="dim"))
    if layout.world <= MOST_PRINTED:
        parts += [Text(), *_printed_grid(layout, "Dense layers", DENSE_AXES, width)]
        if layout.expert * layout.expert_tensor > 1:
            parts += [Text(), *_printed_grid(layout, "Expert layers", EXPERT_AXES, width)]
    else:
        parts.append(
            Text(
                f"{layout.world:,} ranks: too many to print one by one; --json lists all groups", style="dim"
            )
        )
    return Group(*parts, Text(), _printed_axes(layout))


def layout_json(layout: Layout) -> dict[str, object]:
    """All groups of all seven axes under the axis's name; beside them ``world``, ``order``, ``degrees``."""
    groups: dict[str, object] = {axis: layout.groups(axis) for axis in AXES}
    return {**groups, "world": layout.world, "order": layout.order, "degrees": layout.degrees}


# Words


def _title(layout: Layout) -> str:
    return f"{layout.world:,} rank{'s' if layout.world > 1 else ''}"


def _grid_title(layout: Layout, name: str, axes: tuple[str, ...]) -> str:
    parts = [f"{axis} {layout.degree(axis)}" for axis in axes if layout.degree(axis) > 1]
    return f"{name}: {' x '.join(parts) if parts else 'every axis has degree 1'}"


def _reading(levels: list[_Level]) -> str:
    """How to tell the nested axes apart in the picture."""
    looks = {
        "tensor": "touching cells",
        "context": "cells set apart",
        "data": "numbered",
        "pipeline": "framed",
    }
    looks |= {"expert_tensor": looks["tensor"], "expert": looks["context"], "expert_data": looks["data"]}
    used = [level for level in levels if level.count > 1]
    words = []
    for level in used:
        alone = level is levels[0] and "tensor" not in level.axis
        words.append(f"{level.axis} ({'cells' if alone else looks[level.axis]})")
    return f"from the inside out: {', '.join(words)}" if words else ""


def _axis_rows(layout: Layout) -> list[tuple[str, str, str, str]]:
    """(axis, degree, number of groups, rank 0's group) of every axis in use."""
    rows = []
    for axis in AXES:
        degree = layout.degree(axis)
        unused = axis.startswith("expert") and layout.expert * layout.expert_tensor == 1
        if not unused:
            rows.append((axis, f"{degree:,}", f"{layout.world // degree:,}", _sample(layout.group(0, axis))))
    return rows


def _sample(ranks: list[int]) -> str:
    if len(ranks) <= 9:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:6]))}, ..., {ranks[-1]}"


# Geometry


def _shown(layout: Layout, axes: tuple[str, ...]) -> dict[str, int]:
    """How many coordinates of each axis are drawn: all, or a corner of at most MOST_DRAWN ranks."""
    shown = {axis: layout.degree(axis) for axis in axes}
    # Outer axes repeat what the inner ones show, so they are cut first, and never below what shows a pattern.
    # Stages come before all: they are the same on both grids, and so they stay in both pictures.
    inner, middle, outer, stages = axes
    for axis, least in ((stages, 4), (outer, 4), (middle, 4), (inner, 16), (outer, 1), (middle, 1)):
        others = prod(shown.values()) // shown[axis]
        if others * shown[axis] > MOST_DRAWN:
            shown[axis] = max(min(least, shown[axis]), MOST_DRAWN // others)
    return shown


def _abbreviation(layout: Layout, axes: tuple[str, ...]) -> str:
    shown = _shown(layout, axes)
    drawn = prod(shown.values())
    if drawn == layout.world:
        return ""
    cuts = [
        f"{axis} 0 to {shown[axis] - 1} of {layout.degree(axis):,}"
        for axis in axes
        if shown[axis] < layout.degree(axis)
    ]
    return f"drawn are {drawn:,} of {layout.world:,} ranks ({'; '.join(cuts)})"


def _plan(layout: Layout, axes: tuple[str, ...]) -> list[_Level]:
    """Nested levels, innermost first. Axes of degree 1 have no level of their own."""
    shown = _shown(layout, axes)
    drawn = prod(shown.values())
    cell = 0.46 if drawn <= 64 else 0.38 if drawn <= 256 else 0.33
    levels: list[_Level] = []
    item = (cell, cell * 0.8)
    # Per level: the shape to aim at (width / height), the gap between boxes, and room for a label.
    looks = ((3.0, 0.0, 0.0), (0.7, 0.07, 0.0), (1.0, 0.13, 0.17), (2.2, 0.22, 0.24))
    for axis, (shape, gap, label) in zip(axes, looks):
        if shown[axis] == 1 and axis != axes[-1]:
            continue
        if not levels and axis != axes[-1]:
            label = 0.0  # a lone cell says its rank; a coordinate above it would only clutter
        levels.append(_fold(axis, shown[axis], item, gap, label, shape))
        width, height = levels[-1].size
        padding = 0.0 if axis == axes[0] else 0.06
        item = (width + 2 * padding, height + 2 * padding)
    return levels


def _fold(axis: str, count: int, item: tuple[float, float], gap: float, label: float, shape: float) -> _Level:
    """The number of columns that comes nearest to ``shape`` without ragged rows or needless wrapping."""
    if axis in ("tensor", "expert_tensor"):
        return _Level(axis, count, min(count, 8), item, gap, label)

    def badness(level: _Level) -> float:
        width, height = level.size
        ragged = level.rows * level.columns - count
        wrapped = (level.rows if axis == "pipeline" else level.columns) - 1
        too_wide = max(0.0, width / _WIDEST - 1)
        return abs(log(width / height / shape)) + 3 * ragged / count + 0.25 * min(wrapped, 2) + 3 * too_wide

    return min((_Level(axis, count, k, item, gap, label) for k in range(1, count + 1)), key=badness)


def _extent(levels: list[_Level]) -> tuple[float, float]:
    width, height = levels[-1].size
    return width + 0.06, height + 0.06


# Drawing with matplotlib


def _draw(axes: Axes, layout: Layout, levels: list[_Level], left: float, top: float) -> None:
    colours = stage_colours(next(level.count for level in levels if level.axis == "pipeline"))
    digits = len(f"{layout.world - 1}")
    cell = levels[0].item
    font = min(9.0, 72 * cell[0] / (0.72 * max(digits, 2)))

    def boxes(depth: int, x: float, y: float, coordinates: dict[str, int]) -> None:
        if depth < 0:
            rank = layout.rank_of(**coordinates)
            _cell(axes, (x, y), cell, colours[coordinates["pipeline"]], f"{rank}", font)
            return
        level = levels[depth]
        leaf = depth == 0
        for index, dx, dy in level.places():
            padding = 0.0 if leaf else (level.item[0] - levels[depth - 1].size[0]) / 2
            if not leaf:
                _outline(axes, (x + dx, y + dy), level.item, level.axis)
            if level.label:
                _coordinate(axes, level, index, x + dx + 0.02, y + dy - 0.04)
            boxes(depth - 1, x + dx + padding, y + dy + padding, {**coordinates, level.axis: index})

    boxes(len(levels) - 1, left, top, {})


def _coordinate(axes: Axes, level: _Level, index: int, x: float, y: float) -> None:
    """The label above a box: the axis's name and the coordinate, or the coordinate alone where narrow."""
    if level.axis == "pipeline":
        axes.text(x, y, f"stage {index}", size=9, color=INK, va="bottom")
        return
    name = f"{level.axis} {index}"
    fits = 0.052 * len(name) < level.item[0] + level.gap / 2
    axes.text(x, y, name if fits else f"{index}", size=7, color=MUTED, va="bottom")


def _cell(
    axes: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    colour: str,
    text: str,
    font: float,
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="white", linewidth=1.0))
    x, y = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    axes.text(x, y, text, size=font, color=INK, ha="center", va="center")


def _outline(axes: Axes, corner: tuple[float, float], size: tuple[float, float], axis: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    strong = axis == "pipeline"
    axes.add_patch(
        FancyBboxPatch(
            corner,
            *size,
            boxstyle="round,pad=0,rounding_size=0.04",
            facecolor="none",
            edgecolor=MUTED if strong else RULE,
            linewidth=1.1 if strong else 0.9,
        )
    )


def _draw_table(axes: Axes, rows: list[tuple[str, str, str, str]], top: float, width: float) -> None:
    columns = (_MARGIN, _MARGIN + 1.25, _MARGIN + 1.95, _MARGIN + 2.6)
    for x, heading in zip(columns, ("axis", "degree", "groups", "group of rank 0")):
        axes.text(x, top, heading, size=8.5, color=MUTED, va="top")
    axes.plot([_MARGIN, width - _MARGIN], [top + 0.19] * 2, color=RULE, linewidth=0.8)
    for index, row in enumerate(rows, 1):
        y = top + _TABLE_ROW * index + 0.04
        for x, text in zip(columns, row):
            axes.text(x, y, text, size=9, color=INK, va="top")


# Drawing in the terminal


def _printed_grid(layout: Layout, name: str, axes: tuple[str, ...], width: int) -> Iterator[RenderableType]:
    """Stages as columns where they fit, else as rows; one line per group of the innermost axis in use."""
    from rich.table import Table
    from rich.text import Text

    inner, middle, outer, _ = axes
    if layout.degree(inner) == 1:
        inner, middle = middle, inner
    stages = layout.pipeline
    colours = stage_colours(stages)
    digits = len(str(layout.world - 1))
    yield Text(_grid_title(layout, name, axes))
    lines = list(product(range(layout.degree(outer)), range(layout.degree(middle))))

    def ranks(stage: int, line: tuple[int, int]) -> Text:
        numbers = (
            layout.rank_of(**{inner: i, middle: line[1], outer: line[0], "pipeline": stage})
            for i in range(layout.degree(inner))
        )
        return Text(" ".join(f"{n:>{digits}}" for n in numbers), style=f"{INK} on {colours[stage]}")

    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
    names = [axis for axis in (outer, middle) if layout.degree(axis) > 1]
    columns_fit = stages * ((digits + 1) * layout.degree(inner) + 1) + 10 * len(names) <= width
    for axis in names if columns_fit else ["stage", *names]:
        table.add_column(axis, justify="right", style="dim")

    def labels(line: tuple[int, int]) -> list[str]:
        return [str(value) for axis, value in zip((outer, middle), line) if axis in names]

    if columns_fit:
        for stage in range(stages):
            table.add_column(f"stage {stage}", no_wrap=True)
        for line in lines:
            table.add_row(*labels(line), *(ranks(stage, line) for stage in range(stages)))
    else:
        table.add_column("ranks")
        for stage, line in product(range(stages), lines):
            table.add_row(str(stage), *labels(line), ranks(stage, line))
    yield table


def _printed_axes(layout: Layout) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
    table.add_column("axis")
    table.add_column("degree", justify="right")
    table.add_column("groups", justify="right")
    table.add_column("group of rank 0", no_wrap=True)
    for row in _axis_rows(layout):
        table.add_row(*row)
    return table
