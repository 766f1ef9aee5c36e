"""``hexad plan``: the fastest layouts of a job, found before it is queued and without its hardware."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from hexad.config import HexadError

from .options import json_option, print_json, split_settings
from .plan_validate import validate

if TYPE_CHECKING:
    from hexad.planning.plan import Plan


class _Default(click.Group):
    """A group that takes anything but its commands' names for arguments of the first one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["layouts", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Default, add_help_option=False)
def plan() -> None:
    """Find the fastest layouts of a model on a cluster."""


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments and options that say what is planned, and for which GPUs."""
    model = "The model, in place of a configuration file."
    fixed = "A setting not to search. May be repeated."
    for decorate in reversed(
        [
            click.argument("settings", metavar="[RUN.YAML] [KEY=VALUE]...", nargs=-1),
            click.option("--model", metavar="PRESET|RUN.YAML", help=model),
            click.option("--cluster", metavar="GPU:COUNT", help="The GPUs: h100:1024, or my-gpu.yaml:64."),
            click.option("--sequence", type=click.IntRange(1), help="Tokens of a sequence: data.sequence."),
            click.option("--global-batch", type=click.IntRange(1), help="Sequences of a step: batch.global."),
            click.option("--precision", help="Format: precision.dtype."),
            click.option("--fix", "fixed", metavar="KEY=VALUE", multiple=True, help=fixed),
        ]
    ):
        function = decorate(function)
    return function


@plan.command(context_settings={"help_option_names": ["-h", "--help"]})
@job_options
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Layouts to list at most.")
@click.option("--explain", metavar="LAYOUT", help="Break one down: tensor=8,pipeline=4,zero=1, or file.")
@click.option("--compare", metavar="A B", nargs=2, help="Two layouts side by side.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the best one as a run.yaml.")
@click.option("--calibrate", is_flag=True, help="Measure this CPU: write its hardware file to --output.")
@click.option("--dry-run", is_flag=True, help="Run a step of one rank on tensors without values.")
@click.option("--rank", type=int, help="Global rank of --dry-run. Default: one that needs the most memory.")
@json_option
def layouts(settings: tuple[str, ...], calibrate: bool, dry_run: bool, as_json: bool, **options: Any) -> int:
    """Find the fastest layouts of a model on a cluster, in seconds and without it.

    Listed are the best layouts of different degrees: all that take at most 3 % longer than the best one, and
    others that were fastest on the way. `hexad plan validate FILE.jsonl` predicts measured runs.

    With --dry-run the engine that trains makes a step of one rank, without the other ranks and without
    values: its peak memory by component, beside the prediction, and the bytes that it sends over every axis.
    """
    if calibrate:
        return _calibrate(settings, dry_run, as_json, options)
    if dry_run:
        _dry_run(settings, as_json, **options)
        return 0
    from hexad.planning.plan import explained
    from hexad.show.plan import comparison_text, explanation_text, plan_text

    if options["rank"] is not None:
        raise HexadError("--rank: found without --dry-run; add it, or leave --rank out")
    named = _named(options)
    result = planned_by(settings, options, 0 if named else options["top"])
    console = Console(highlight=False, soft_wrap=True)  # names of layouts are copied whole
    candidates = [explained(result, name) for name in named]
    if as_json:
        trees = [result.tree(candidate) for candidate in candidates]
        print_json({**result.as_tree(), "layouts": trees} if trees else result.as_tree())
    elif len(candidates) == 2:
        console.print(comparison_text(result, candidates))
    elif candidates:
        console.print(explanation_text(result, candidates[0]))
    else:
        console.print(plan_text(result))
    if options["output"] is not None:
        _write(options["output"], result.run_yaml((candidates or result.layouts)[0]))
    return 0


def _named(options: dict[str, Any]) -> list[str]:
    """The layouts of --explain or --compare.

    Raises:
        HexadError: both are there, or what is to be written is not clear or exists.
    """
    explain, compare, output = options["explain"], options["compare"], options["output"]
    if explain is not None and compare is not None:
        raise HexadError("--compare: found beside --explain; give one of them")
    if compare is not None and output is not None:
        raise HexadError("--output: found beside --compare, of two layouts; use --explain")
    if explain is not None and not explain.strip():
        raise HexadError("--explain: found no layout, expected one such as tensor=8,pipeline=4,zero=1")
    if output is not None and (output.exists() or not output.absolute().parent.is_dir()):
        why = "exists" if output.exists() else "is in a directory that does not exist"
        raise HexadError(f"--output: found {output}, which {why}; give another path")
    return [explain] if explain is not None else list(compare or ())


plan.add_command(validate)


def planned_by(settings: tuple[str, ...], options: dict[str, Any], top: int) -> Plan:
    """The plan of a command line.

    Raises:
        HexadError: there is no model or no cluster, or as :func:`hexad.planning.plan.plan`.
    """
    from hexad.planning.plan import plan as planned

    path, overrides = split_settings("plan", settings)
    model = options["model"] or path
    if options["model"] is not None and path is not None:
        raise HexadError(f"plan: found --model {model} beside the configuration file {path}; give one")
    if model is None:
        raise HexadError("plan: found no model; give a configuration file, or --model with a preset")
    if options["cluster"] is None:
        raise HexadError("plan: found no cluster; give --cluster, such as h100:1024")
    return planned(
        model,
        options["cluster"],
        sequence=options["sequence"],
        global_batch=options["global_batch"],
        precision=options["precision"],
        fix=options["fixed"],
        overrides=overrides,
        top=top,
    )


def _calibrate(settings: tuple[str, ...], dry_run: bool, as_json: bool, options: dict[str, Any]) -> int:
    from .calibrate import calibrate

    present = [name for name, value in {"dry_run": dry_run, **options}.items() if value and name != "output"]
    besides = [*settings, *(f"--{name.replace('_', '-')}" for name in present if name != "top")]
    if besides:
        raise HexadError(f"--calibrate: found beside {besides[0]}; it takes --output and --json only")
    return calibrate(options["output"], as_json)


def _write(path: Path, text: str) -> None:
    from .config import write_new

    write_new(path, text)


def _dry_run(settings: tuple[str, ...], as_json: bool, **options: Any) -> None:
    from .dry_run import dry_run_json, dry_run_text, planned_job, run_dry

    for name in ("explain", "compare", "output"):
        if options[name]:
            raise HexadError(f"--{name}: found with --dry-run, which runs one layout; leave one out")
    numbers = {
        "data.sequence": options["sequence"],
        "batch.global": options["global_batch"],
        "precision.dtype": options["precision"],
    }
    resolved = planned_job((*settings, *options["fixed"]), options["model"], options["cluster"], numbers)
    run = run_dry(resolved, options["rank"])
    if as_json:
        print_json(dry_run_json(resolved, run))
    else:
        Console(highlight=False).print(dry_run_text(resolved, run))
