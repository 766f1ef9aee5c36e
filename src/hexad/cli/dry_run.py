"""``hexad plan --dry-run``: a step of one rank of a job, without the others; as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from hexad.config import HexadError
from hexad.planning import Resolved, planned_layout, resolve
from hexad.planning.memory import largest, per_pipeline_rank
from hexad.planning.plan import planned_config, read_cluster
from hexad.show.memory import memory_title

from .options import split_settings

if TYPE_CHECKING:
    from hexad.engine.dry.run import DryRun

_GIB = 2**30


def planned_job(
    settings: tuple[str, ...], model: str | None, cluster: str | None, numbers: Mapping[str, int | str | None]
) -> Resolved:
    """The job to plan.

    Args:
        settings: path of a configuration file, and ``KEY=VALUE`` overrides.
        model: a preset, or a path, in place of the file.
        cluster: GPU and number of GPUs, ``h100:1024``; None: a GPU, as few as the degrees allow.
        numbers: settings that options stand for, by key; None where not given.

    Raises:
        HexadError: the settings are refused, or there is no model.
    """
    path, overrides = split_settings("plan", settings)
    if model is not None and path is not None:
        raise HexadError(f"plan: found --model {model} beside the configuration file {path}; give one")
    overrides += [f"{key}={value}" for key, value in numbers.items() if value is not None]
    target = None if cluster is None else read_cluster(cluster)
    config = planned_config(model or path, overrides, target)
    world, bf16 = (None, None) if target is None else (target.cluster.gpus, target.gpu.bf16)
    return resolve(config, planned_layout(config, world), bf16=bf16)


def run_dry(resolved: Resolved, rank: int | None) -> DryRun:
    """A dry run of a rank; by default of one that is predicted to need the most memory."""
    from hexad.engine.dry.run import dry_run

    return dry_run(resolved, largest(per_pipeline_rank(resolved)).rank if rank is None else rank)


def dry_run_json(resolved: Resolved, run: DryRun) -> dict[str, Any]:
    """The report, with the format and the title of the job."""
    return {"job": memory_title(resolved), "dtype": resolved.config.precision.dtype, **run.as_tree()}


def dry_run_text(resolved: Resolved, run: DryRun) -> RenderableType:
    """The report as lines and tables."""
    tree = run.as_tree()
    place = ", ".join(f"{axis} {place}" for axis, place in run.coordinates.items())
    return Group(
        memory_title(resolved),
        f"rank {run.rank:,} of {run.world:,}: {place}",
        _table("memory at the peak, GiB", tree["memory"]),
        f"at the peak: {run.action} (predicted: {run.predicted.action})",
        _table("sent in a step, GiB", tree["sent"]),
        f"dry run: {run.seconds:.1f} s, {run.resident / _GIB:.2f} GiB of this host's memory",
    )


def _table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """What was predicted and counted of every row, and the difference."""
    table = Table(title, box=None, pad_edge=False)
    for heading in ("predicted", "counted", "difference"):
        table.add_column(heading, justify="right")
    most = max(row["bytes"] for row in rows.values())
    digits = 2 if most >= _GIB else 5
    for name, row in rows.items():
        predicted, difference = row["predicted_bytes"], row["difference_percent"]
        if not (predicted or row["bytes"]):
            continue
        table.add_row(
            name,
            f"{predicted / _GIB:,.{digits}f}",
            f"{row['bytes'] / _GIB:,.{digits}f}",
            "" if difference is None else f"{difference:+.2f} %",
            style="bold" if name == "total" else None,
        )
    return table
