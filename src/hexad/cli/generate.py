"""``hexad generate``: continue prompts with a run's, checkpoint's or published model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hexad.config import ConfigError, HexadError, json_text
from hexad.generation.sampling import CHOICE_SETTINGS, MOST_LOGPROBS, Sampling, settings

from .options import (
    Command,
    exact_option,
    exactly,
    json_option,
    nproc_option,
    option,
    overrides_argument,
    run_ranks,
)

if TYPE_CHECKING:
    from hexad.generation.generator import Generator
    from hexad.generation.texts import Continuation

_CHECKED = 1000
"""Prompts of a file that are checked before ranks are started."""
_NO_PROMPT = "found none; give --prompt TEXT or --prompts FILE.jsonl"
_COUNT = click.IntRange(1, 2**20)
_TOP = click.IntRange(0, MOST_LOGPROBS)


def _setting_option(name: str, **parameters: Any) -> Callable[[Command], Command]:
    """The option for a setting of :class:`Sampling`, from its declaration.

    Args:
        name: of the setting.
        parameters: of :func:`click.option`, where the command line spells the setting in another way.
    """
    kind, setting = settings()[name]
    default = getattr(Sampling(), name)
    if kind is bool:
        parameters["is_flag"] = True
    elif kind in (int, float):
        parameters = {"type": kind, "default": default, "show_default": True, **parameters}
    meaning = setting.meaning[0].upper() + setting.meaning[1:]
    repeated = "; may be repeated" if parameters.get("multiple") else ""
    return click.option(option(name), help=f"{meaning}{repeated}.", **parameters)


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
@_setting_option("tokens", type=_COUNT)
@_setting_option("stop", multiple=True, metavar="TEXT")
@_setting_option("samples", type=_COUNT)
@_setting_option("temperature")
@_setting_option("top_k")
@_setting_option("top_p")
@_setting_option("min_p")
@_setting_option("repetition_penalty")
@_setting_option("presence_penalty")
@_setting_option("frequency_penalty")
@_setting_option("logit_bias", multiple=True, metavar="ID=NUMBER")
@_setting_option("seed")
@click.option("--logprobs", is_flag=True, help="Write the log-probability of each new token.")
@click.option("--prompt-logprobs", is_flag=True, help="Write those of the prompt's tokens but the first.")
@click.option("--top-logprobs", type=_TOP, default=0, help="Beside each, so many of the most likely tokens.")
@_setting_option("routing")
@_setting_option("schema", metavar="FILE.json")
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
    from hexad.generation.texts import sampling_of_prompt
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
        sampling = _sampling(request)
        encoder = PromptEncoder(saved, saved.tokenizer())
        number = 0
        for number, entry in enumerate(_prompts(request), 1):
            if number <= _CHECKED:
                sampling_of_prompt(sampling, entry, f"prompt {number}")
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


def _sampling(request: dict[str, Any]) -> Sampling:
    from hexad.generation.sampling import restricted_with_temperature

    names = {*CHOICE_SETTINGS, "tokens", "samples", "schema", "routing"}
    values: dict[str, Any] = {name: request[name] for name in names}
    values["logit_bias"] = tuple(map(_bias, request["logit_bias"]))
    top = request["top_logprobs"]
    if top and not (request["logprobs"] or request["prompt_logprobs"]):
        raise ConfigError("--top-logprobs", f"found {top} without --logprobs or --prompt-logprobs; add one")
    for name in ("logprobs", "prompt_logprobs"):
        values[name] = top if request[name] else None
    return restricted_with_temperature(Sampling(**values, stop=tuple(request["stop"])))


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError("--logit-bias", f"found '{text}', expected ID=NUMBER, as in 42=-1.5") from None


def generate_here(request: dict[str, Any]) -> None:
    """Run one rank of the generation; the first prints the texts."""
    from hexad.generation.generator import Generator
    from hexad.planning.saved_model import generating_model

    saved = generating_model(request["checkpoint"], request["overrides"], request["nproc"])
    with Generator(saved) as generator:
        generator.warn = lambda message: click.echo(f"warning: {message}", err=True)
        write = _write if request["output"] is not None else _print
        generator.shared(lambda: write(request, generator, _sampling(request)))


def _print(request: dict[str, Any], generator: Generator, sampling: Sampling) -> None:
    """Print each text as soon as those before it are complete; with ``--json`` all in one document."""
    from hexad.generation.files import row
    from hexad.generation.texts import sampling_of_prompt

    lines = request["file"] is not None
    several = lines or len(request["prompts"]) * request["samples"] > 1
    documents = []
    texts = generator.written(generator.requests(_prompts(request), sampling))
    for entry, text in _in_order(texts, sampling):
        document = row(entry, text, sampling_of_prompt(sampling, entry))
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
    texts: Iterable[tuple[Mapping[str, Any], Continuation]], sampling: Sampling
) -> Iterator[tuple[Mapping[str, Any], Continuation]]:
    """Prompts with their texts, in the order of the prompts; what ends before its turn is kept."""
    from hexad.generation.texts import sampling_of_prompt

    kept: dict[tuple[int, int], tuple[Mapping[str, Any], Continuation]] = {}
    following = 0, 0
    for entry, text in texts:
        kept[text.number, text.sample] = entry, text
        while following in kept:
            prompt, text = kept.pop(following)
            yield prompt, text
            number, sample = following
            last = sample + 1 == sampling_of_prompt(sampling, prompt).samples
            following = (number + 1, 0) if last else (number, sample + 1)


def _write(request: dict[str, Any], generator: Generator, sampling: Sampling) -> None:
    """Write texts to the file as they end."""
    from hexad.generation.files import TextFile, digest, row
    from hexad.generation.texts import sampling_of_prompt

    from .progress import TokenProgress

    source = request["checkpoint"]
    # Settings of layout and cache change no text.
    settings = [text for text in request["overrides"] if not text.startswith(("parallel.", "inference."))]
    model = json.dumps([source if source.startswith("hf:") else str(Path(source).resolve()), *settings])
    digests = {
        digest(number, prompt, sample, model, sampling)
        for number, prompt in enumerate(_prompts(request))
        for sample in range(sampling_of_prompt(sampling, prompt).samples)
    }
    with (
        TextFile(request["output"]) as file,
        TokenProgress("texts", len(digests), len(file.known)) as progress,
    ):
        file.check(digests)
        done = frozenset(file.known)
        missing = (
            entry
            for entry in generator.requests(_prompts(request), sampling)
            if digest(entry[0], entry[1], entry[2].sample, model, sampling) not in done
        )
        for prompt, text in generator.written(missing):
            document = row(prompt, text, sampling_of_prompt(sampling, prompt))
            file.add(document, digest(text.number, prompt, text.sample, model, sampling))
            progress.add(1, len(text.tokens))
    click.echo(progress.summary(request["output"]), err=True)
