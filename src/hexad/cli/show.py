"""``hexad show``: pictures of layouts and runs, in the terminal or as files."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

import click

from hexad.config import ConfigError, HexadError, load_config
from hexad.config.schema import ParallelSettings

from .options import json_option, print_json

# torch, matplotlib and rich are imported where they are used: `--json` must answer at once.
if TYPE_CHECKING:
    from rich.console import RenderableType

    from hexad.topology.layout import Layout

_output_option = click.option(
    "--output", metavar="FILE", help="Draw into FILE.png, FILE.svg or FILE.html instead of the terminal."
)


@click.group()
def show() -> None:
    """Draw a layout, a pipeline schedule, predicted memory or a run."""


@show.command("layout")
@click.argument("settings", metavar="[RUN.YAML] [KEY=VALUE]...", nargs=-1)
@click.option("--world", type=int, help="Ranks in all. Default: the fewest that the degrees need.")
@click.option("--tensor", type=int, help="Tensor-parallel degree.")
@click.option("--context", type=int, help="Context-parallel degree.")
@click.option("--pipeline", type=int, help="Pipeline-parallel degree.")
@click.option("--expert", type=int, help="Expert-parallel degree.")
@click.option("--expert-tensor", type=int, help="Tensor-parallel degree inside each expert.")
@click.option("--data", help="Data-parallel degree, or auto (world / (tensor * context * pipeline)).")
@click.option("--order", help="Rank order, fastest first, such as tensor-context-expert-data-pipeline.")
@json_option
@_output_option
def layout_command(
    settings: tuple[str, ...], world: int | None, as_json: bool, output: str | None, **degrees: Any
) -> None:
    """Show which ranks work together.

    Degrees come from options, or from a run's configuration, whose degrees the options then replace.
    """
    from hexad.show.layout import layout_figure, layout_json, layout_text

    _check_output(output)
    layout = _layout(settings, world, {name: value for name, value in degrees.items() if value is not None})
    if output:
        _save(layout_figure(layout), output)
    if as_json:
        print_json(layout_json(layout))
    elif not output:
        width = _terminal_width()
        _print(layout_text(layout, width), width)


@show.command("schedule")
@click.argument("settings", metavar="[RUN_DIR|RUN.YAML] [KEY=VALUE]...", nargs=-1)
@click.option("--pipeline", type=int, help="Pipeline ranks. Default: 4.")
@click.option("--microbatches", type=int, help="Microbatches of a step. Default: twice the ranks.")
@click.option("--schedule", help="Name of a schedule, as for parallel.schedule. Default: 1f1b.")
@click.option("--virtual-stages", type=int, help="Stages per rank. Default: 2 for interleaved, else 1.")
@click.option("--group", type=int, help="interleaved: microbatches per group. Default: as many as ranks.")
@click.option("--memory", type=float, help="auto: limit in microbatches of a rank's whole share.")
@click.option(
    "--costs",
    metavar="F,B,W,P2P",
    help="Time of a rank's whole share of a microbatch, and of one message. Default: 1,1,1,0, or with a "
    "configuration the arithmetic of its stages.",
)
@click.option(
    "--file", metavar="FILE.json", help="Draw a schedule of your own, as --save and --json write it."
)
@click.option("--save", metavar="FILE.json", help="Write the schedule to a file, for parallel.schedule.")
@json_option
@_output_option
def schedule_command(
    settings: tuple[str, ...], save: str | None, as_json: bool, output: str | None, **options: Any
) -> None:
    """Show what every pipeline rank does when.

    The schedule comes from options, from a file, from a run's configuration, or from a run's directory: there
    a step as it was planned and as it was measured. Without parallel.data a configuration counts for the
    smallest world that its degrees allow.
    """
    from hexad.show.schedule import schedule_text

    from .show_schedule import chosen

    _check_output(output)
    choice = chosen(settings, {name: value for name, value in options.items() if value is not None})
    if save:
        from hexad.parallel.pipeline.schedule import write_schedule

        write_schedule(choice.charts[0].schedule, save)
        click.echo(f"wrote {save}", err=True)
    if output:
        from hexad.show.schedule_figure import schedule_figure

        _save(schedule_figure(choice.charts, choice.note), output)
    if as_json:
        print_json(choice.as_tree())
    elif not output and not save:
        width = _terminal_width()
        _print(schedule_text(choice.charts, width, choice.note), width)


@show.command("memory")
@click.argument("settings", metavar="RUN.YAML [KEY=VALUE]...", nargs=-1)
@click.option("--rank", type=int, help="Which rank. Default: one that needs the most.")
@click.option("--world", type=int, help="Ranks in all. Default: the fewest that the run's degrees need.")
@json_option
@_output_option
def memory_command(
    settings: tuple[str, ...], rank: int | None, world: int | None, as_json: bool, output: str | None
) -> None:
    """Show how many bytes a run will need on a rank, and what for, without starting it."""
    from hexad.show.memory import memory_figure, memory_json, memory_text

    from .show_memory import planned

    _check_output(output)
    plan, ranks = planned(settings, world, rank)
    if output:
        _save(memory_figure(ranks), output)
    if as_json:
        print_json(memory_json(plan, ranks))
    elif not output:
        width = _terminal_width()
        _print(memory_text(plan), width)


@show.command("run")
@click.argument("directory", metavar="DIR")
@click.option(
    "--reference",
    "references",
    metavar="NAME=NATS",
    multiple=True,
    help="Draw a horizontal line in the loss panel, such as 'unigram entropy=7.1'. May be repeated.",
)
@json_option
@_output_option
def run_command(directory: str, references: tuple[str, ...], as_json: bool, output: str | None) -> None:
    """Show a run's loss, speed and communication from its metrics.jsonl."""
    from hexad.show.run import read_metrics, run_figure, run_text, summary

    _check_output(output)
    lines = dict(_reference(text) for text in references)
    metrics = read_metrics(directory)
    if metrics.unfinished:
        click.echo("note: the last line of metrics.jsonl is unfinished and was left out", err=True)
    if output:
        _save(run_figure(metrics, lines), output)
    if as_json:
        print_json(summary(metrics))
    elif not output:
        width = _terminal_width()
        _print(run_text(metrics, width), width)


# What the commands are given


def _layout(settings: tuple[str, ...], world: int | None, degrees: dict[str, Any]) -> Layout:
    from hexad.topology.layout import Layout

    files = [text for text in settings if "=" not in text]
    if len(files) > 1:
        raise HexadError(f"show layout: found several configuration files ({', '.join(files)}); give one")
    overrides = [text for text in settings if "=" in text]
    if "data" in degrees:
        degrees["data"] = _degree_or_auto(degrees["data"])
    # Degrees given as options are checked by the layout itself, whose messages know the world.
    parallel = load_config(files[0] if files else None, overrides).parallel
    chosen = parallel.model_copy(update=degrees)
    if world is None:
        world = _fewest_ranks(chosen)
    return Layout.from_settings(chosen, world)


def _fewest_ranks(parallel: ParallelSettings) -> int:
    """Ranks that both grids need; with ``data: auto`` the smallest common number."""
    dense = parallel.tensor * parallel.context * parallel.pipeline
    if parallel.data != "auto":
        return dense * parallel.data
    return lcm(dense, parallel.expert_tensor * parallel.expert * parallel.pipeline) or 1


def _degree_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError("parallel.data", f"found '{text}', expected an integer or auto") from None


def _reference(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        if equals and name.strip():
            return name.strip(), float(value)
    except ValueError:
        pass
    raise HexadError(f"--reference: found '{text}', expected NAME=NATS such as 'unigram entropy=7.1'")


# What the commands give


def _check_output(output: str | None) -> None:
    """Before any work is done for a file that cannot be written."""
    if output:
        from hexad.show.figure import output_path

        output_path(output)


def _save(figure: Any, output: str) -> None:
    from hexad.show.figure import save_figure

    save_figure(figure, output)
    click.echo(f"wrote {output}", err=True)


def _terminal_width() -> int:
    from shutil import get_terminal_size

    return get_terminal_size((100, 24)).columns


def _print(content: RenderableType, width: int) -> None:
    from rich.console import Console

    Console(width=width, highlight=False).print(content)
