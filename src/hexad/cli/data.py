"""``hexad data``: build, inspect and verify token files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .options import answer, json_option, progress_bar

if TYPE_CHECKING:
    from hexad.dataset.build.builder import BuildSummary
    from hexad.dataset.built import Verified


class ManyValues(click.Command):
    """Lets some options accept several values, as in ``--input a b c``, which click's options cannot."""

    MANY: tuple[str, ...] = ("--input", "--include", "--exclude", "--special-token")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        taking = waiting = ""
        for arg in args:
            if arg.startswith("-") and arg != "-":
                self._refuse(waiting, ctx)
                taking = waiting = arg if arg in self.MANY else ""
                if not taking:
                    spread.append(arg)
                continue
            if taking and self.takes(arg):
                waiting = ""
                spread.append(taking)
            spread.append(arg)
        self._refuse(waiting, ctx)
        return super().parse_args(ctx, spread)

    @staticmethod
    def _refuse(option: str, ctx: click.Context) -> None:
        """Refuse an option without a value."""
        if option:
            raise click.BadOptionUsage(option, f"Option '{option}' requires an argument.", ctx)

    def takes(self, value: str) -> bool:
        """Whether a value belongs to the option before it."""
        return True


@click.group("data")
def data() -> None:
    """Build, inspect and verify token files."""


_INPUTS = (
    click.option(
        "--input",
        "inputs",
        metavar="PATH...",
        multiple=True,
        required=True,
        help="Files or directories: .jsonl or .ndjson, .parquet, or text (one document per file); a .json "
        "that is named is an array of records. All but .parquet also as .gz, .bz2, .xz, .zst.",
    ),
    click.option(
        "--include",
        metavar="GLOB...",
        multiple=True,
        help="Read only files that match, as in --include '*.md'.",
    ),
    click.option("--exclude", metavar="GLOB...", multiple=True, help="Leave out files that match."),
    click.option(
        "--json-key",
        metavar="KEY",
        help="Key (.jsonl, .json) or column (.parquet) of the text or conversation. Default: text, "
        "messages, or prompt and completion.",
    ),
)


def input_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that read data."""
    for option in reversed(_INPUTS):
        function = option(function)
    return function


@data.command("build", cls=ManyValues)
@input_options
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
@click.option("--chat-template", metavar="FILE", help="Of conversations. Default: the tokenizer's own.")
@click.option("--no-eod", is_flag=True, help="Do not end documents with the end-of-document token.")
@click.option("--no-bos", is_flag=True, help="Do not begin documents as the tokenizer says (data.bos: no).")
@json_option
def build_command(
    inputs: tuple[str, ...],
    prefix: str,
    tokenizer: str,
    workers: int | None,
    json_key: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    chat_template: str | None,
    no_eod: bool,
    no_bos: bool,
    as_json: bool,
) -> None:
    """Tokenize text, conversations or prompts with completions into a Megatron .bin/.idx dataset.

    Conversations and completions have a loss mask beside it (PREFIX.mask): answers are trained, the rest is
    not.
    """
    from hexad.dataset.build.builder import build

    with progress_bar() as bar:
        task = bar.add_task("tokenizing", total=None)
        summary = build(
            inputs,
            prefix,
            tokenizer,
            workers=workers,
            json_key=json_key,
            chat_template=chat_template,
            include=include,
            exclude=exclude,
            append_eod=not no_eod,
            prepend_bos=not no_bos,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    answer(as_json, asdict(summary), _sentence(summary))


def _sentence(summary: BuildSummary) -> str:
    from hexad.config import counted
    from hexad.dataset.build.inputs import listed

    names = {"empty": "without text", "binary": "binary", "not UTF-8": "not UTF-8"}
    counts = ", ".join(
        f"{summary.skipped_kinds[k]:,} {n}" for k, n in names.items() if k in summary.skipped_kinds
    )
    skipped = f"; skipped: {counts}" if counts else ""
    left_out = f"; {counted(summary.left_out, 'file')} left out by pattern" if summary.left_out else ""
    left_out += f"; {summary.hidden:,} hidden" if summary.hidden else ""
    left_out += f"; not read: {listed(summary.unread)}" if summary.unread else ""
    trained = ""
    if summary.trained is not None:
        part = summary.trained / summary.tokens
        trained = f", of which {summary.trained:,} ({part:.0%}) are trained ({summary.prefix}.mask)"
    documents = counted(summary.documents, "document")
    return (
        f"{summary.prefix}.bin and .idx: {documents}, {summary.tokens:,} tokens{trained} "
        f"({summary.dtype}, vocabulary {summary.vocab:,}) from {summary.bytes_read:,} bytes"
        f"{skipped}{left_out}"
    )


@data.command("inspect")
@click.argument("prefix")
@click.option("--tokenizer", metavar="byte|PATH", help="To decode the first tokens. Default: what built it.")
@click.option(
    "--sequence",
    type=click.IntRange(1, 2**24),
    metavar="TOKENS",
    help="Show how whole documents fill samples of this length (data.packing).",
)
@click.option("--first", default=32, show_default=True, type=click.IntRange(min=0), help="Tokens to show.")
@json_option
def inspect_command(
    prefix: str, tokenizer: str | None, sequence: int | None, first: int, as_json: bool
) -> None:
    """Show what a .bin/.idx dataset holds."""
    from hexad.dataset.build.builder import inspect

    facts = inspect(prefix, tokenizer=tokenizer, first=first, sequence=sequence)
    answer(as_json, facts, *(f"{name.replace('_', ' '):<14}{_shown(value)}" for name, value in facts.items()))


@data.command("verify")
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
@json_option
def verify_command(prefixes: tuple[str, ...], as_json: bool) -> None:
    """Read .bin/.idx datasets and compare all their files with the checksums made when they were written.

    Exit status 2 if anything is damaged. Datasets of other tools have no checksums: their files are compared
    with each other only.
    """
    from hexad.config import HexadError, counted
    from hexad.dataset.built import verify

    results = {prefix: verify(prefix) for prefix in prefixes}
    damaged = [prefix for prefix, result in results.items() if result.problems]
    tree = {prefix: asdict(result) for prefix, result in results.items()}
    lines = (line for prefix, result in results.items() for line in _verified(prefix, result))
    answer(as_json, {"damaged": bool(damaged), "results": tree}, *lines)
    if damaged:
        first, *others = (problem for prefix in damaged for problem in results[prefix].problems)
        raise HexadError(
            f"data verify: {first}" + (f"; {counted(len(others), 'problem')} more" if others else "")
        )


def _verified(prefix: str, result: Verified) -> list[str]:
    from hexad.config import counted

    if result.problems:
        return result.problems
    what = f"{prefix}: {counted(result.files, 'file')}, {result.size / 2**20:,.1f} MiB"
    if result.checksums:
        return [f"{what}: intact, all checksums match"]
    return [
        f"{what}: consistent, but there are no checksums (written by another tool or an earlier version): a "
        "changed token cannot be detected; datasets that 'hexad data build' writes have them"
    ]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in value.items())
    if isinstance(value, bool) or value is None:
        return "unknown" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else (repr(value) if "\n" in str(value) else str(value))
