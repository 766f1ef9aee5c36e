"""A run's predicted memory: a table in the terminal, or a stacked bar per pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table

from hexad.plan.memory import MemoryPlan

from .figure import styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 32
"""Pipeline ranks in a picture: the first so many."""

_MIB = 2**20


def components(plan: MemoryPlan) -> dict[str, int]:
    """Bytes by component; activations by kind."""
    kinds = {f"activations: {kind.replace('_', ' ')}": size for kind, size in plan.activations.items()}
    return {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        "master": plan.master,
        "optimizer": plan.optimizer,
        **kinds,
        "buffers": plan.buffers,
    }


def memory_json(plan: MemoryPlan, ranks: Sequence[MemoryPlan]) -> dict[str, Any]:
    """The rank's bytes, and the totals of one rank for every pipeline coordinate."""
    totals = [{"rank": other.rank, "total": other.total} for other in ranks]
    return {**plan.as_tree(), "pipeline": totals}


def memory_text(plan: MemoryPlan) -> RenderableType:
    """One rank's components at its peak, with bars."""
    table = Table("", box=None, pad_edge=False)
    for heading in ("MiB", "%"):
        table.add_column(heading, justify="right")
    table.add_column("", width=24)
    for name, size in components(plan).items():
        if size:
            bar = Bar(plan.total, 0, size, color="blue")
            table.add_row(name, f"{size / _MIB:,.1f}", f"{100 * size / plan.total:.1f}", bar)
    table.add_row("total", f"{plan.total / _MIB:,.1f}", style="bold")
    if plan.host:
        table.add_row("in host memory", f"{plan.host / _MIB:,.1f}")
    return Group(f"rank {plan.rank}, at its peak: {plan.action}", table)


@styled
def memory_figure(ranks: Sequence[MemoryPlan]) -> Figure:
    """A stacked bar of bytes for each of ``ranks``, one per pipeline coordinate."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shown = [components(plan) for plan in ranks[:MOST_BARS]]
    unit, name = (2**30, "GiB") if max(plan.total for plan in ranks) >= 2**30 else (_MIB, "MiB")
    figure = Figure((4.6 + 0.45 * len(shown), 4.2), layout="constrained", label="Memory")
    axes = figure.subplots()
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_prop_cycle(color=colormaps["tab20c"](range(20)))  # four shades of each colour
    labels = [str(plan.rank) for plan in ranks[:MOST_BARS]]
    tops = [0.0] * len(shown)
    parts = dict.fromkeys(part for sizes in shown for part in sizes)
    for part in sorted(parts, key="buffers".__eq__):  # buffers on top
        heights = [sizes.get(part, 0) / unit for sizes in shown]
        bars = axes.bar(labels, heights, 0.7, tops, label=part)
        tops = [top + height for top, height in zip(tops, heights)]
    axes.bar_label(bars, [f"{top:.3g}" for top in tops])
    omitted = f"; the first {MOST_BARS} of {len(ranks)}" if len(ranks) > MOST_BARS else ""
    axes.set_xlabel(f"rank (one per pipeline coordinate{omitted})")
    axes.set_title(f"Predicted peak memory, {name}")
    figure.legend(loc="outside right upper", reverse=True, frameon=False)
    return figure
