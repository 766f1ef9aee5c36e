"""``hexad plan --dry-run``: a step of one rank of a job, without the others; as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from hexad.config import ConfigError, HexadError, did_you_mean
from hexad.model.configuration import load_config
from hexad.planning import Resolved, planned_layout, resolve
from hexad.planning.memory import largest, per_pipeline_rank
from hexad.show.memory import memory_title
from hexad.topology.devices import Gpu, named_gpus

from .options import split_settings

if TYPE_CHECKING:
    from hexad.engine.dry.run import DryRun

_GIB = 2**30


def planned_job(
    settings: tuple[str, ...], model: str | None, cluster: str | None, numbers: Mapping[str, int | None]
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
    if model is not None and model.endswith((".yaml", ".yml")):
        path = model
    elif model is not None:
        overrides = [f"model.preset={model}", *overrides]
    elif path is None:
        raise HexadError("plan: found no model; give a configuration file, or --model with a preset")
    overrides += [f"{key}={number}" for key, number in numbers.items() if number is not None]
    name, gpu, world = (None, None, None) if cluster is None else cluster_of(cluster)
    if gpu is not None:
        overrides.append("run.device=cuda")
    config = load_config(path, overrides)
    if gpu is not None and config.precision.dtype == "fp8" and not gpu.fp8:
        raise ConfigError(
            "precision.dtype", f"found fp8, but {name} has no fp8 matrix units; use auto or bf16"
        )
    return resolve(config, planned_layout(config, world), bf16=None if gpu is None else gpu.bf16)


def cluster_of(text: str) -> tuple[str, Gpu, int]:
    """(name of the GPU, the GPU, how many) of ``h100:1024``.

    Raises:
        HexadError: it is of another form, or no known GPU.
    """
    word, _, count = text.partition(":")
    known, name = named_gpus(), "-".join(word.lower().replace("_", " ").replace("-", " ").split())
    if not (count.isascii() and count.isdigit() and int(count)):
        raise HexadError(
            f"--cluster: found '{text}', expected a GPU and how many there are, such as h100:1024"
        )
    if name not in known:
        hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
        raise HexadError(f"--cluster: found '{word}', which is no known GPU{hint}")
    return name, known[name][0], int(count)


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
