"""``hexad plan validate``: predictions beside published measurements."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from .options import json_option, print_json

_WIDTH = 150
"""Columns of the table, on a terminal of any width."""


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE.jsonl...")
@json_option
def validate(files: tuple[str, ...], as_json: bool) -> None:
    """Predict published measurements, and print the errors by source.

    Each line of FILE is a JSON object: a model, GPUs, a layout and what was measured
    (docs/scoreboard.md). Rows that cannot be predicted are counted with the reason.
    """
    from hexad.planning.validation import read_rows, validate_rows

    result = validate_rows(row for file in files for row in read_rows(file))
    if as_json:
        print_json(result)
        return
    Console(highlight=False, width=_WIDTH).print(_table(result))
    reasons = result["overall"]["uncovered"]
    if reasons:
        click.echo("\nNot covered:")
        click.echo("\n".join(f"{count:6d}  {reason}" for reason, count in reasons.items()))


def _table(result: dict[str, Any]) -> Table:
    """Errors by source."""
    table = Table(box=None, header_style="bold")
    table.add_column("source", no_wrap=True)
    for name in ("rows", "time", "MAPE", "bias", "worst", "memory", "MAPE", "bias", "worst", "OOM"):
        table.add_column(name, justify="right")
    for score in [*result["sources"], {"source": "all", **result["overall"]}]:
        oom = score["oom"]
        table.add_row(
            score["source"],
            str(score["rows"]),
            *_errors(score["time"]),
            *_errors(score["memory"]),
            f"{oom['right']} of {oom['rows']}" if oom["rows"] else "",
        )
    return table


def _errors(errors: dict[str, Any]) -> tuple[str, ...]:
    """Cells of a table: how many rows, and percentages."""
    if not errors["covered"]:
        return "", "", "", ""
    percent = f"{errors['mape']:.1%}", f"{errors['bias']:+.1%}", f"{errors['worst']:+.1%}"
    return (str(errors["covered"]), *percent)
