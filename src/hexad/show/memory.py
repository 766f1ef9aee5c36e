"""A run's predicted memory: a table in the terminal, or a stacked bar per pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hexad.plan.memory import MemoryPlan

from .figure import INK, MUTED, PALETTE, quiet_axes, tint

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_MIB = 2**20
_MOST_BARS = 64


def components(plan: MemoryPlan) -> dict[str, int]:
    """Bytes by component, largest groups first; activations by kind."""
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
    """One rank's table, below a line that says of when."""
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False)  # a title of its own would be broken to the columns' width
    table.add_column("", style="default")
    table.add_column("MiB", justify="right")
    table.add_column("%", justify="right")
    for name, size in components(plan).items():
        if size:
            table.add_row(name, f"{size / _MIB:,.1f}", f"{100 * size / plan.total:.1f}")
    table.add_row("total", f"{plan.total / _MIB:,.1f}", "", style="bold")
    if plan.host:
        table.add_row("in the host's memory", f"{plan.host / _MIB:,.1f}", "")
    return Group(f"rank {plan.rank}, at its peak: {plan.action}", table)


def memory_figure(ranks: Sequence[MemoryPlan]) -> Figure:
    """A stacked bar per pipeline rank; of many, the first so many and the largest."""
    from matplotlib.figure import Figure

    shown = list(ranks)
    if len(shown) > _MOST_BARS:
        most = max(ranks, key=lambda plan: plan.total)
        shown = [*shown[: _MOST_BARS - 1], most]
    unit, name = (2**30, "GiB") if max(plan.total for plan in shown) >= 2**30 else (_MIB, "MiB")
    names = list(dict.fromkeys(part for plan in shown for part, size in components(plan).items() if size))
    names.sort(key="buffers".__eq__)  # last, on top
    figure = Figure(figsize=(min(13.0, 4.6 + 0.45 * len(shown)), 4.2), layout="constrained", label="Memory")
    axes = figure.add_subplot()
    places = range(len(shown))
    bottoms = [0.0] * len(shown)
    for part in names:
        heights = [components(plan).get(part, 0) / unit for plan in shown]
        axes.bar(places, heights, 0.7, bottoms, color=_colour(part, names), label=part, linewidth=0)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    for place, top in zip(places, bottoms):
        axes.text(place, top, f"{top:.3g}", ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_ylim(0, 1.1 * max(bottoms))
    axes.set_xticks(places, [str(plan.rank) for plan in shown])
    axes.set_xlabel("rank (one per pipeline coordinate)", color=MUTED, fontsize=8)
    axes.set_title(f"Predicted peak memory, {name}", loc="left", fontsize=10, color=INK)
    quiet_axes(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _colour(part: str, names: Sequence[str]) -> str:
    """Of a component: state in full colours, activations in shades of one, buffers grey."""
    fixed = dict(zip(("parameters", "gradients", "master", "optimizer"), PALETTE))
    if part in fixed:
        return fixed[part]
    if part == "buffers":
        return MUTED
    activations = [name for name in names if name.startswith("activations")]
    return tint(PALETTE[5], 1.0 - 0.8 * activations.index(part) / len(activations))
