"""Evaluation on data sets: the trainer's, and that of a checkpoint or a published model by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hexad.checkpoint.base import load_model_weights
from hexad.comm import agreed, all_reduce
from hexad.config import NOT_FINITE, Config, HexadError, counted
from hexad.dataset.load.loader import loader_from_config
from hexad.dataset.load.microbatch import Microbatch
from hexad.dataset.text.token_text import TokenText
from hexad.dataset.text.tokenizer import Tokenizer
from hexad.parallel.tensor.loss import IGNORED
from hexad.planning import Resolved
from hexad.topology.mesh import Mesh

from .engine import Engine

log = logging.getLogger("hexad")

Progress = Callable[[str, int, int], None]
"""Takes a data set's name, the samples that are done, and all of them."""


@dataclass(frozen=True)
class Score:
    """The loss of a model on a data set.

    Attributes:
        loss_sum: of all tokens with a target, in nats.
        tokens: their number.
        byte_count: bytes of text that they stand for; None where the tokenizer cannot say.
    """

    loss_sum: float
    tokens: int
    byte_count: int | None = None

    @property
    def loss(self) -> float:
        """The mean loss per token, in nats; NaN without a token."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that is beyond a float."""
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """The sum in bits, per byte of text: the same for any tokenizer."""
        return None if not self.byte_count else self.loss_sum / math.log(2) / self.byte_count

    def as_tree(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.byte_count,
        }


class ValidationSets:
    """The data sets of ``data.validation``, on one data rank.

    Args:
        config: resolved.
        mesh: of the run.
        tokenizer: of ``data.tokenizer``.

    Raises:
        ConfigError: data that cannot be used.
    """

    def __init__(self, config: Config, mesh: Mesh, tokenizer: Tokenizer) -> None:
        self._config, self._mesh = config, mesh
        place, context_rank = (mesh.data.rank, mesh.data.size), mesh.context.rank
        prefix = "validation." if isinstance(config.data.validation, dict) else ""
        self._loaders = {
            name: loader_from_config(config, *place, tokenizer, f"{prefix}{name}", context_rank)
            for name in config.data.validation_sets
        }
        self._bytes = TokenText(tokenizer).byte_counts

    def prepare(self) -> None:
        """Make the indexes of large data sets."""
        for loader in self._loaders.values():
            loader.prepare(0)

    def close(self) -> None:
        """Stop reading ahead."""
        for loader in self._loaders.values():
            loader.close()

    def scores(
        self, engine: Engine, batches: int | None, progress: Progress | None = None
    ) -> dict[str, Score]:
        """Evaluate on each, all ranks together.

        Args:
            engine: whose model.
            batches: global batches of each set, from its first sample on; None: all samples, each
                once; of a blend, until one of its members is used up.
            progress: called after each batch with the set's name, the samples done and all samples.
        """
        progress = progress or (lambda *_: None)
        return {name: self._score(engine, name, batches, partial(progress, name)) for name in self._loaders}

    @property
    def names(self) -> list[str]:
        """Names of the data sets."""
        return list(self._loaders)

    def batches(self, name: str, most: int | None = None) -> Iterator[list[Microbatch]]:
        """This data rank's microbatches of the global batches of a set, from its first sample on; ``most`` as
        ``batches`` of :meth:`scores`."""
        loader = self._loaders[name]
        size = loader.global_batch
        end = loader.samples if most is None else most * size
        for first in range(0, end, size):
            batch = loader.step(first)
            if first + size > end:
                batch = [self._cut(microbatch, first, number, end) for number, microbatch in enumerate(batch)]
            yield batch

    def _score(
        self, engine: Engine, name: str, most: int | None, progress: Callable[[int, int], None]
    ) -> Score:
        loader = self._loaders[name]
        size = loader.global_batch
        end = loader.samples if most is None else most * size
        loss_sum, targets, count = 0.0, 0, 0
        for number, batch in enumerate(self.batches(name, most), 1):
            batch_sum, batch_targets = engine.evaluate(batch)
            loss_sum, targets = loss_sum + batch_sum, targets + batch_targets
            count += sum(map(self._count, batch))
            progress(min(number * size, end), end)
        total = torch.tensor(count, dtype=torch.int64, device=self._mesh.device)
        total = all_reduce(total, self._mesh.gradient_axis())
        return Score(loss_sum, targets, None if self._bytes is None else int(total))

    def _cut(self, microbatch: Microbatch, first: int, number: int, end: int) -> Microbatch:
        """A microbatch without targets in samples from ``end`` on, which belong to the next epoch."""
        micro, data = self._config.batch.micro, self._mesh.data
        row = first + (number * data.size + data.rank) * micro
        return microbatch.without_targets_from(max(0, end - row))

    def _count(self, microbatch: Microbatch) -> int:
        """Bytes of text of a microbatch's targets."""
        if self._bytes is None:
            return 0
        previous, labels = microbatch.tokens.numpy(), microbatch.labels.numpy()
        targets = labels != IGNORED
        return self._bytes.total(previous[targets], labels[targets])


def total(scores: Mapping[str, Score]) -> Score:
    """All data sets as one."""
    counts = [score.byte_count for score in scores.values()]
    known = None if None in counts else sum(count or 0 for count in counts)
    return Score(
        sum(score.loss_sum for score in scores.values()),
        sum(score.tokens for score in scores.values()),
        known,
    )


def evaluate_weights(
    resolved: Resolved,
    mesh: Mesh,
    source: Path | str,
    tokenizer: Tokenizer,
    batches: int | None,
    progress: Progress | None = None,
) -> dict[str, Score]:
    """Evaluate the weights of a checkpoint, or of ``hf:DIR``, on ``data.validation``, all ranks together: in
    any layout, without gradients or optimizer state. ``batches`` and ``progress``: see
    :meth:`ValidationSets.scores`.

    Raises:
        AgreedError: the weights or the data cannot be used.
        HexadError: a data set has no target, or its loss is not finite, on all ranks.
    """
    sets = agreed(lambda: ValidationSets(resolved.config, mesh, tokenizer), mesh.world)
    try:
        engine = Engine(resolved, mesh, initialise=False, training=False)
        load_model_weights(source, engine.config, engine.weights(adapters=True), mesh.world)
        engine.publish()
        agreed(sets.prepare, mesh.world)
        scores = sets.scores(engine, batches, progress)
    finally:
        sets.close()
    for name, score in scores.items():
        if not score.tokens:
            part = "" if batches is None else f" in its first {counted(batches, 'batch')} (``batches``)"
            raise HexadError(f"``data``: {name}: no token{part} has a target: there is nothing to evaluate")
        if not math.isfinite(score.loss_sum):
            raise HexadError(f"``data``: {name}: found the loss {score.loss:g}: {NOT_FINITE}")
    return scores
