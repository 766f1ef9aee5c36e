"""``hexad data``: build and inspect token files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .options import json_option, print_json

if TYPE_CHECKING:
    from hexad.dataset.build import BuildSummary


class _ManyInputs(click.Command):
    """Lets ``--input`` accept several values, as in ``--input a b c``, which click's options cannot."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        taking = False
        for arg in args:
            if arg.startswith("-") and arg != "-":
                taking = arg == "--input"
                if not taking:
                    spread.append(arg)
                continue
            if taking:
                spread += ["--input", arg]
            else:
                spread.append(arg)
        return super().parse_args(ctx, spread)


@click.group("data")
def data() -> None:
    """Build and inspect token files."""


@data.command("build", cls=_ManyInputs)
@click.option(
    "--input",
    "inputs",
    metavar="PATH...",
    multiple=True,
    required=True,
    help="Files or directories: .jsonl, .parquet, or text (one document per file).",
)
@click.option("--output", "prefix", metavar="PREFIX", required=True, help="Writes PREFIX.bin and PREFIX.idx.")
@click.option(
    "--tokenizer",
    metavar="byte|PATH",
    required=True,
    help="byte, or a Hugging Face, SentencePiece or tiktoken file or directory.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Tokenizing processes. Default: one per usable core."
)
@click.option(
    "--json-key", default="text", show_default=True, help="Key (.jsonl) or column (.parquet) of the text."
)
@click.option("--no-eod", is_flag=True, help="Do not end documents with the end-of-document token.")
@click.option("--no-bos", is_flag=True, help="Do not begin documents as the tokenizer says (data.bos: no).")
@json_option
def build_command(
    inputs: tuple[str, ...],
    prefix: str,
    tokenizer: str,
    workers: int | None,
    json_key: str,
    no_eod: bool,
    no_bos: bool,
    as_json: bool,
) -> None:
    """Tokenize text into a Megatron .bin/.idx dataset."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from hexad.dataset.build import build

    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("tokenizing", total=None)
        summary = build(
            inputs,
            prefix,
            tokenizer,
            workers=workers,
            json_key=json_key,
            append_eod=not no_eod,
            prepend_bos=not no_bos,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json(asdict(summary))
    else:
        click.echo(_sentence(summary))


def _sentence(summary: BuildSummary) -> str:
    skipped = f"; {summary.skipped:,} without text were skipped" if summary.skipped else ""
    return (
        f"{summary.prefix}.bin and .idx: {summary.documents:,} documents, {summary.tokens:,} tokens "
        f"({summary.dtype}, vocabulary {summary.vocab:,}) from {summary.bytes_read:,} bytes{skipped}"
    )


@data.command("inspect")
@click.argument("prefix")
@click.option("--tokenizer", metavar="byte|PATH", help="To decode the first tokens. Default: what built it.")
@click.option("--first", default=32, show_default=True, type=click.IntRange(min=0), help="Tokens to show.")
@json_option
def inspect_command(prefix: str, tokenizer: str | None, first: int, as_json: bool) -> None:
    """Show what a .bin/.idx dataset holds."""
    from hexad.dataset.inspect import inspect

    facts = inspect(prefix, tokenizer=tokenizer, first=first)
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        click.echo(f"{name.replace('_', ' '):<14}{_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:,}" for name, number in value.items())
    if isinstance(value, bool) or value is None:
        return "unknown" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else (repr(value) if "\n" in str(value) else str(value))
