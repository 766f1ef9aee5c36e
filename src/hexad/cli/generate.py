"""``hexad generate``: continue prompts with a run's, checkpoint's or published model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hexad.config import ConfigError, HexadError, json_text
from hexad.generation.requests import MOST_LOGPROBS

from .options import exact_option, exactly, json_option, nproc_option, overrides_argument, run_ranks

if TYPE_CHECKING:
    from hexad.generation.generator import Generator
    from hexad.generation.texts import Continuation, Wanted

_CHECKED = 1000
"""Prompts of a file that are checked before ranks are started."""
_NO_PROMPT = "found none; give --prompt TEXT or --prompts FILE.jsonl"
_COUNT = click.IntRange(1, 2**20)
_TOP = click.IntRange(0, MOST_LOGPROBS)


@click.command("generate")
@click.argument("source", metavar="RUN|CHECKPOINT|hf:DIR")
@overrides_argument
@click.option("--prompt", "prompt", multiple=True, help="Text to continue; may be repeated.")
@click.option(
    "--prompts",
    "file",
    metavar="FILE.jsonl",
    help='Prompts, a line each: {"prompt": text or ids} or {"messages": [...]}; "-": stdin. Prints the same '
    "lines with what was written.",
)
@click.option(
    "--output",
    metavar="OUT.jsonl",
    help="Write the lines to this file as they end; a generation that was interrupted is continued.",
)
@click.option("--tokens", type=_COUNT, default=128, show_default=True, help="New tokens at most.")
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End before this text; several with several options."
)
@click.option("--samples", type=_COUNT, default=1, show_default=True, help="Texts for each prompt.")
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0 selects the most likely token."
)
@click.option(
    "--top-k", type=int, default=0, show_default=True, help="Sample the k most likely only; 0: all."
)
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Sample the most likely up to this sum only."
)
@click.option(
    "--min-p",
    type=float,
    default=0.0,
    show_default=True,
    help="Sample those with this part of the largest probability only.",
)
@click.option(
    "--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1: repeat tokens less."
)
@click.option(
    "--presence-penalty",
    type=float,
    default=0.0,
    show_default=True,
    help="Subtracted from logits of tokens in the new text.",
)
@click.option(
    "--frequency-penalty",
    type=float,
    default=0.0,
    show_default=True,
    help="Subtracted as often as they occur.",
)
@click.option("--logit-bias", multiple=True, metavar="ID=NUMBER", help="Added to the logit of a token.")
@click.option("--seed", type=int, default=1234, show_default=True, help="Seed of sampling.")
@click.option("--logprobs", is_flag=True, help="Write the log-probability of each new token.")
@click.option("--prompt-logprobs", is_flag=True, help="Write those of the prompt's tokens but the first.")
@click.option("--top-logprobs", type=_TOP, default=0, help="Beside each, so many of the most likely tokens.")
@click.option("--routing", is_flag=True, help="Write the experts of all tokens but the last.")
@click.option("--schema", metavar="FILE.json", help="Write JSON of this schema only.")
@exact_option
@nproc_option("tensor")
@json_option
def generate(
    source: str, nproc: int, prompt: tuple[str, ...], file: str | None, exact: bool, **options: Any
) -> int:
    """Continue prompts. KEY=VALUE overrides the checkpoint's settings, as in precision.dtype=fp32.

    The model is sharded over --nproc tensor-parallel ranks; with parallel.pipeline=2 over half as many in
    each of two stages. With parallel.context=2 it is sharded over half as many, and two of each process the
    prompts in parallel; with parallel.data=2 there are two replicas. Every layout writes the same text.
    """
    from hexad.generation.prompts import PromptEncoder
    from hexad.launching.environment import environment
    from hexad.planning.saved_model import find_model, generating_model

    nproc = environment().world if environment().joined else nproc
    request = {**options, "checkpoint": find_model(source), "nproc": nproc, "file": file}
    request["overrides"] = exactly(options["overrides"], exact)
    request["prompts"] = [{"prompt": text} for text in prompt]
    request["schema"] = _schema(options["schema"])
    if options["output"] is not None and options["as_json"]:
        raise HexadError("--output: found --json beside it, which prints the texts; give one of them")
    if not (prompt or file):
        raise ConfigError("--prompt", _NO_PROMPT)
    from_stdin = file == "-"
    with _kept(request) if from_stdin else nullcontext():
        # Refuse what is wrong before any rank is started.
        saved = generating_model(request["checkpoint"], request["overrides"], nproc)
        wanted = _wanted(request)
        encoder = PromptEncoder(saved, saved.tokenizer())
        number = 0
        for number, entry in enumerate(_prompts(request), 1):
            if number <= _CHECKED:
                wanted.of_prompt(entry, f"prompt {number}")
                encoder.ids(entry, f"prompt {number}")
        if not number:
            raise ConfigError("--prompts", f"{'stdin' if from_stdin else file}: found no lines with prompts")
        return run_ranks("generate", request, nproc)


def _kept(request: dict[str, Any]) -> Any:
    """Keep the prompts of stdin in a file, which is read several times. On Linux it has no name of its own,
    so that nothing remains of it if this process is killed."""
    from hexad.generation.files import read_prompts

    kept: Any = tempfile.TemporaryFile("w", encoding="utf-8")  # noqa: SIM115 (the caller's)
    name = f"/proc/{os.getpid()}/fd/{kept.fileno()}"
    if not os.path.exists(name):
        kept = tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8")  # noqa: SIM115
        name = kept.name
    for entry in read_prompts("-"):
        kept.write(json.dumps(entry) + "\n")
    kept.flush()
    request["file"] = name
    return kept


def _prompts(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All prompts, in their order."""
    from hexad.generation.files import read_prompts

    yield from request["prompts"]
    if request["file"] is not None:
        yield from read_prompts(request["file"])


def _schema(file: str | None) -> str | None:
    from hexad.config.files import readable
    from hexad.generation.grammars import schema_text

    if file is None:
        return None
    try:
        return schema_text(readable(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise HexadError(f"--schema: {file}: cannot be read: {error}") from None


def _wanted(request: dict[str, Any]) -> Wanted:
    from hexad.generation.requests import Sampling, asked_sampling
    from hexad.generation.texts import Wanted

    names = "temperature", "top_k", "top_p", "seed", "min_p"
    penalties = "repetition_penalty", "presence_penalty", "frequency_penalty"
    values = {name: request[name] for name in (*names, *penalties)}
    sampling = asked_sampling(Sampling(**values, logit_bias=tuple(map(_bias, request["logit_bias"]))))
    top = request["top_logprobs"]
    if top and not (request["logprobs"] or request["prompt_logprobs"]):
        raise ConfigError("--top-logprobs", f"found {top} without --logprobs or --prompt-logprobs; add one")
    return Wanted(
        request["tokens"],
        sampling,
        request["samples"],
        tuple(request["stop"]),
        top if request["logprobs"] else None,
        top if request["prompt_logprobs"] else None,
        request["schema"],
        routing=request["routing"],
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError("--logit-bias", f"found '{text}', expected ID=NUMBER, as in 42=-1.5") from None


def generate_here(request: dict[str, Any]) -> None:
    """Be one rank of the generation; the first prints the texts."""
    from hexad.generation.generator import Generator
    from hexad.planning.saved_model import generating_model

    saved = generating_model(request["checkpoint"], request["overrides"], request["nproc"])
    with Generator(saved) as generator:
        generator.warn = lambda message: click.echo(f"warning: {message}", err=True)
        write = _write if request["output"] is not None else _print
        generator.shared(lambda: write(request, generator, _wanted(request)))


def _print(request: dict[str, Any], generator: Generator, wanted: Wanted) -> None:
    """Print each text as soon as those before it are complete; with ``--json`` all in one document."""
    from hexad.generation.files import row

    lines = request["file"] is not None
    several = lines or len(request["prompts"]) * request["samples"] > 1
    documents = []
    texts = generator.written(generator.requests(_prompts(request), wanted))
    for entry, text in _in_order(texts, wanted):
        document = row(entry, text, wanted.of_prompt(entry))
        if request["as_json"]:
            documents.append(document)
        elif lines:
            click.echo(json_text(document, ensure_ascii=False))
        else:
            if several and (text.number or text.sample):
                click.echo("---")
            click.echo(entry["prompt"] + text.text)
    if request["as_json"]:
        alone = {} if several else documents[0]  # its keys are outside too
        click.echo(json_text({**alone, "results": documents}))


def _in_order(
    texts: Iterable[tuple[Mapping[str, Any], Continuation]], wanted: Wanted
) -> Iterator[tuple[Mapping[str, Any], Continuation]]:
    """Prompts with their texts, in the order of the prompts; what ends before its turn is kept."""
    kept: dict[tuple[int, int], tuple[Mapping[str, Any], Continuation]] = {}
    following = 0, 0
    for entry, text in texts:
        kept[text.number, text.sample] = entry, text
        while following in kept:
            prompt, text = kept.pop(following)
            yield prompt, text
            number, sample = following
            last = sample + 1 == wanted.of_prompt(prompt).samples
            following = (number + 1, 0) if last else (number, sample + 1)


def _write(request: dict[str, Any], generator: Generator, wanted: Wanted) -> None:
    """Write texts to the file as they end."""
    from hexad.generation.files import TextFile, digest, row

    from .progress import TokenProgress

    source = request["checkpoint"]
    # Settings of layout and cache change no text.
    settings = [text for text in request["overrides"] if not text.startswith(("parallel.", "inference."))]
    model = json.dumps([source if source.startswith("hf:") else str(Path(source).resolve()), *settings])
    digests = {
        digest(number, prompt, sample, model, wanted)
        for number, prompt in enumerate(_prompts(request))
        for sample in range(wanted.of_prompt(prompt).samples)
    }
    with (
        TextFile(request["output"]) as file,
        TokenProgress("texts", len(digests), len(file.known)) as progress,
    ):
        file.check(digests)
        done = frozenset(file.known)
        missing = (
            entry
            for entry in generator.requests(_prompts(request), wanted)
            if digest(entry[0], entry[1], entry[2].sample, model, wanted) not in done
        )
        for prompt, text in generator.written(missing):
            document = row(prompt, text, wanted.of_prompt(prompt))
            file.add(document, digest(text.number, prompt, text.sample, model, wanted))
            progress.add(1, len(text.tokens))
    click.echo(progress.summary(request["output"]), err=True)
