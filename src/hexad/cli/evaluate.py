"""``hexad evaluate``: loss, perplexity and bits per byte of a run, a checkpoint or a published model."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from hexad.config import HexadError, did_you_mean, setting_names

from .data import ManyValues
from .options import json_option, nproc_option, overrides_argument, print_json, run_ranks


class _Evaluate(ManyValues):
    """``--data`` takes several values, up to the first setting; names and paths of data may have dots too."""

    MANY = ("--data",)

    def takes(self, value: str) -> bool:
        name, equals, _ = _parted(value)
        group, dot, _ = name.partition(".")
        return not (equals and dot and group in setting_names())


@click.command("evaluate", cls=_Evaluate)
@click.argument("source", metavar="RUN|CHECKPOINT|hf:DIR")
@overrides_argument
@click.option(
    "--data",
    "data",
    metavar="[NAME=]PREFIX...",
    multiple=True,
    help="Data sets (.bin/.idx prefixes). [default: the run's data.validation]",
)
@click.option(
    "--batches",
    type=click.IntRange(1, 10**9),
    help="Global batches of each set, as validate.batches. [default: all samples, each once; of a "
    "blend, until one of its members is used up]",
)
@nproc_option("data")
@json_option
def evaluate(source: str, nproc: int, **options: Any) -> int:
    """Evaluate a model on data sets, in any layout.

    KEY=VALUE overrides the checkpoint's settings, as in parallel.tensor=2, precision.dtype=fp32 or
    data.sequence=2048. Bits per byte count bytes of the text that the predicted tokens stand for.
    """
    from hexad.launching.environment import environment
    from hexad.planning.saved_model import evaluated_model, find_model

    ranks = environment().world if environment().joined else nproc
    request = {**options, "source": find_model(source)}
    request["data"] = _named(request["data"])
    # Refuse wrong settings before any rank is started.
    evaluated_model(request["source"], request["data"], request["overrides"], ranks)
    return run_ranks("evaluate", request, nproc)


def _named(data: tuple[str, ...]) -> dict[str, str]:
    """Data sets by the names given, or else the last parts of their prefixes, as far as these differ."""
    pairs = [_parted(text) for text in data]
    for text, (name, equals, prefix) in zip(data, pairs):
        if not prefix.strip() or (equals and not name.strip()):
            raise HexadError(f"--data: found '{text}', expected PREFIX or NAME=PREFIX")
        _refuse_setting(name, prefix)
    short = [name or Path(prefix).name for name, _, prefix in pairs]
    names = [
        name if given or short.count(name) == 1 else prefix for name, (given, _, prefix) in zip(short, pairs)
    ]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise HexadError(f"--data: {double} is given twice; give each data set once, by a name of its own")
    return {name: prefix for name, (_, _, prefix) in zip(names, pairs)}


def _parted(text: str) -> tuple[str, str, str]:
    """(name, ``=``, prefix) of ``NAME=PREFIX``; ("", "", prefix) of data whose own path has a ``=``."""
    from hexad.dataset.sidecar import idx_path

    name, equals, prefix = text.partition("=")
    if not equals or "/" in name or idx_path(text).exists():
        return "", "", text
    return name, equals, prefix


def _refuse_setting(name: str, prefix: str) -> None:
    """Refuse what is more likely a misspelt setting: a name with dots of data that is not there."""
    from hexad.dataset.sidecar import idx_path

    hint = did_you_mean(name, setting_names()) if "." in name else ""
    if hint and not idx_path(prefix).exists():
        hint = hint.replace("mean", "mean the setting")
        raise HexadError(f"--data: found '{name}={prefix}', but {idx_path(prefix)}: no such file{hint}")


class _Lines:
    """A line on stderr every few seconds, with the time that is left."""

    SECONDS = 10.0

    def __init__(self) -> None:
        self._name, self._began, self._last, self._first = "", 0.0, 0.0, 0

    def __call__(self, name: str, done: int, samples: int) -> None:
        now = time.monotonic()
        if name != self._name:  # after the first batch, which compiles and allocates
            self._name, self._began, self._last, self._first = name, now, now, done
        elif now - self._last > self.SECONDS:
            self._last = now
            rate = (done - self._first) / (now - self._began)
            left = timedelta(seconds=round((samples - done) / rate))
            click.echo(f"{name}: {done:,} of {samples:,} samples, {left} left", err=True)


def evaluate_here(request: dict[str, Any]) -> None:
    """Run one rank of the evaluation; the first prints the result."""
    from hexad.api import evaluate as scores_of
    from hexad.engine.evaluation import total
    from hexad.launching.environment import environment

    source, data, batches, overrides = (request[key] for key in ("source", "data", "batches", "overrides"))
    progress = None if environment().rank else _Lines()
    scores = scores_of(source, data, batches=batches, overrides=overrides, progress=progress)
    if environment().rank:
        return
    if request["as_json"]:
        results = {name: score.as_tree() for name, score in scores.items()}
        print_json({"source": source, "results": results, "total": total(scores).as_tree()})
        return
    width = max(len(name) for name in [*scores, "all of them"])
    click.echo(f"{'':{width}}  {'loss':>9}  {'perplexity':>11}  {'bits/byte':>9}  {'tokens':>13}")
    rows = [*scores.items(), *([("all of them", total(scores))] if len(scores) > 1 else [])]
    for name, score in rows:
        bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        click.echo(
            f"{name:{width}}  {score.loss:9.4f}  {score.perplexity:11,.3f}  {bits:>9}  {score.tokens:13,}"
        )
