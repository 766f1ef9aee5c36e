"""A run's predicted memory, and whether it fits a device: a table in the terminal, or a stacked bar per
pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table

from hexad.config import counted
from hexad.planning import Resolved
from hexad.planning.communicators import communicators
from hexad.planning.device_memory import DeviceMemory, device_memory
from hexad.planning.memory import MemoryPlan, expert_loads, largest
from hexad.planning.serving import ServingPlan, cache_tokens
from hexad.topology.devices import Gpu

from .figure import PALETTE, styled, tip_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 32
"""Pipeline ranks in a picture: the first so many."""

_GIB = 2**30
_TITLE_WIDTH = 110
"""Characters of a line of the title that fit into the narrowest picture."""
_SMALL = 0.01
"""Kinds of activations below this part of the highest bar are drawn as one."""
# P. Tol's muted scheme (personal.sron.nl/~pault) after our own colours, of which the last are darker shades.
_COLOURS = (*PALETTE, "#332288", "#999933", "#882255", "#ddcc77", "#117733", "#aa4499")


class Device(NamedTuple):
    """Memory that a rank may use.

    Attributes:
        name: for display.
        capacity: bytes.
        gpu: the kind of GPU; None for a size, which names none.
    """

    name: str
    capacity: int
    gpu: Gpu | None = None


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


def memory_title(resolved: Resolved) -> str:
    """The model and the layout of a run, in a line."""
    config, layout = resolved.config, resolved.layout
    model = config.model.preset or f"{config.model.family}, {config.model.layers} layers"
    degrees = [f"{axis} {layout.degrees[axis]}" for axis in ("tensor", "context", "pipeline", "data")]
    shape = " x ".join(text for text in degrees if not text.endswith(" 1"))
    zero = f", zero {config.parallel.zero}" if config.parallel.zero else ""
    ranks = f"{layout.world} rank{'s' * (layout.world > 1)}"
    return f"{model}, {config.precision.dtype}, {ranks}{': ' if shape else ''}{shape}{zero}"


def memory_json(
    resolved: Resolved, plan: MemoryPlan, ranks: Sequence[MemoryPlan], device: Device | None = None
) -> dict[str, Any]:
    """The format and the rank's bytes, the totals of one rank for every pipeline coordinate, whether the
    largest fits."""
    totals = [{"rank": other.rank, "total": other.total} for other in ranks]
    tree = {"dtype": resolved.config.precision.dtype, **plan.as_tree(), "pipeline": totals}
    tree["figures"] = figures(resolved, ranks)
    if loads := expert_loads(resolved):
        tree["experts"] = loads
    if device is None:
        return tree
    need = needed(resolved, ranks, device)
    margin = device.capacity - need.total
    facts = {"name": device.name, "capacity": device.capacity, "fits": margin >= 0, "margin": margin}
    return {**tree, "device": {**facts, "needed": need._asdict()}}


def needed(resolved: Resolved, ranks: Sequence[MemoryPlan], device: Device) -> DeviceMemory:
    """The memory of a device on the rank that needs the most; of a device known only by its size, that of the
    tensors."""
    most = largest(ranks).total
    if device.gpu is None:
        return DeviceMemory(most, 0, 0, 0)
    return device_memory(most, resolved)


def figures(resolved: Resolved, ranks: Sequence[MemoryPlan]) -> dict[str, int] | None:
    """Bytes of the rank that needs the most: of tensors, reserved, and of the device; None on a CPU."""
    if resolved.config.run.device == "cpu":
        return None
    return device_memory(largest(ranks).total, resolved).figures


def figures_text(resolved: Resolved, ranks: Sequence[MemoryPlan]) -> str | None:
    """:func:`figures` in a line."""
    sizes = figures(resolved, ranks)
    if sizes is None:
        return None
    tensors, reserved, device = (f"{size / _GIB:,.2f}" for size in sizes.values())
    count = counted(len(communicators(resolved)), "communicator")
    return f"tensors {tensors} GiB, reserved {reserved}, device {device} (with CUDA and {count} of NCCL)"


def verdict(need: DeviceMemory, device: Device) -> str:
    """The statement whether the run fits, with the margin."""
    margin = device.capacity - need.total
    sizes = f"{need.total / _GIB:,.2f} of {device.capacity / _GIB:,.2f} GiB on {device.name}"
    if need.total > need.tensors:
        others = f"{need.reserved / _GIB:,.2f} reserved besides, {need.context / _GIB:,.2f} of CUDA"
        nccl = f", {need.communicators / _GIB:,.2f} of NCCL" if need.communicators else ""
        sizes += f" (tensors {need.tensors / _GIB:,.2f}, {others}{nccl})"
    part = f"{abs(margin) / _GIB:,.2f} GiB ({abs(margin) / device.capacity:.0%} of the device)"
    return f"fits: yes, {sizes}, {part} left" if margin >= 0 else f"fits: no, {sizes}, {part} too much"


def memory_text(
    resolved: Resolved, plan: MemoryPlan, ranks: Sequence[MemoryPlan], device: Device | None = None
) -> RenderableType:
    """The run in a line, one rank's components at its peak, with bars; whether the largest of ``ranks``
    fits."""
    digits = 2 if plan.total >= _GIB else 5
    table = Table("", box=None, pad_edge=False)
    for heading in ("GiB", "%"):
        table.add_column(heading, justify="right")
    table.add_column("", width=24)
    for name, size in components(plan).items():
        if size:
            bar = Bar(plan.total, 0, size, color="blue")
            table.add_row(name, f"{size / _GIB:,.{digits}f}", f"{100 * size / plan.total:.1f}", bar)
    table.add_row("total", f"{plan.total / _GIB:,.{digits}f}", style="bold")
    if plan.host:
        table.add_row("in host memory", f"{plan.host / _GIB:,.{digits}f}")
    peak = f"rank {plan.rank}, at its peak: {plan.action}"
    return Group(
        memory_title(resolved),
        peak,
        table,
        *_loads_text(resolved),
        *([f"most of any rank: {sizes}"] if (sizes := figures_text(resolved, ranks)) is not None else []),
        *([verdict(needed(resolved, ranks, device), device)] if device is not None else []),
    )


def _loads_text(resolved: Resolved) -> list[str]:
    """The totals by the load of a rank's experts, in a line; none without experts."""
    loads, moe = expert_loads(resolved), resolved.config.model.moe
    if moe is None:
        return []
    even, allowed, worst = (f"{loads[name] / _GIB:,.4g} GiB" for name in ("even", "allowance", "worst"))
    return [
        f"experts: {even} with an even load, {allowed} with {moe.room:g} times as many rows "
        f"(model.moe.allowance), {worst} if all tokens choose this rank's"
    ]


def _shown(ranks: Sequence[MemoryPlan]) -> list[dict[str, int]]:
    """Components of every rank that any of them has, small kinds of activations added up."""
    sizes = [components(plan) for plan in ranks]
    least = _SMALL * largest(ranks).total
    names = dict.fromkeys(name for parts in sizes for name, size in parts.items() if size)
    highest = {name: max(parts.get(name, 0) for parts in sizes) for name in names}
    small = [name for name in names if name.startswith("activations: ") and highest[name] < least]
    kept = [name for name in names if name not in small and name != "buffers"]
    shown = []
    for parts in sizes:
        drawn = {name: parts.get(name, 0) for name in kept}
        if small:
            drawn["activations: other"] = sum(parts.get(name, 0) for name in small)
        if "buffers" in names:  # on top
            drawn["buffers"] = parts["buffers"]
        shown.append(drawn)
    return shown


@styled
def memory_figure(
    ranks: Sequence[MemoryPlan],
    title: str = "",
    device: Device | None = None,
    need: DeviceMemory | None = None,
) -> Figure:
    """A stacked bar of GiB for each of ``ranks``, one per pipeline coordinate, with the memory of ``device``
    as a line; ``need``: on it, from :func:`needed`."""
    from matplotlib.figure import Figure

    shown = _shown(ranks[:MOST_BARS])
    figure = Figure((7.0 + 0.3 * len(shown), 4.2), layout="constrained", label="Memory")
    axes = figure.subplots()
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    labels = [str(plan.rank) for plan in ranks[:MOST_BARS]]
    tops = [0.0] * len(shown)
    for part, colour in zip(shown[0], _COLOURS):
        heights = [sizes[part] / _GIB for sizes in shown]
        bars = axes.bar(labels, heights, 0.7, tops, label=part, color=colour)
        tip_bars(bars, (f"rank {rank}, {part}: {_number(size)} GiB" for rank, size in zip(labels, heights)))
        tops = [top + height for top, height in zip(tops, heights)]
    plain = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # readable on the device's line too
    axes.bar_label(bars, [_number(top) for top in tops], padding=3, bbox=plain)
    highest = max(tops)
    if device is not None:
        capacity = device.capacity / _GIB
        label = f"{device.name}: {_number(capacity)} GiB"
        axes.axhline(capacity, color="#c1121f", linewidth=1.2, linestyle="--", label=label)
        highest = max(highest, capacity)
    axes.set_ylim(0, 1.1 * highest)
    axes.margins(x=0.25 if len(shown) < 3 else 0.05)
    omitted = f"; the first {MOST_BARS} of {len(ranks)}" if len(ranks) > MOST_BARS else ""
    axes.set_xlabel(f"rank (one per pipeline coordinate{omitted})")
    axes.set_ylabel("GiB")
    fits = f"\n{fill(verdict(need, device), _TITLE_WIDTH)}" if device is not None and need is not None else ""
    figure.suptitle(f"Predicted peak memory: {title}{fits}", x=0.01, ha="left", fontsize=9.5)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), reverse=True, frameon=False)
    return figure


def _number(size: float) -> str:
    """A number of GiB as text for a picture."""
    return f"{size:.2f}" if size >= 1 else f"{size:.3g}"


def serving_json(plans: Sequence[ServingPlan], device: Device | None = None) -> dict[str, Any]:
    """Every pipeline coordinate, and the tokens of a replica's cache."""
    tree: dict[str, Any] = {
        "pipeline": [plan.as_tree() for plan in plans],
        "cache_tokens": cache_tokens(plans),
    }
    return tree if device is None else {**tree, "device": {"name": device.name, "capacity": device.capacity}}


def serving_text(
    resolved: Resolved, plans: Sequence[ServingPlan], device: Device | None = None
) -> RenderableType:
    """A table with a column for each pipeline coordinate, and what fits in a line."""
    inference, length = resolved.config.inference, plans[0].length
    table = Table(box=None, title=f"{memory_title(resolved)}: generation", title_justify="left")
    table.add_column("")
    for plan in plans:
        table.add_column("rank" if len(plans) == 1 else f"stage {plan.pipeline}", justify="right")
    rows = [
        ("weights", [f"{plan.parameters / _GIB:,.2f} GiB" for plan in plans]),
        (f"a step of {inference.batch_tokens:,} tokens", [f"{plan.step / _GIB:,.3f} GiB" for plan in plans]),
        (f"logits of {inference.sequences:,} tokens", [f"{plan.logits / _GIB:,.3f} GiB" for plan in plans]),
        ("cache, per token", [f"{plan.token_bytes / 1024:,.1f} KiB" for plan in plans]),
        (
            f"prompt of {length:,} tokens, per token",
            [f"{plan.prefill_flops / 1e9:,.2f} GFLOP" for plan in plans],
        ),
        ("the token after it", [f"{plan.decode_flops / 1e9:,.2f} GFLOP" for plan in plans]),
        (f"{inference.sequences:,} of these read", [f"{plan.read_bytes / _GIB:,.2f} GiB" for plan in plans]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    tokens = cache_tokens(plans)
    if device is None or tokens is None:
        return table
    part = f"inference.memory_part {inference.memory_part:g}"
    if tokens == 0:
        return Group(table, f"does not fit {device.name} with {part}: use more tensor or pipeline ranks")
    full = f"{tokens / length:,.1f} sequences of {length:,}"
    return Group(table, f"{tokens:,} tokens of cache fit {device.name} with {part}: {full}")
