"""``hexad train``: start local ranks, or join the world this process was started in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hexad.config import Config, ConfigError, dump_config
from hexad.launching.environment import environment
from hexad.launching.files import refuse_locked
from hexad.model.configuration import load_config
from hexad.planning import Resolved, check_config, resolve, smallest_world, working_layout

from .options import json_option, overrides_argument, print_json, ranks_option, run_ranks

if TYPE_CHECKING:
    from hexad.training.loop import Outcome


@click.command("train")
@click.argument("path", metavar="run.yaml")
@overrides_argument
@ranks_option("--nproc", "Local ranks to start")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check, print size, layout, memory and the resolved configuration, start nothing.",
)
@json_option
def train(path: str, overrides: tuple[str, ...], nproc: int | None, dry_run: bool, as_json: bool) -> int:
    """Train from run.yaml; settings can be overridden, as in parallel.tensor=2.

    Under torchrun or SLURM this process joins their world; otherwise it starts --nproc local ranks.
    """
    from hexad.planning.machine import check_dispatcher, check_machine

    config = load_config(path, overrides)
    joined = environment().joined
    if joined and nproc is not None:
        raise ConfigError("--nproc", "cannot be given under torchrun or SLURM, which start the ranks")
    request = {"path": path, "overrides": overrides, "as_json": as_json}
    if joined and not dry_run:
        return run_ranks("train", request, environment().world)
    if not dry_run:
        refuse_locked(config.run.dir)
    ranks = environment().world if joined else nproc or smallest_world(config)
    layout = working_layout(config, ranks)
    check_config(config, layout)
    vocab = check_machine(config)
    if not dry_run:
        check_dispatcher(config)
    if dry_run or ranks > 1:  # a single rank resolves it itself
        resolved = resolve(config, layout, vocab)
    if dry_run:
        _print_plan(config, resolved, as_json)
        return 0
    return run_ranks("train", request, ranks, config.faults.restarts, config.run.dir)


def train_here(request: dict[str, Any]) -> None:
    """Run one rank of the training; with ``--json`` the first one prints how it ended."""
    from hexad.training.loop import train as train_run

    config = load_config(request["path"], request["overrides"])
    outcome = train_run(config)
    if request["as_json"] and environment().rank == 0:
        print_json(_ending(config, outcome))


def _ending(config: Config, outcome: Outcome) -> dict[str, Any]:
    """How a run ended, for scripts; losses are the last ones in ``metrics.jsonl``."""
    from hexad.checkpoint.directory import CheckpointDirectory
    from hexad.show.run import METRICS, read_metrics

    directory = Path(config.run.dir)
    lines = read_metrics(directory).lines if (directory / METRICS).exists() else ()

    def last(name: str) -> Any:
        return next((line[name] for line in reversed(lines) if line.get(name) is not None), None)

    newest = CheckpointDirectory(directory).newest()
    return {
        "finished": outcome.stopped_by in (None, "patience"),
        "stopped_by": outcome.stopped_by,
        "step": outcome.step,
        "steps": config.run.steps,
        **{name: last(name) for name in ("loss", "validation_loss", "samples", "tokens")},
        "run_dir": str(directory),
        "checkpoint": None if newest is None else str(newest),
    }


def _print_plan(settings: Config, resolved: Resolved, as_json: bool) -> None:
    """Print the summary, each line a comment, then the stages and the resolved configuration."""
    from hexad.planning.advice import advice
    from hexad.planning.memory import largest, per_pipeline_rank
    from hexad.show.summary import summary, summary_lines
    from hexad.topology.devices import gpu_visible

    config, layout, plan = resolved.config, resolved.layout, resolved.plan
    per_rank = per_pipeline_rank(resolved)
    notes = [str(change) for change in [advice(resolved)] if change is not None]
    if as_json:
        facts = summary(resolved, per_rank)
        print_json(
            {
                "summary": facts,
                "config": config.model_dump(mode="json", by_alias=True),
                "world": layout.world,
                "degrees": facts["degrees"],
                "memory_bytes_per_rank": largest(per_rank).as_tree(),
                "notes": notes,
                "pipeline": {
                    "schedule": plan.schedule.name,
                    "layers": [[part.start, part.stop] for part in plan.layers],
                    "placement": plan.schedule.placement,
                    "memory_bytes": [other.total for other in per_rank],
                },
            }
        )
        return
    if config.run.device == "cuda" and not gpu_visible():
        click.echo("note: no GPU is visible here, so that run.device: cuda cannot start here", err=True)
    for line in (*summary_lines(settings, resolved, per_rank), *(f"note: {note}" for note in notes)):
        click.echo(f"# {line}")
    if layout.pipeline > 1:
        for stage, (part, rank) in enumerate(zip(plan.layers, plan.schedule.placement)):
            layers = f"layers {part.start} to {part.stop - 1}" if part else "no layer"
            click.echo(f"# stage {stage} on pipeline rank {rank}: {layers}")
    click.echo("\n" + dump_config(config), nl=False)
