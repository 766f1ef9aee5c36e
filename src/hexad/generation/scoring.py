"""How likely a model finds given texts: what multiple-choice tasks compare."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from hexad.comm import all_reduce, broadcast, send_async
from hexad.config import HexadError
from hexad.model.transformer import Transformer
from hexad.topology.mesh import Axis

from .generator import divided, from_stage_before, gathered_logits

_AT_ONCE = 4096
"""Tokens of a forward pass, unless one sequence is longer."""


class Likelihood(NamedTuple):
    """The likelihood of a continuation.

    Attributes:
        log_probability: the sum over its tokens, in nats.
        greedy: whether each of them is the most likely one.
    """

    log_probability: float
    greedy: bool


@torch.no_grad()
def log_likelihoods(
    model: Transformer, sequences: Sequence[tuple[list[int], int]], pipeline: Axis | None = None
) -> list[Likelihood]:
    """The likelihood of the last tokens of each sequence, all ranks together.

    Of each sequence its ids are given, and the number of the first that counts, at least 1. ``pipeline`` is
    the axis of the stages.

    Raises:
        HexadError: a sequence without tokens before those that count, or without any.
    """
    for ids, first in sequences:
        if not 1 <= first < len(ids):
            raise HexadError(f"log_likelihoods: found {len(ids)} tokens of which number {first} is the first")
    likelihoods: list[Likelihood] = []
    for group in _groups(sequences):
        likelihoods += _scored(model, group, pipeline or Axis("pipeline"))
    return likelihoods


def _groups(sequences: Sequence[tuple[list[int], int]]) -> Iterator[list[tuple[list[int], int]]]:
    group: list[tuple[list[int], int]] = []
    for sequence in sequences:
        if group and sum(len(ids) for ids, _ in group) + len(sequence[0]) > _AT_ONCE:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


def _scored(model: Transformer, group: list[tuple[list[int], int]], pipeline: Axis) -> list[Likelihood]:
    device = model.shard.device
    inputs_of = [ids[:-1] for ids, _ in group]  # nothing follows the last one
    tokens, spans = divided(model, inputs_of)
    hidden = model(tokens, spans, inputs=from_stage_before(model, tokens, pipeline))
    # Of each sequence the log probability of its targets, and how many of them are not the most likely.
    result = torch.zeros((len(group), 2), dtype=torch.float64, device=device)
    if model.inventory.last:
        numbers = torch.arange(spans.tokens) if spans.numbers is None else spans.numbers.cpu()
        begins = accumulate(map(len, inputs_of), initial=0)
        for row, ((ids, first), begin) in enumerate(zip(group, begins)):
            counted = torch.tensor([begin + first - 1, begin + len(ids) - 1])
            low, high = torch.searchsorted(numbers, counted).tolist()
            if low == high:  # all on other context ranks
                continue
            targets = torch.tensor(ids)[numbers[low:high] - begin + 1]
            logits = gathered_logits(model, hidden[low:high]).double()
            chosen = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
            result[row, 0], result[row, 1] = chosen, (logits.argmax(-1) != targets).sum()
        result = all_reduce(result, model.shard.context)
    else:
        send_async(hidden, pipeline, pipeline.rank + 1).wait()
    result = broadcast(result, pipeline, source=pipeline.size - 1)
    return [Likelihood(total, not others) for total, others in result.tolist()]
