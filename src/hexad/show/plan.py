"""The fastest layouts of a job, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from hexad.config import counted
from hexad.planning.plan import SHORT_NAMES, Plan, compared
from hexad.planning.search import Candidate

_GIB = 2**30


def plan_text(plan: Plan) -> RenderableType:
    """The layouts, what was rejected, and how MFU is counted."""
    config, cluster = plan.config, plan.cluster
    model = config.model.preset or f"{config.model.family}, {config.model.layers} layers"
    title = (
        f"{model}, {config.precision.dtype}, {cluster.cluster.gpus:,} x {cluster.name}: sequences of "
        f"{config.data.sequence:,} tokens, {config.batch.global_:,} a step"
    )
    rejected = ", ".join(f"{count:,} {reason}" for reason, count in plan.rejected.items())
    searched = f"{counted(plan.evaluated, 'pipeline')} evaluated in {plan.seconds:.1f} s"
    names = (layout_name(plan, candidate) for candidate in plan.layouts)
    return Group(
        title,
        _layouts(plan),
        *(f"{number:2}  {name}" for number, name in enumerate(names, 1)),
        f"{searched}; not possible: {rejected or 'none'}",
        f"{plan.convention}. GiB: tensors of the rank that needs the most, and all that its device holds, of "
        f"{plan.cluster.capacity / _GIB:.1f}.",
    )


def layout_name(plan: Plan, candidate: Candidate) -> str:
    """A layout in the form that ``--explain`` takes."""
    names = {key: name for name, key in SHORT_NAMES.items()}
    parts = {}
    for key, value in plan.settings(candidate).items():
        parts[names.get(key, key.removeprefix("parallel."))] = value
    parts.setdefault("micro", candidate.resolved.config.batch.micro)
    return ",".join(f"{name}={value}".replace(" ", "") for name, value in parts.items())


def _layouts(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    headings = ("", "step s", "tokens/s/GPU", "MFU", "GiB", "of all", "bubble", "waiting")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, candidate in enumerate(plan.layouts, 1):
        seconds = plan.breakdown(candidate).seconds
        waiting = sum(value for name, value in seconds.items() if name.startswith("waiting"))
        waiting += seconds.get("reduction of gradients", 0.0) + seconds.get("gather of weights", 0.0)
        table.add_row(
            str(number),
            f"{candidate.step.total:.3f}",
            f"{plan.rate(candidate):,.0f}",
            f"{plan.mfu(candidate):.3f}",
            f"{candidate.memory.total / _GIB:.1f}",
            f"{candidate.device.total / _GIB:.1f}",
            f"{candidate.step.timeline.bubble:.1%}",
            f"{waiting / candidate.step.total:.1%}",
        )
    return table


def explanation_text(plan: Plan, candidate: Candidate) -> RenderableType:
    """Text on the time and memory of one layout."""
    tree = plan.tree(candidate)
    rate = f"{plan.rate(candidate):,.0f} tokens/s/GPU, MFU {plan.mfu(candidate):.3f}"
    return Group(
        layout_name(plan, candidate),
        f"{candidate.step.total:.3f} s a step: {rate}",
        _seconds(tree),
        _memory(tree),
        *misfit(plan, candidate),
        plan.convention,
    )


def _seconds(tree: dict[str, Any]) -> Table:
    table = Table("seconds of a step, on the pipeline rank that computes longest", box=None, pad_edge=False)
    for heading in ("s", "share"):
        table.add_column(heading, justify="right")
    for name, seconds in tree["seconds"].items():
        table.add_row(name, f"{seconds:.4f}", f"{seconds / tree['step_seconds']:.1%}")
    return table


def _memory(tree: dict[str, Any]) -> Table:
    memory = tree["memory"]
    table = Table(f"memory at the peak, rank {memory['rank']}", box=None, pad_edge=False)
    table.add_column("GiB", justify="right")
    rows = {name: memory[name] for name in ("parameters", "gradients", "master", "optimizer")}
    rows |= {f"activations: {name}": size for name, size in memory["activations"].items()}
    rows |= {
        "buffers": memory["buffers"],
        "tensors": memory["tensors"],
        "reserved besides": memory["reserved"],
    }
    rows |= {"CUDA's context": memory["context"], "NCCL's buffers": memory["communicators"]}
    rows |= {"total": memory["device_total"], "free": tree["margin"]}
    for name, size in rows.items():
        if size:
            table.add_row(name, f"{size / _GIB:.2f}", style="bold" if name in ("tensors", "total") else None)
    if memory["host"]:
        table.add_row("in the host's memory", f"{memory['host'] / _GIB:.2f}")
    return table


def comparison_text(plan: Plan, candidates: Sequence[Candidate]) -> RenderableType:
    """Two layouts side by side."""
    first, second = (plan.tree(candidate) for candidate in candidates)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("A", "B", "B - A"):
        table.add_column(name, justify="right")
    for name, left, right in compared(first, second):
        scale, digits = (_GIB, 2) if name == "memory" else (1, 4)
        values = (left / scale, right / scale, (right - left) / scale)
        label = {"memory": "memory, all that a GPU holds, GiB"}.get(name, name.replace("_", " "))
        table.add_row(label, *(f"{value:,.{digits}f}" for value in values))
    lines = []
    for letter, candidate in zip("AB", candidates):
        lines += [f"{letter}: {layout_name(plan, candidate)}", *misfit(plan, candidate)]
    return Group(*lines, table, plan.convention)


def misfit(plan: Plan, candidate: Candidate) -> list[str]:
    """A line that says so where a layout does not fit."""
    needed, capacity = candidate.device.total / _GIB, plan.cluster.capacity / _GIB
    if plan.fits(candidate):
        return []
    return [f"does not fit: it needs {needed:.1f} GiB of {plan.cluster.name}'s {capacity:.1f}"]
