"""``hexad generate``: continue prompts with a run's, checkpoint's or published model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from hexad.config import ConfigError, HexadError, one_line
from hexad.config.files import readable

from .options import json_option, nproc_option, overrides_argument, run_ranks

if TYPE_CHECKING:
    from hexad.generation.texts import Continuation, Wanted


@click.command("generate")
@click.argument("source", metavar="RUN|CHECKPOINT|hf:DIR")
@overrides_argument
@click.option("--prompt", "prompt", multiple=True, help="Text to continue; may be repeated.")
@click.option(
    "--prompts",
    "file",
    metavar="FILE.jsonl",
    help='Prompts, a line each: {"prompt": ...} or {"messages": [...]}; "-": stdin. Prints the same lines '
    "with what was written.",
)
@click.option(
    "--tokens", type=click.IntRange(1, 2**20), default=128, show_default=True, help="New tokens at most."
)
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End before this text; several with several options."
)
@click.option(
    "--samples", type=click.IntRange(1, 2**20), default=1, show_default=True, help="Texts for each prompt."
)
@click.option(
    "--batch", type=click.IntRange(1, 2**20), default=16, show_default=True, help="Texts written at once."
)
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0 selects the most likely token."
)
@click.option(
    "--top-k", type=int, default=0, show_default=True, help="Sample the k most likely only; 0: all."
)
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Sample the most likely up to this sum only."
)
@click.option("--seed", type=int, default=1234, show_default=True, help="Seed of sampling.")
@nproc_option("tensor")
@json_option
def generate(source: str, nproc: int, prompt: tuple[str, ...], file: str | None, **options: Any) -> int:
    """Continue prompts. KEY=VALUE overrides the checkpoint's settings, as in precision.dtype=fp32.

    The model is sharded over --nproc tensor-parallel ranks; with parallel.pipeline=2 over half as many in
    each of two stages. With parallel.context=2 it is sharded over half as many, and two of each process the
    prompts in parallel. Every layout writes the same text.
    """
    from hexad.launching.environment import environment
    from hexad.planning.saved_model import encoded, find_model, generating_model

    nproc = environment().world if environment().joined else nproc
    request = {**options, "checkpoint": find_model(source), "nproc": nproc}
    request["prompts"] = [{"prompt": text} for text in prompt] + list(_read_prompts(file))
    request["lines"] = file is not None
    if not request["prompts"]:
        raise ConfigError("--prompt", "found none; give --prompt TEXT or --prompts FILE.jsonl")
    # Refuse what is wrong before any rank is started.
    model = generating_model(request["checkpoint"], request["overrides"], nproc)
    _wanted(request)
    encoded(request["prompts"], model.config, model.tokenizer())
    return run_ranks("generate", request, nproc)


def _read_prompts(file: str | None) -> Iterator[dict[str, Any]]:
    """The lines of ``--prompts``."""
    if file is None:
        return
    name = "stdin" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else readable(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HexadError(f"--prompts: {name}: cannot be read: {one_line(error)}") from None
    for number, line in enumerate(text.split("\n"), 1):  # other separators may stand inside a JSON string
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise HexadError(f"--prompts: {name}:{number}: not JSON: {error}") from None
        given = [key for key in ("prompt", "messages") if isinstance(entry, dict) and key in entry]
        if len(given) != 1 or not isinstance(entry[given[0]], str if given == ["prompt"] else list):
            raise HexadError(
                f'--prompts: {name}:{number}: expected an object with "prompt", a text, or "messages", a list'
            )
        yield entry


def _wanted(request: dict[str, Any]) -> Wanted:
    from hexad.generation.generator import asked_sampling
    from hexad.generation.texts import Wanted

    sampling = asked_sampling(request["temperature"], request["top_k"], request["top_p"], request["seed"])
    return Wanted(request["tokens"], sampling, request["samples"], tuple(request["stop"]), request["batch"])


def generate_here(request: dict[str, Any]) -> None:
    """Be one rank of the generation; the first prints the texts."""
    from hexad.generation.texts import generated
    from hexad.launching.launch import launch
    from hexad.planning.saved_model import generating_model

    saved = generating_model(request["checkpoint"], request["overrides"], request["nproc"])
    with launch(saved.config) as run:
        warn = lambda message: click.echo(f"warning: {message}", err=True)  # noqa: E731
        texts = generated(run.mesh, run.resolved, saved, request["prompts"], _wanted(request), warn)
        if run.mesh.rank == 0:
            _print(request, texts)
        else:
            list(texts)


def _print(request: dict[str, Any], texts: Iterable[Continuation]) -> None:
    """Print each text as soon as its batch is complete; with ``--json`` all in one document."""
    several = request["lines"] or len(request["prompts"]) * request["samples"] > 1
    documents = []
    for text in texts:
        entry = request["prompts"][text.number]
        document = {**entry, "text": text.text, "tokens": text.tokens, "ended": text.ended}
        if request["samples"] > 1:
            document["sample"] = text.sample
        if request["as_json"]:
            documents.append(document)
        elif request["lines"]:
            click.echo(json.dumps(document, ensure_ascii=False))
        else:
            if several and (text.number or text.sample):
                click.echo("---")
            click.echo(entry["prompt"] + text.text)
    if request["as_json"]:
        alone = {} if several else documents[0]  # its keys are outside too
        click.echo(json.dumps({**alone, "results": documents}))
