"""The functions behind ``hexad.train``, ``hexad.generate``, ``hexad.evaluate`` and ``hexad.score``: what the
commands of these names do, in this process. It joins the world that torchrun or SLURM has started it in, or
is a world of one; in a world of several ranks all of them call the same function with the same arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from hexad.config import Config, HexadError
from hexad.engine.evaluation import Progress, Score, evaluate_weights
from hexad.engine.scoring import Scorer, beyond_positions, check_sequence
from hexad.generation.generator import Generator
from hexad.generation.prompts import Prompt
from hexad.generation.texts import Continuation, Settings, prompt_list, sampling_of
from hexad.launching.environment import environment
from hexad.launching.launch import launch
from hexad.model.configuration import load_config
from hexad.planning.saved_model import evaluated_model, find_model, scored_model
from hexad.training.callbacks import Callback, Outcome
from hexad.training.loop import train as train_run

log = logging.getLogger("hexad")

__all__ = ["evaluate", "generate", "score", "train"]


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
    overrides: Iterable[str] = (),
    **settings: Unpack[Settings],
) -> list[Continuation]:
    """Continue prompts with a saved model: :meth:`hexad.Generator.generate`, of a generator that is made for
    this call.

    Args:
        source: a run, a checkpoint, or ``hf:DIR``.
        prompts: a text; or several, each a text, ``{"prompt": text or ids}``, or ``{"messages": [...]}`` for
            the tokenizer's chat template.
        overrides: of the saved settings, as in ``precision.dtype=fp32``.
        settings: of the generation, as in ``tokens=64, temperature=0.8``, see
            :class:`~hexad.generation.texts.Settings`.

    Returns:
        One for each prompt and sample, in this order; the same on every rank.

    Raises:
        HexadError: the model, a prompt or a setting cannot be used.
    """
    prompt_list(prompts)
    sampling_of(settings)
    with Generator(source, overrides) as generator:
        return generator.generate(prompts, **settings)


def evaluate(
    source: str | Path,
    data: str | Path | Mapping[str, Any] | None = None,
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
    if not isinstance(data, str | Path | Mapping | None):
        raise HexadError(f"data: found {data!r}, expected a prefix, or data sets by name: {{name: prefix}}")
    if batches is not None and (not isinstance(batches, int) or batches < 1):
        raise HexadError(f"batches: found {batches!r}, expected an integer from 1, or None: all samples")
    sets = {Path(data).name: data} if isinstance(data, str | Path) else dict(data or {})
    model, tokenizer = evaluated_model(find_model(str(source)), sets, overrides, environment().world)
    with launch(model.config) as run:
        return evaluate_weights(run.resolved, run.mesh, model.weights, tokenizer, batches, progress)


def score(
    source: str | Path, sequences: Sequence[Sequence[int]], *, overrides: Iterable[str] = ()
) -> list[list[float]]:
    """Log-probabilities of given sequences by the training forward pass of a saved model.

    Args:
        source: a run, a checkpoint, or ``hf:DIR``.
        sequences: ids of tokens, at least one each.
        overrides: of the saved settings, as in ``parallel.tensor=2`` or ``precision.exact=true``.

    Returns:
        of each sequence, for every token but the first, its log-probability given those before it, in nats;
        the same on every rank.

    Raises:
        HexadError: the model or a sequence cannot be used.
    """
    if not isinstance(sequences, Sequence) or isinstance(sequences, str):
        raise HexadError(f"sequences: found {sequences!r:.60}, expected lists of ids")
    saved = scored_model(find_model(str(source)), overrides, environment().world)
    for number, ids in enumerate(sequences, 1):
        check_sequence(ids, f"sequence {number}", int(saved.config.model.vocab), saved.most_positions)
    longest = max(map(len, sequences), default=1)
    if (warning := beyond_positions(longest, saved.positions)) is not None and not environment().rank:
        log.warning(warning)
    with launch(saved.config) as run:
        return Scorer(run.resolved, run.mesh, saved.weights).scores(sequences)
