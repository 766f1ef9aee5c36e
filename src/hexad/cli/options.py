"""Options and output that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from hexad.topology.layout import Layout

Command = TypeVar("Command", bound=Callable[..., Any])

overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def nproc_option(axis: str) -> Callable[[Command], Command]:
    """``--nproc`` of commands that start one rank by default and divide more along ``axis``."""
    return click.option(
        "--nproc",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help=f"Ranks: {axis}-parallel unless overridden.",
    )


def split_settings(command: str, settings: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """(path of a configuration or run, if given; ``KEY=VALUE`` overrides) of a command's arguments.

    Raises:
        HexadError: there are several paths.
    """
    from hexad.config import HexadError

    paths = [text for text in settings if "=" not in text]
    if len(paths) > 1:
        raise HexadError(f"{command}: found several paths ({', '.join(paths)}); give one")
    return next(iter(paths), None), [text for text in settings if "=" in text]


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document))


def degrees(layout: Layout) -> dict[str, int]:
    """The axes of degree above 1, in the usual order."""
    names = ("tensor", "context", "pipeline", "data", "expert")
    return {name: layout.degrees[name] for name in names if layout.degrees[name] > 1}


def start_local(command: str, arguments: list[str], ranks: int, restarts: int = 0) -> int:
    """Run a command of :mod:`hexad.cli.worker` on local ranks, restarted up to ``restarts`` times if they
    fail; returns the exit status."""
    from hexad.launching.local import run_local

    from .messages import fail

    outcome = run_local([command, *arguments], ranks, restarts)
    return fail(outcome.message, status=outcome.status) if outcome.message else outcome.status
