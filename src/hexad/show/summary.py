"""A configuration in brief: size, tokens, steps, ranks, memory; time where it is known."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from hexad.checkpoint.directory import CheckpointDirectory
from hexad.checkpoint.kept_tokenizer import saved_form
from hexad.config import Config, HexadError, counted
from hexad.config.load import read_yaml
from hexad.planning import Resolved
from hexad.planning.costs import active_count, parameter_count, trained_count
from hexad.planning.memory import MemoryPlan, largest

from .memory import figures, figures_text
from .run import read_metrics

_SHORT = ((10**12, "T"), (10**9, "B"), (10**6, "M"))
_TIMED = {
    **dict.fromkeys(("model", "batch", "parallel", "precision", "memory"), ()),
    "data": ("sequence", "documents", "packing"),
    "run": ("device", "compile"),
}
"""Groups of settings on which the time of a step depends, or which of their settings."""
_AXES = ("tensor", "context", "pipeline", "data", "expert")


def summary(resolved: Resolved, ranks: Sequence[MemoryPlan]) -> dict[str, Any]:
    """The summary of a run as JSON values, given a plan for every pipeline coordinate
    (:func:`hexad.planning.memory.per_pipeline_rank`); ``device`` is what memory and format are predicted for.
    """
    config, layout = resolved.config, resolved.layout
    most = largest(ranks)
    tokens = config.batch.global_ * config.data.sequence
    return {
        "family": config.model.family,
        "parameters": parameter_count(config.model),
        "active_parameters": active_count(config.model),
        "trained_parameters": trained_count(config.model),
        "tokens_per_step": tokens,
        "steps": config.run.steps,
        "tokens": config.batch.samples(config.run.steps) * config.data.sequence,
        "steps_left": _steps_left(config),
        "step_seconds": _step_seconds(config),
        "ranks": layout.world,
        "degrees": {axis: layout.degrees[axis] for axis in _AXES if layout.degrees[axis] > 1},
        "zero": config.parallel.zero,
        "schedule": resolved.plan.schedule.name if layout.pipeline > 1 else None,
        "microbatches": resolved.plan.schedule.microbatches,
        "dtype": config.precision.dtype,
        "device": "cpu" if config.run.device == "cpu" else "gpu",
        "memory_bytes": {
            "rank": most.rank,
            "total": most.total,
            "parameters": most.parameters,
            "gradients": most.gradients,
            "optimizer": most.master + most.optimizer,
            "activations": sum(most.activations.values()),
            "buffers": most.buffers,
            "host": most.host,
            "figures": figures(resolved, ranks),
        },
    }


def _steps_left(config: Config) -> int:
    """Steps after the newest checkpoint of the run in ``run.dir``."""
    try:
        checkpoints = CheckpointDirectory(config.run.dir).complete()
    except OSError:
        checkpoints = []
    return max(0, config.run.steps - (checkpoints[-1][0] if checkpoints else 0))


def _step_seconds(config: Config) -> float | None:
    """Median time of a step of the run in ``run.dir``, in seconds, if its last steps computed the same as
    those to come would, on the same ranks; else None."""
    directory = Path(config.run.dir)
    try:
        before = dict(read_yaml(directory / "config.yaml"))
        lines = read_metrics(directory).lines
    except (OSError, UnicodeDecodeError, TypeError, ValueError, HexadError):
        return None
    now = saved_form(config).model_dump(mode="json", by_alias=True)
    for group, names in _TIMED.items():
        if any(before.get(group, {}).get(name) != now[group][name] for name in names or now[group]):
            return None
    # A step of one layout sends as many bytes as every other: those of an earlier layout are left out.
    last = takewhile(lambda line: line.get("comm_bytes") == lines[-1].get("comm_bytes"), reversed(lines))
    seconds = [line["step_seconds"] for line in last if isinstance(line.get("step_seconds"), float)]
    return median(seconds) if seconds else None


def summary_lines(configured: Config, resolved: Resolved, ranks: Sequence[MemoryPlan]) -> list[str]:
    """The facts of :func:`summary` as text; ``configured``: the configuration before it is resolved."""
    config, facts = resolved.config, summary(resolved, ranks)
    model, memory = config.model, facts["memory_bytes"]
    shape = f"{model.layers} layers, hidden {model.hidden:,}, {model.heads} heads, vocabulary {model.vocab:,}"
    where = facts["device"].upper()
    memory_of = "the host's" if where == "CPU" else "a GPU's"  # which need not be here
    auto = ""
    if configured.precision.dtype == "auto":
        auto = " (auto: of this CPU)" if where == "CPU" else " (auto: of a GPU; run.device=cpu: of this CPU)"
    state = f", zero {facts['zero']}" if facts["zero"] else ""
    sequences = counted(config.batch.micro, "sequence")
    passes = f"{counted(facts['microbatches'], 'microbatch')} of {sequences} on each data rank"
    schedule = f", schedule {facts['schedule']}" if facts["schedule"] else ""
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    unit, name = (2**30, "GiB") if memory["total"] >= 2**30 else (2**20, "MiB")
    parts = ", ".join(f"{kind} {memory[kind] / unit:,.2f}" for kind in kinds if memory[kind])
    most = "at most " if len(ranks) > 1 else ""
    host = f", and {memory['host'] / unit:,.2f} {name} in the host's" if memory["host"] else ""
    whole = facts["trained_parameters"] == facts["parameters"]
    trained = "" if whole else f", {_both(facts['trained_parameters'])} trained"
    active = "" if config.model.moe is None else f", {rounded(facts['active_parameters'])} per token"
    ramp = config.batch.ramp
    grown = "" if ramp is None else f"from {ramp[0]:,} to "
    rows = {
        "parameters": f"{_both(facts['parameters'])}{active}{trained}: {facts['family']}, {shape}",
        "tokens": f"{facts['tokens_per_step']:,} per step ({grown}{config.batch.global_:,} sequences of "
        f"{config.data.sequence:,}), {_both(facts['tokens'])} in {facts['steps']:,} steps",
        "ranks": f"{facts['ranks']:,}{degrees_text(facts['degrees'])}{state}",
        "step": f"{passes}{schedule}",
        "precision": f"{facts['dtype']}{auto}",
        "memory": f"{most}{memory['total'] / unit:,.2f} {name} per rank in {memory_of} memory{host}",
        "": f"of which {parts}",
        **({"device": sizes} if (sizes := figures_text(resolved, ranks)) is not None else {}),
        **({"time": _time(facts, config.run.dir)} if facts["step_seconds"] and facts["steps_left"] else {}),
    }
    return [f"{name:<12}{text}" for name, text in rows.items()]


def _time(facts: dict[str, Any], directory: str) -> str:
    whole = timedelta(seconds=round(facts["steps_left"] * facts["step_seconds"]))
    return (
        f"{whole} for the {facts['steps_left']:,} steps that are left, at {facts['step_seconds']:.3g} s per "
        f"step, the median so far in {directory}"
    )


def degrees_text(degrees: dict[str, int]) -> str:
    """Degrees after a number of ranks: ``: tensor 2 x data 4``; empty without any."""
    return ": " * bool(degrees) + " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())


def rounded(number: int) -> str:
    """A count with three digits, such as ``8.03 B``; exact below a million."""
    for unit, name in _SHORT:
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _both(number: int) -> str:
    """A count exact and rounded: ``8,030,261,248 (8.03 B)``."""
    return f"{number:,}" if number < _SHORT[-1][0] else f"{number:,} ({rounded(number)})"
