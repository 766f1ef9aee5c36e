"""The groups of ranks of a layout: JSON, tables for the terminal, and a picture.

Dense and expert layers have a grid each: a panel per pipeline stage, in which each row is a group of ranks
that differ only along the fastest axis in use, usually ``tensor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, product
from math import ceil
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hexad.topology.layout import AXES, DENSE_AXES, EXPERT_AXES, Layout

from .figure import pale_colours, styled, tip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MOST_STAGES, MOST_ROWS, MOST_COLUMNS = 8, 16, 16
"""Stages, rows and columns of a grid that are shown at most."""


@dataclass(frozen=True)
class RankGrid:
    """The ranks of dense or of expert layers.

    Attributes:
        title: the axes and their degrees.
        rows: label of each row, such as ``data 0, context 1``.
        ranks: global ranks ``[stage][row][column]``, the first of each.
        omitted: a note if not all ranks are in it, or empty.
    """

    title: str
    rows: list[str]
    ranks: list[list[list[int]]]
    omitted: str


def grids(layout: Layout) -> list[RankGrid]:
    """The grid of dense layers, and that of expert layers where there are any."""
    dense = _grid(layout, "Dense layers", DENSE_AXES)
    if layout.expert * layout.expert_tensor == 1:
        return [dense]
    return [dense, _grid(layout, "Expert layers", EXPERT_AXES)]


def _grid(layout: Layout, name: str, axes: tuple[str, ...]) -> RankGrid:
    used = [axis for axis in axes if layout.degree(axis) > 1]
    inner, *outer = [axis for axis in used if axis != "pipeline"] or axes[:1]
    outer.reverse()  # slowest axis first
    coordinates = product(*(range(layout.degree(axis)) for axis in outer))
    rows = [dict(zip(outer, row)) for row in islice(coordinates, MOST_ROWS)]
    columns = range(min(layout.degree(inner), MOST_COLUMNS))
    stages = range(min(layout.pipeline, MOST_STAGES))
    ranks = [
        [[layout.rank_of(**{inner: column, "pipeline": stage, **row}) for column in columns] for row in rows]
        for stage in stages
    ]
    shown = len(stages) * len(rows) * len(columns)
    degrees = " x ".join(f"{axis} {layout.degree(axis)}" for axis in used) or "every axis has degree 1"
    return RankGrid(
        f"{name}: {degrees}" + (f" (each row is one {inner} group)" if inner in used else ""),
        [", ".join(f"{axis} {number}" for axis, number in row.items()) for row in rows],
        ranks,
        f"shown: {shown:,} of {layout.world:,} ranks; --json lists all" if shown < layout.world else "",
    )


def _title(layout: Layout) -> str:
    return f"world {layout.world:,}, order {layout.order}"


def layout_json(layout: Layout) -> dict[str, object]:
    """All groups of all seven axes under the axis's name; beside them ``world``, ``order``, ``degrees``."""
    groups: dict[str, object] = {axis: layout.groups(axis) for axis in AXES}
    return {**groups, "world": layout.world, "order": layout.order, "degrees": layout.degrees}


# Terminal


def layout_text(layout: Layout) -> RenderableType:
    """Both grids, and a table of the axes."""
    parts: list[RenderableType] = [Text(_title(layout), style="bold")]
    digits = len(str(layout.world - 1))
    for grid in grids(layout):
        panels = []
        for stage, (panel, colour) in enumerate(zip(grid.ranks, pale_colours(len(grid.ranks)))):
            table = Table("", f"stage {stage}", box=None, header_style="dim")
            for label, ranks in zip(grid.rows, panel):
                numbers = Text(" ".join(f"{rank:{digits}}" for rank in ranks), f"black on {colour}")
                table.add_row(Text(label, "dim"), numbers)
            panels.append(table)
        parts += [Text(), Text(grid.title), Columns(panels)]
        if grid.omitted:
            parts.append(Text(grid.omitted, style="italic"))
    axes = Table("axis", "degree", "groups", "group of rank 0", box=None, header_style="dim")
    for axis in AXES:
        if axis.startswith("expert") and layout.expert * layout.expert_tensor == 1:
            continue
        degree, group = layout.degree(axis), layout.group(0, axis)
        members = ", ".join(map(str, group[:8])) + (", ..." if degree > 8 else "")
        axes.add_row(axis, f"{degree:,}", f"{layout.world // degree:,}", members)
    return Group(*parts, Text(), axes)


# Picture


@styled
def layout_figure(layout: Layout) -> Figure:
    """Both grids as a picture: a cell per rank, a panel and a colour per pipeline stage."""
    from matplotlib.figure import Figure

    shown = grids(layout)
    columns = max(len(grid.ranks[0][0]) for grid in shown)
    across = min(len(shown[0].ranks), max(1, 16 // columns))  # panels side by side
    down = ceil(len(shown[0].ranks) / across)
    heights = [0.7 + down * (0.4 + 0.3 * len(grid.rows)) for grid in shown]  # inches
    size = (max(6.4, 1.5 + across * (0.3 + 0.42 * columns)), 0.4 + sum(heights))
    figure = Figure(size, layout="constrained", label=_title(layout))
    figure.suptitle(_title(layout), x=0.01, ha="left", size=12, weight="bold")
    for grid, part in zip(shown, figure.subfigures(len(shown), 1, height_ratios=heights, squeeze=False).flat):
        _draw_grid(part, grid, across, down)
    return figure


def _draw_grid(part: SubFigure, grid: RankGrid, across: int, down: int) -> None:
    from matplotlib.colors import ListedColormap

    title = grid.title + (f"\n{grid.omitted}" if grid.omitted else "")
    part.suptitle(title, x=0.02, ha="left", size=10)
    panels: list[Axes] = list(part.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    for stage, (axes, ranks, colour) in enumerate(zip(panels, grid.ranks, pale_colours(len(grid.ranks)))):
        axes.pcolormesh(ranks, cmap=ListedColormap([colour]), edgecolors="white", linewidth=1.5)
        axes.set_title(f"stage {stage}", size=9)
        axes.set_xticks([])
        axes.set_yticks([row + 0.5 for row in range(len(ranks))], grid.rows)
        axes.spines[:].set_visible(False)
        for y, row in enumerate(ranks):
            for x, rank in enumerate(row):
                axes.text(x + 0.5, y + 0.5, str(rank), ha="center", va="center")
                tip(axes, x, x + 1, y, y + 1, f"rank {rank}: stage {stage}, {grid.rows[y]}")
    panels[0].invert_yaxis()
    for axes in panels[len(grid.ranks) :]:
        axes.set_visible(False)
