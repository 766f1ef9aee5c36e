"""``hexad plan``: what a job will need, found out without its hardware."""

import click
from rich.console import Console

from hexad.config import HexadError

from .dry_run import dry_run_json, dry_run_text, planned_job, run_dry
from .options import json_option, print_json


@click.command()
@click.argument("settings", metavar="[RUN.YAML] [KEY=VALUE]...", nargs=-1)
@click.option("--model", metavar="PRESET|RUN.YAML", help="The model, in place of a configuration file.")
@click.option("--cluster", metavar="GPU:COUNT", help="The GPUs that are planned for, such as h100:1024.")
@click.option("--sequence", type=click.IntRange(1), help="Tokens of a sequence: data.sequence.")
@click.option("--global-batch", type=click.IntRange(1), help="Sequences of a step: batch.global.")
@click.option("--fix", "fixed", metavar="KEY=VALUE", multiple=True, help="A setting. May be repeated.")
@click.option("--dry-run", is_flag=True, help="Run a step of one rank on tensors without values.")
@click.option("--rank", type=int, help="Global rank of --dry-run. Default: one that needs the most memory.")
@json_option
def plan(
    settings: tuple[str, ...],
    model: str | None,
    cluster: str | None,
    sequence: int | None,
    global_batch: int | None,
    fixed: tuple[str, ...],
    dry_run: bool,
    rank: int | None,
    as_json: bool,
) -> None:
    """Say what a rank of a job will need and send, on one CPU.

    With --dry-run the engine that trains makes a step of that rank, without the other ranks and without
    values: its peak memory by component, beside the prediction, and the bytes that it sends over every axis.
    """
    if not dry_run:
        raise HexadError("plan: found no --dry-run; add it, with --rank or without")
    numbers = {"data.sequence": sequence, "batch.global": global_batch}
    resolved = planned_job((*settings, *fixed), model, cluster, numbers)
    run = run_dry(resolved, rank)
    if as_json:
        print_json(dry_run_json(resolved, run))
    else:
        Console(highlight=False).print(dry_run_text(resolved, run))
