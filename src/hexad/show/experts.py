"""How a run's experts were loaded, from its ``experts.jsonl``: a table for the terminal, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hexad.config import HexadError

from .figure import PALETTE, styled, tip
from .run import read_steps, sparkline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXPERTS = "experts.jsonl"
_COLUMNS, _MOST_STEPS = 4, 200
"""Panels beside each other, and steps that a panel shows."""


@dataclass(frozen=True)
class LoggedLoads:
    """The loads of all logged steps.

    Attributes:
        directory: of the run.
        steps: ascending.
        layers: number of the layer -> of each step, what its experts did: ``tokens`` (of each expert),
            ``imbalance``, ``entropy``, ``dropped``.
    """

    directory: Path
    steps: tuple[int, ...]
    layers: Mapping[int, tuple[Mapping[str, Any], ...]]

    def values(self, layer: int, name: str) -> list[float]:
        """A number of a layer over the steps."""
        return [load[name] for load in self.layers[layer]]


def read_loads(directory: str | Path) -> LoggedLoads:
    """Read a run's loads.

    Raises:
        HexadError: a run without experts, or a file that is damaged.
    """
    path = Path(directory) / EXPERTS
    if not path.is_file():
        raise HexadError(f"{path}: no such file; runs of models with experts (model.moe) write it")
    lines = read_steps(path)
    layers: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        loads = line.get("layers")
        if not isinstance(loads, dict) or (layers and {*map(int, loads)} != {*layers}):
            raise HexadError(f"{path}: step {line['step']}: found other layers than before; restore the file")
        for layer, load in loads.items():
            layers.setdefault(int(layer), []).append(load)
    steps = tuple(line["step"] for line in lines)
    return LoggedLoads(Path(directory), steps, {layer: tuple(loads) for layer, loads in layers.items()})


def experts_json(loads: LoggedLoads) -> dict[str, Any]:
    """The loads as JSON values."""
    return {"steps": list(loads.steps), "layers": {str(n): list(load) for n, load in loads.layers.items()}}


def experts_text(loads: LoggedLoads) -> RenderableType:
    """A table with a row for each layer."""
    table = Table("layer", "imbalance, last", "over the run", "entropy, last", "dropped", box=None)
    for layer in loads.layers:
        imbalance = loads.values(layer, "imbalance")
        dropped = f"{sum(map(int, loads.values(layer, 'dropped'))):,}"
        entropy = f"{loads.values(layer, 'entropy')[-1]:.3f}"
        table.add_row(str(layer), f"{imbalance[-1]:.3f}", sparkline(imbalance), entropy, dropped)
    note = "imbalance: load of the expert that has most, relative to the mean; entropy: of scores, in nats"
    return Group(
        Text(f"{loads.directory.resolve().name}: steps {loads.steps[0]} to {loads.steps[-1]}"), table, note
    )


@styled
def experts_figure(loads: LoggedLoads) -> Figure:
    """The imbalance of all layers over the run; below it a panel for each layer: load of every expert over
    the steps, relative to the mean."""
    from matplotlib.figure import Figure

    name, layers = loads.directory.resolve().name, [*loads.layers]
    columns = min(_COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    figure = Figure((10, 2.2 + 1.9 * rows), layout="constrained", label=f"Experts of run {name}")
    names: list[Any] = [[str(n) for n in layers[row * columns : (row + 1) * columns]] for row in range(rows)]
    names[-1] += ["."] * (columns - len(names[-1]))
    heights = (1.3, *[1.0] * rows)
    panels = figure.subplot_mosaic([["imbalance"] * columns, *names], height_ratios=heights)
    _draw_imbalance(panels["imbalance"], loads, name)
    chosen = _spread(len(loads.steps))
    images = []
    for layer in layers:
        axes = panels[str(layer)]
        images.append(_draw_layer(axes, [loads.layers[layer][place] for place in chosen], loads, chosen))
        axes.set_title(f"layer {layer}")
    bar = figure.colorbar(images[-1], ax=[panels[str(layer)] for layer in layers], shrink=0.8, pad=0.01)
    bar.set_label("load / mean")
    return figure


def _spread(count: int) -> list[int]:
    """Places of at most :data:`_MOST_STEPS` of so many steps, evenly spread."""
    shown = min(count, _MOST_STEPS)
    return [place * (count - 1) // max(1, shown - 1) for place in range(shown)]


def _draw_imbalance(axes: Axes, loads: LoggedLoads, name: str) -> None:
    for number, layer in enumerate(loads.layers):
        values = loads.values(layer, "imbalance")
        colour = PALETTE[number % len(PALETTE)]
        axes.plot(loads.steps, values, color=colour, linewidth=1, label=f"layer {layer}")
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_title(f"{name}: load of the expert that has most, relative to the mean")
    axes.set_ylim(bottom=0.9)
    axes.set_xlabel("step")
    axes.grid(axis="y")
    if len(loads.layers) <= len(PALETTE):
        axes.legend(loc="upper right")


def _draw_layer(
    axes: Axes, steps: Sequence[Mapping[str, Any]], loads: LoggedLoads, chosen: Sequence[int]
) -> Any:
    import numpy as np

    counts = np.array([load["tokens"] for load in steps], dtype=float).T
    relative = counts / np.maximum(counts.mean(0, keepdims=True), 1e-9)
    numbers = [loads.steps[place] for place in chosen]
    bounds = [numbers[0], *((a + b) / 2 for a, b in pairwise(numbers)), numbers[-1] + 1]
    edges = np.arange(len(counts) + 1) - 0.5
    image = axes.pcolormesh(bounds, edges, relative, cmap="RdYlBu_r", vmin=0, vmax=2)
    axes.set_xlabel("step")
    axes.set_ylabel("expert")
    for expert, values in enumerate(relative):
        text = f"expert {expert}: {values[-1]:.2f} of the mean at the end, {values.mean():.2f} over the run"
        tip(axes, bounds[0], bounds[-1], expert - 0.5, expert + 0.5, text)
    return image
