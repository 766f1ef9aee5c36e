"""The functions behind ``hexad.train``, ``hexad.generate`` and ``hexad.evaluate``: what the commands of these
names do, in this process. It joins the world that torchrun or SLURM has started it in, or is a world of one;
in a world of several ranks all of them call the same function with the same arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hexad.config import Config, HexadError
from hexad.engine.evaluation import Progress, Score, evaluate_weights
from hexad.generation.generator import asked_sampling
from hexad.generation.texts import Continuation, Wanted, generated
from hexad.launching.environment import environment
from hexad.launching.launch import launch
from hexad.model.configuration import load_config
from hexad.planning.saved_model import Prompt, evaluated_model, find_model, generating_model
from hexad.training.callbacks import Callback, Outcome
from hexad.training.loop import train as train_run

__all__ = ["evaluate", "generate", "train"]


def train(
    config: Config | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train as configured, resume where ``run.dir`` holds checkpoints, and write what ``hexad train`` writes.

    Args:
        config: from :func:`hexad.load_config`, or what that takes.
        overrides: ``parallel.tensor=2`` style strings; with a path or a mapping only.
        callbacks: called on every rank, see :class:`hexad.Callback`.

    Returns:
        The last step, and what ended the run early, if anything.

    Raises:
        HexadError: anything the user can fix; the same on every rank.
    """
    if not isinstance(config, Config):
        config = load_config(config, overrides)
    elif given := list(overrides):
        raise HexadError(f"overrides: found {given} with a Config; pass them to hexad.load_config")
    return train_run(config, callbacks)


def generate(
    source: str | Path,
    prompts: str | Sequence[str | Prompt],
    *,
    tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
    samples: int = 1,
    stop: str | Sequence[str] = (),
    batch: int = 16,
    overrides: Iterable[str] = (),
) -> list[Continuation]:
    """Continue prompts with a saved model.

    Args:
        source: a run, a checkpoint, or ``hf:DIR``.
        prompts: a text; or several, each a text, ``{"prompt": text}``, or ``{"messages": [...]}`` for the
            tokenizer's chat template.
        tokens: new tokens at most.
        temperature: 0 selects the most likely token.
        top_k: sample the ``k`` most likely only; 0: all.
        top_p: sample the most likely up to this sum of probabilities only.
        seed: of sampling; the random numbers of a sample follow from it, the prompt and the sample's number.
        samples: texts for each prompt.
        stop: a text, or several, before which one ends; also special tokens.
        batch: texts written at once.
        overrides: of the saved settings, as in ``precision.dtype=fp32``.

    Returns:
        One for each prompt and sample, in this order; the same on every rank.

    Raises:
        HexadError: the model or a prompt cannot be used.
    """
    if not isinstance(prompts, Sequence):
        raise HexadError(f"prompts: found {prompts!r}, expected a text or a list of prompts")
    if not isinstance(stop, Sequence):
        raise HexadError(f"stop: found {stop!r}, expected a text or a list of texts")
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    wanted = Wanted(tokens, asked_sampling(temperature, top_k, top_p, seed), samples, texts, batch)
    given = [prompts] if isinstance(prompts, str) else prompts
    entries: list[Prompt] = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in given]
    saved = generating_model(find_model(str(source)), overrides, environment().world)
    with launch(saved.config) as run:
        return list(generated(run.mesh, run.resolved, saved, entries, wanted))


def evaluate(
    source: str | Path,
    data: str | Mapping[str, Any] | None = None,
    *,
    batches: int | None = None,
    overrides: Iterable[str] = (),
    progress: Progress | None = None,
) -> dict[str, Score]:
    """Loss, perplexity and bits per byte of a saved model.

    Args:
        source: a run, a checkpoint, or ``hf:DIR``.
        data: a ``.bin/.idx`` prefix, or several data sets by name; None: the run's ``data.validation``.
        batches: global batches of each set; None: all samples, each once; of a blend, until one
            of its members is used up.
        overrides: of the saved settings, as in ``parallel.tensor=2``.
        progress: called on every rank after each batch with the data set's name, the samples that are done,
            and all of them.

    Returns:
        The score of each data set, by name; the same on every rank.

    Raises:
        HexadError: the model or the data cannot be used.
    """
    if not isinstance(data, str | Mapping | None):
        raise HexadError(f"data: found {data!r}, expected a prefix, or data sets by name: {{name: prefix}}")
    if batches is not None and (not isinstance(batches, int) or batches < 1):
        raise HexadError(f"batches: found {batches!r}, expected an integer from 1, or None: all samples")
    sets = {Path(data).name: data} if isinstance(data, str) else dict(data or {})
    model, tokenizer = evaluated_model(find_model(str(source)), sets, overrides, environment().world)
    with launch(model.config) as run:
        return evaluate_weights(run.resolved, run.mesh, model.weights, tokenizer, batches, progress)
