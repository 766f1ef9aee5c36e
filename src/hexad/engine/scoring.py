"""Log-probabilities of given sequences: the training forward pass of a saved model, in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path

from torch import Tensor

from hexad.checkpoint.base import load_model_weights
from hexad.comm import merged
from hexad.config import NOT_FINITE, HexadError
from hexad.dataset.load.microbatch import Microbatch
from hexad.planning import Resolved
from hexad.topology.mesh import Mesh

from .engine import Engine
from .losses import Outputs

_LOGITS = 1 << 27
"""Logits of a rank that exist at a time, about; more where one sequence has more."""


class Scorer:
    """A model that scores sequences. All ranks construct it and call it together, with the same arguments.

    Args:
        resolved: settings; ``data.sequence`` x ``batch.micro`` tokens are computed at a time, less where
            these have many logits, or one longer sequence.
        mesh: of the ranks.
        source: a checkpoint's directory, or ``hf:DIR``; None: the model has its initial weights.

    Raises:
        AgreedError: the weights cannot be used.
    """

    def __init__(self, resolved: Resolved, mesh: Mesh, source: Path | str | None = None) -> None:
        engine = Engine(resolved, mesh, initialise=source is None, training=False, loss=self._loss)
        if source is not None:
            load_model_weights(source, engine.config, engine.weights(adapters=True), mesh.world)
            engine.publish()
        self._engine = engine
        config, self._mesh, self._made = resolved.config, mesh, list[Tensor]()
        self._multiple, self._scored = config.parallel.token_multiple, 0
        columns = -(-int(config.model.vocab) // mesh.tensor.size)
        self._most = min(config.batch.micro * config.data.sequence, max(1, _LOGITS // columns))

    @property
    def wave(self) -> int:
        """Tokens that keep all ranks busy for a while: of sequences to be scored in one call."""
        return 4 * self._most * self._mesh.data.size * self._mesh.pipeline.size

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of every token but the first, in nats, given those before it; the same on every
        rank.

        Args:
            sequences: ids, at least one each.

        Raises:
            HexadError: ids that the model does not have; a log-probability that is not a number.
        """
        groups = list(_groups([len(ids) - 1 for ids in sequences], self._most))
        data = self._mesh.data
        rounds = -(-len(groups) // data.size)
        mine = [
            groups[number] if number < len(groups) else range(0)
            for number in range(data.rank, rounds * data.size, data.size)
        ]
        if not mine:
            return [[] for _ in sequences]
        batches = ([sequences[place] for place in group] for group in mine)
        self._engine.evaluate([Microbatch.of_sequences(part, self._multiple) for part in batches])
        results, self._made = self._made, []
        values: dict[int, list[float]] = {}
        if self._mesh.tensor.rank == self._mesh.context.rank == 0:  # others have the same
            for group, logprobs in zip(mine, results):
                lengths = [len(sequences[place]) - 1 for place in group]
                parts = logprobs[: sum(lengths)].split(lengths) if lengths else ()
                values |= {place: part.tolist() for place, part in zip(group, parts)}
        everything = merged(values, self._mesh.world, lambda a, b: a | b)
        for place in sorted(everything):
            if any(map(isnan, everything[place])):
                raise HexadError(f"sequence {self._scored + place + 1}: {NOT_FINITE}")
        self._scored += len(sequences)
        return [everything.get(place, []) for place in range(len(sequences))]

    def _loss(self, outputs: Outputs, microbatch: Microbatch) -> Tensor:
        """Keep the log-probabilities ``[tokens]`` of a microbatch."""
        logprobs = outputs.log_probabilities()
        self._made.append(outputs.whole(logprobs).flatten())
        return -logprobs.sum()


def _groups(lengths: Sequence[int], most: int) -> Iterator[range]:
    """Neighbouring sequences that are computed together, with as many tokens as are allowed, or one; those
    without targets are left out."""
    begin, tokens = 0, 0
    for place, length in enumerate(lengths):
        if tokens and (tokens + length > most):
            yield range(begin, place)
            tokens = 0
        if not tokens:
            begin = place
        tokens += length
    if tokens:
        yield range(begin, len(lengths))


def beyond_positions(tokens: int, positions: int) -> str | None:
    """A warning about a sequence of so many tokens, if the model was made for fewer."""
    if tokens - 1 <= positions:
        return None
    limit = f"the model was made for {positions} (model.max_positions)"
    return f"a sequence reaches {tokens - 1} positions, {limit}"


def check_sequence(ids: Sequence[int], name: str, vocab: int, positions: int | None) -> None:
    """Check that a sequence can be scored.

    Args:
        ids: of its tokens.
        name: in messages.
        vocab: of the model.
        positions: that the model has; None: any number.

    Raises:
        HexadError: no ids, or others than the model has; more than it has positions for.
    """
    if not isinstance(ids, list | tuple | range) or not ids or any(type(token) is not int for token in ids):
        raise HexadError(f"{name}: found {ids!r:.100}, expected a list of ids, at least one")
    if wrong := next((token for token in ids if not 0 <= token < vocab), None):
        raise HexadError(f"{name}: found the id {wrong}, expected 0 to {vocab - 1} (model.vocab {vocab})")
    if positions is not None and len(ids) - 1 > positions:
        raise HexadError(f"{name}: found {len(ids)} tokens, more than the model's {positions} positions")
