"""``hexad config``: a first configuration, presets, the complete one, and whether it would be accepted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from shutil import get_terminal_size

import click

from hexad.config import ConfigError, dump_config
from hexad.model.configuration import load_config

from .options import degrees, json_option, overrides_argument, print_json

NO_DATA = "note: data.train is null; name the prefix that 'hexad data build' wrote"


@click.group("config")
def config() -> None:
    """Write, show and check configurations; list the models that have a name."""


@config.command("show")
@click.argument("path", metavar="run.yaml")
@overrides_argument
@json_option
def show(path: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the configuration with preset, family and defaults filled in, but not resolved for a world."""
    given = load_config(path, overrides)
    if as_json:
        print_json(given.model_dump(mode="json", by_alias=True))
    else:
        click.echo(dump_config(given), nl=False)


@config.command("check")
@click.argument("path", metavar="run.yaml")
@overrides_argument
@click.option(
    "--world", type=click.IntRange(1), help="Ranks to check for. [default: as few as the degrees allow]"
)
@click.option("--all", "complete", is_flag=True, help="Print the resolved configuration too.")
@click.option(
    "--elsewhere",
    is_flag=True,
    help="For another machine: data, packages of log.* and a GPU are not needed here.",
)
@json_option
def check(
    path: str, overrides: tuple[str, ...], world: int | None, complete: bool, elsewhere: bool, as_json: bool
) -> None:
    """Check a configuration and its data as 'hexad train' would before starting, and print its size, tokens
    and memory."""
    from hexad.planning import check_config, planned_layout, resolve
    from hexad.planning.machine import check_machine, check_without_data
    from hexad.planning.memory import per_pipeline_rank
    from hexad.show.summary import summary, summary_lines
    from hexad.topology.devices import gpu_visible

    given = load_config(path, overrides)
    layout = planned_layout(given, world)
    check_config(given, layout)
    if given.run.device == "cuda" and not elsewhere and not gpu_visible():
        raise ConfigError(
            "run.device",
            "found cuda, but no GPU is visible; use auto or cpu, or --elsewhere to check for another machine",
        )
    sizing = given.data.train is None
    checked = check_without_data if sizing else check_machine
    resolved = resolve(given, layout, None if elsewhere else checked(given))
    ranks = per_pipeline_rank(resolved)
    sizes = degrees(layout)
    if as_json:
        tree = {"config": resolved.config.model_dump(mode="json", by_alias=True)} if complete else {}
        facts = {"ok": True, "world": layout.world, "degrees": sizes, "summary": summary(resolved, ranks)}
        print_json(facts | tree)
        return
    shape = " x ".join(f"{axis} {degree}" for axis, degree in sizes.items())
    click.echo(f"{path}: valid for {layout.world} rank(s){': ' if shape else ''}{shape}")
    click.echo("\n".join(summary_lines(given, resolved, ranks)))
    if sizing:
        click.echo(NO_DATA)
    if complete:
        click.echo("\n" + dump_config(resolved.config), nl=False)


@config.command("presets")
@json_option
def presets_command(as_json: bool) -> None:
    """List the published models that model.preset names."""
    from rich.console import Console
    from rich.table import Table

    from hexad.planning.costs import preset_table
    from hexad.show.summary import rounded

    rows = preset_table()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    for name in ("parameters", "layers", "hidden", "heads", "kv heads", "vocabulary", "context"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        numbers = (row.layers, row.hidden, row.heads, row.kv_heads, row.vocab, row.context)
        cells = [f"{number:,}" if number is not None else "" for number in numbers]
        table.add_row(row.name, rounded(row.parameters), *cells)
    Console(highlight=False, width=max(90, get_terminal_size().columns)).print(table)


@config.command("from-deepspeed")
@click.argument("path", metavar="ds_config.json")
@overrides_argument
@click.option("--world", type=click.IntRange(1), default=1, show_default=True, help="Data ranks.")
@click.option("--lenient", is_flag=True, help="Warn about unknown keys instead of refusing them.")
@json_option
def from_deepspeed(path: str, overrides: tuple[str, ...], world: int, lenient: bool, as_json: bool) -> None:
    """Print the run.yaml that is equivalent to a DeepSpeed configuration.

    KEY=VALUE sets keys of DeepSpeed. "auto" is replaced by the default of transformers' Trainer. What is
    different in Hexad, and keys without effect, are listed in comments.
    """
    import yaml

    from hexad.compat.deepspeed.config import Trainer, read_config, read_json, set_key, with_autos_filled
    from hexad.compat.deepspeed.translate import run_settings

    tree = read_json(path)
    for override in overrides:
        set_key(tree, override)
    tree, filled = with_autos_filled(tree, Trainer(), world)
    translation = run_settings(read_config(tree, world, strict=not lenient), strict=not lenient)
    load_config(translation.tree)
    notes = [*filled, *translation.notes]
    if as_json:
        print_json({"config": translation.tree, "notes": notes})
        return
    click.echo(f"# From {path}, for {world} data rank(s). Add model, data and run.steps.")
    click.echo("".join(f"# {note}\n" for note in notes), nl=False)
    click.echo(yaml.safe_dump(translation.tree, sort_keys=False, width=110), nl=False)


@config.command("init")
@click.argument("path", metavar="[run.yaml]", default="run.yaml")
@overrides_argument
@click.option("--preset", metavar="NAME", help="A published model; see 'hexad config presets'.")
@click.option("--data", metavar="PREFIX", help="Training data, as 'hexad data build' wrote it.")
@click.option("--validation", metavar="PREFIX", help="Validation data; turns evaluation on.")
@click.option("--tokenizer", metavar="byte|PATH", help="The tokenizer that built the data. [default: byte]")
@click.option("--nproc", type=click.IntRange(1), help="Ranks. [default: as few as the degrees allow]")
@json_option
def init(
    path: str,
    overrides: tuple[str, ...],
    preset: str | None,
    data: str | None,
    validation: str | None,
    tokenizer: str | None,
    nproc: int | None,
    as_json: bool,
) -> None:
    """Write a first configuration, commented; further settings as in parallel.tensor=2.

    An existing file is never overwritten.
    """
    from .config_init import first_run, write_new

    if "=" in path:
        path, overrides = "run.yaml", (path, *overrides)
    text, config = first_run(preset, data, validation, tokenizer, nproc, overrides)
    write_new(Path(path), text)
    if as_json:
        print_json({"path": path, "config": config.model_dump(mode="json", by_alias=True)})
        return
    check, start = (f" --{option} {nproc}" if nproc else "" for option in ("world", "nproc"))
    name = quote(path)
    click.echo(f"wrote {path}; next: hexad config check {name}{check}, then hexad train {name}{start}")
    if config.data.train is None:
        click.echo(NO_DATA)
