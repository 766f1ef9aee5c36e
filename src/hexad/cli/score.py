"""``hexad score``: log-probabilities of given tokens, by the training forward pass."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hexad.config import HexadError, json_text, one_line

from .options import exact_option, exactly, nproc_option, overrides_argument, run_ranks

if TYPE_CHECKING:
    from hexad.planning.saved_model import SavedModel

_ROWS = 4096
"""Sequences in one call at most, of however few tokens."""


@click.command("score")
@click.argument("source", metavar="RUN|CHECKPOINT|hf:DIR")
@overrides_argument
@click.option(
    "--input",
    "file",
    metavar="FILE.jsonl",
    required=True,
    help='Sequences, a line each: {"tokens": [ids]}; or lines that "hexad generate --output" has written.',
)
@click.option(
    "--output", metavar="OUT.jsonl", required=True, help="Write the lines with their logprobs here."
)
@exact_option
@nproc_option("data")
def score(source: str, nproc: int, exact: bool, **options: Any) -> int:
    """Compute the log-probability of every token but the first, given those before it, in nats, by the
    forward pass of training, in any layout. Of a line with a prompt, that of every token after the prompt.

    KEY=VALUE overrides the checkpoint's settings, as in parallel.tensor=2 or precision.dtype=fp32;
    data.sequence x batch.micro tokens are computed at a time.
    """
    from hexad.engine.scoring import beyond_positions
    from hexad.launching.environment import environment
    from hexad.planning.saved_model import find_model, scored_model

    ranks = environment().world if environment().joined else nproc
    request = {**options, "source": find_model(source), "ranks": ranks}
    request["overrides"] = exactly(options["overrides"], exact)
    # Refuse what is wrong before any rank is started.
    saved = scored_model(request["source"], request["overrides"], ranks)
    _check_files(request["file"], request["output"])
    lengths = [len(ids) for _, ids, _ in _sequences(request["file"], saved)]
    request["rows"] = len(lengths)
    if (warning := beyond_positions(max(lengths, default=1), saved.positions)) is not None:
        click.echo(f"warning: {warning}", err=True)
    return run_ranks("score", request, nproc)


def _partial(output: str) -> Path:
    """What is written until the output is complete, and then takes its name."""
    return Path(f"{output}.partial")


def _check_files(file: str, output: str) -> None:
    """See that the input can be read several times, and the output replaced.

    Raises:
        HexadError: they cannot, or are the same.
    """
    if Path(file).exists() and not Path(file).is_file():
        raise HexadError(
            f"--input: {file}: is no regular file, and lines are read more than once; give a file"
        )
    path = Path(output)
    if not path.parent.is_dir():
        raise HexadError(f"--output: {path.parent}: no such directory")
    if path.exists() and not path.is_file():
        raise HexadError(f"--output: {output}: is no regular file; give one, or a new name")
    for written in (path, _partial(output)):
        if written.exists() and Path(file).exists() and os.path.samefile(written, file):
            raise HexadError(f"--output: found {output}, which would overwrite the input; give another file")


Row = tuple[dict[str, Any], list[int], int]
"""A line, the ids of its sequence, and how many of them are its prompt's (0 without one)."""


def _sequences(file: str, saved: SavedModel) -> Iterator[Row]:
    """The lines of a file.

    Raises:
        HexadError: it cannot be read, or a line cannot be scored.
    """
    from hexad.config.files import readable
    from hexad.engine.scoring import check_sequence

    prompt_ids = _prompt_ids(saved)
    try:
        with readable(file).open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                name = f"--input: {file}:{number}"
                row = _parsed(line, name)
                prompt = prompt_ids(row, name)
                ids = [*prompt, *row["tokens"]]
                check_sequence(ids, name, int(saved.config.model.vocab), saved.most_positions)
                yield row, ids, len(prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise HexadError(f"--input: {file}: cannot be read: {one_line(error)}") from None


def _parsed(line: str, name: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HexadError(f"{name}: not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("tokens"), list):
        raise HexadError(
            f'{name}: found {line.strip():.100}, expected an object with "tokens", a list of ids'
        )
    return row


def _prompt_ids(saved: SavedModel) -> Callable[[Mapping[str, Any], str], tuple[int, ...]]:
    """The ids of a line's prompt, none of most."""
    from functools import cache

    from hexad.generation.prompts import PromptEncoder

    @cache  # a tokenizer is needed for texts only
    def encoder() -> PromptEncoder:
        return PromptEncoder(saved, saved.tokenizer())

    def ids(row: Mapping[str, Any], name: str) -> tuple[int, ...]:
        prompt = {key: row[key] for key in ("prompt", "messages") if key in row}
        return encoder().ids(prompt, name) if prompt else ()

    return ids


def score_here(request: dict[str, Any]) -> None:
    """Run one rank of the command; the first reads and writes."""
    from hexad.comm import from_first
    from hexad.dataset.files import exclusive
    from hexad.engine.scoring import Scorer
    from hexad.launching.launch import launch
    from hexad.planning.saved_model import scored_model

    from .progress import TokenProgress

    saved = scored_model(request["source"], request["overrides"], request["ranks"])
    with launch(saved.config) as run, ExitStack() as stack:
        world = run.mesh.world
        output = request["output"]
        lock = exclusive(Path(output), f"--output: {output}")
        from_first(lambda: stack.enter_context(lock), world)
        scorer = Scorer(run.resolved, run.mesh, saved.weights)
        rows = _sequences(request["file"], saved)
        partial, first = _partial(request["output"]), world.rank == 0
        with TokenProgress("sequences", request["rows"], shown=first) as progress:
            while wave := from_first(lambda: _wave(rows, scorer.wave), world):
                scores = scorer.scores([ids for _, ids, _ in wave])
                new = progress.done == 0
                from_first(lambda: _write(partial, wave, scores, new), world)  # noqa: B023 (called here)
                progress.add(len(wave), sum(len(ids) - 1 for _, ids, _ in wave))
        from_first(lambda: _finish(partial, request, progress.done), world)
    if first:
        click.echo(progress.summary(request["output"]), err=True)


def _wave(rows: Iterator[Row], most: int) -> list[Row]:
    """The next lines, with about so many tokens."""
    wave: list[Row] = []
    tokens = 0
    for row in islice(rows, _ROWS):
        wave.append(row)
        tokens += len(row[1])
        if tokens >= most:
            break
    return wave


def _write(path: Path, wave: list[Row], scores: list[list[float]], new: bool) -> None:
    try:
        with path.open("w" if new else "a", encoding="utf-8", errors="backslashreplace") as file:
            for (row, _, prompt), values in zip(wave, scores):
                line = {**row, "logprobs": values[prompt - 1 :] if prompt else values}
                if prompt and "prompt_logprobs" in row:
                    line["prompt_logprobs"] = values[: prompt - 1]
                file.write(json_text(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise HexadError(f"--output: {path}: cannot be written: {one_line(error)}") from None


def _finish(partial: Path, request: Mapping[str, Any], rows: int) -> None:
    """Put the complete file in its place."""
    output = request["output"]
    if rows != request["rows"]:
        raise HexadError(f"--input: {request['file']}: found {rows} lines, and {request['rows']} before")
    try:
        if not rows:
            partial.write_text("")
        os.replace(partial, output)
    except OSError as error:
        raise HexadError(f"--output: {output}: cannot be written: {one_line(error)}") from None
