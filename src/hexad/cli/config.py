"""``hexad config``: the complete configuration, and whether it would be accepted."""

from __future__ import annotations

import click

from hexad.config import dump_config
from hexad.model.configuration import load_config

from .options import degrees, json_option, overrides_argument, print_json


@click.group("config")
def config() -> None:
    """Show and check configurations."""


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
@json_option
def check(path: str, overrides: tuple[str, ...], world: int | None, as_json: bool) -> None:
    """Check a configuration as 'hexad train' would before starting."""
    from hexad.resolve import resolve, smallest_world
    from hexad.topology.layout import Layout

    given = load_config(path, overrides)
    layout = Layout.from_settings(given.parallel, world or smallest_world(given))
    resolve(given, layout)
    sizes = degrees(layout)
    if as_json:
        print_json({"ok": True, "world": layout.world, "degrees": sizes})
    else:
        shape = " x ".join(f"{axis} {degree}" for axis, degree in sizes.items())
        click.echo(f"{path}: valid for {layout.world} rank(s){': ' if shape else ''}{shape}")
