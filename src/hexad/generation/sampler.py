"""Choosing the next tokens of many sequences from their logits, and the log-probabilities of given ones.

A sequence's random numbers follow from its seed, its prompt and the number of the token, not from what is
computed beside it: see :func:`~hexad.generation.requests.streams`.
"""

from collections import abc
from typing import Any, Protocol

import torch
from torch import Tensor

from hexad.config import NOT_FINITE
from hexad.parallel import exact

from .requests import Logprob, RequestUpdate, drawn, streams
from .sequence import Sequence


class Constraint(Protocol):
    """Selects the tokens that may follow in a text of a given form."""

    def allowed(self, device: torch.device) -> Tensor | None:
        """bool ``[vocab]``; None if that cannot be said."""
        ...

    def accept(self, token: int) -> None:
        """Add a token to the text."""
        ...


class Sampler:
    """Chooses tokens, on the first rank of the last stage.

    Args:
        constrain: makes the constraint of a grammar.
        exactly: log-probabilities are those of exact arithmetic.
    """

    def __init__(self, constrain: Any = None, exactly: bool = False) -> None:
        self._constrain, self.exactly = constrain, exactly

    def begin(self, sequence: Sequence) -> None:
        """Draw the random key of a new sequence and set its grammar."""
        request = sequence.request
        if request.key is None:
            (sequence.key,) = streams(request.sampling.seed, [request.sample], request.prompt)
        else:
            sequence.key = request.key
        if request.sampling.grammar is not None:
            sequence.constraint = self._constrain(request.sampling.grammar)

    def choose(self, logits: Tensor, sequences: abc.Sequence[Sequence]) -> list[RequestUpdate]:
        """Choose the next token of each sequence, which from now on is part of it. An update says that the
        sequence has failed where logits are not finite, or where a grammar is too complex.

        Args:
            logits: ``[sequences, vocab]``, in at least float32.
            sequences: prepared ones.
        """
        changed = logits
        if not all(sequence.plain for sequence in sequences):
            changed = logits.clone()
            for row, sequence in zip(changed, sequences):
                self._change(row, sequence)
        tokens = changed.argmax(-1)
        random = [row for row, s in enumerate(sequences) if s.request.sampling.temperature > 0]
        if random:
            rows = torch.tensor(random, device=logits.device)
            tokens[rows] = _sampled(changed[rows], [sequences[row] for row in random])
        # A logit of -inf alone is a token that cannot follow.
        chosen = torch.where(logits.amax(-1).isfinite(), tokens, -1).tolist()
        logprobs = self._logprobs(logits, tokens, sequences)
        return [
            _chosen(sequence, token, logprob) for sequence, token, logprob in zip(sequences, chosen, logprobs)
        ]

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, sequences: abc.Sequence[Sequence]
    ) -> list[tuple[Logprob, ...]]:
        """The log-probability of each sequence's token, where it is returned."""
        logprobs: list[tuple[Logprob, ...]] = [()] * len(sequences)
        counts = [sequence.request.sampling.logprobs for sequence in sequences]
        returned = [row for row, count in enumerate(counts) if count is not None]
        if returned:
            rows = torch.tensor(returned, device=logits.device)
            limits = [counts[row] for row in returned]
            values = log_probabilities(logits[rows], tokens[rows], limits, self.exactly)
            for row, logprob in zip(returned, values):
                logprobs[row] = (logprob,)
        return logprobs

    def _change(self, row: Tensor, sequence: Sequence) -> None:
        """Apply the settings of a sequence to its logits ``[vocab]``, in place."""
        request, counts = sequence.request, sequence.counts
        sampling = request.sampling
        if sampling.logit_bias:
            biased, biases = zip(*sampling.logit_bias)
            row[list(biased)] += torch.tensor(biases, dtype=row.dtype, device=row.device)
        if sampling.repetition_penalty != 1:
            ids = torch.tensor(sorted({*request.prompt, *counts}), device=row.device)
            values, penalty = row[ids], sampling.repetition_penalty
            row[ids] = torch.where(values > 0, values / penalty, values * penalty)
        if counts and (sampling.presence_penalty or sampling.frequency_penalty):
            ids, times = (torch.tensor(part, device=row.device) for part in zip(*sorted(counts.items())))
            row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times.to(row.dtype)
        if sequence.early and request.ends:
            row[sorted(end for end in request.ends if end < len(row))] = -torch.inf
        if sequence.constraint is not None:
            allowed = sequence.constraint.allowed(row.device)
            if allowed is None:
                sequence.problem = "the grammar of the text is too complex"
            else:
                row.masked_fill_(~allowed[: len(row)], -torch.inf)


def _chosen(sequence: Sequence, token: int, logprobs: tuple[Logprob, ...]) -> RequestUpdate:
    """The update of a sequence that a token was chosen for; a negative one: its logits are not finite."""
    if token < 0:
        sequence.problem = sequence.problem or NOT_FINITE
    if sequence.problem:
        return RequestUpdate(sequence.number, sequence.problem, ended="failed")
    sequence.chosen += 1
    sequence.counts[token] += 1
    if sequence.constraint is not None:
        sequence.constraint.accept(token)
    return RequestUpdate(sequence.number, tokens=(token,), logprobs=logprobs)


def _sampled(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Tensor:
    """int64 ``[sequences]``: tokens drawn from logits ``[sequences, vocab]``, by the inverse of the
    cumulative distribution."""
    settings = [sequence.request.sampling for sequence in sequences]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # In float64, of differences: no temperature makes them other than numbers or -inf.
    logits = logits.double()
    logits = (logits - logits.amax(-1, keepdim=True)) / column([s.temperature for s in settings])
    vocab = logits.shape[1]
    if limited := [row for row, sampling in enumerate(settings) if 0 < sampling.top_k < vocab]:
        counts = torch.tensor([settings[row].top_k for row in limited], device=logits.device)
        best = logits[limited].topk(int(counts.max()), dim=-1).values
        least = best.gather(1, counts[:, None] - 1)
        logits[limited] = logits[limited].masked_fill(logits[limited] < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if cut := [row for row, sampling in enumerate(settings) if sampling.top_p < 1]:
        ordered, places = probabilities[cut].sort(dim=-1, descending=True, stable=True)
        limits = column([settings[row].top_p for row in cut])
        # A token stays if those before it do not reach top_p yet; the likeliest always stays.
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        ordered = ordered.masked_fill(before >= limits, 0.0)
        probabilities[cut] = torch.zeros_like(ordered).scatter_(-1, places, ordered)
    if any(sampling.min_p for sampling in settings):
        least = probabilities.amax(-1, keepdim=True) * column([s.min_p for s in settings])
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    place = column([drawn(sequence.key, sequence.chosen) for sequence in sequences]) * total
    # Below the total even if that product is rounded up: the last token with a probability then.
    place = torch.minimum(place, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, place, right=True).squeeze(1).clamp_(max=vocab - 1)


def log_probabilities(
    logits: Tensor, tokens: Tensor, counts: abc.Sequence[int | None], exactly: bool = False
) -> list[Logprob]:
    """The log-probabilities of tokens.

    Args:
        logits: ``[rows, vocab]``, in at least float32.
        tokens: int64 ``[rows]``.
        counts: how many of the most likely tokens are returned beside each.
        exactly: the bits do not depend on the other rows, see :mod:`hexad.parallel.exact`.
    """
    values = exact.log_softmax(logits) if exactly else logits.log_softmax(-1)
    chosen = values.gather(1, tokens[:, None]).squeeze(1).tolist()
    most = min(max((count or 0 for count in counts), default=0), logits.shape[1])
    best: list[Any] = [()] * len(chosen)
    if most:
        top = values.topk(most, dim=-1)
        best = [tuple(zip(*pair)) for pair in zip(top.indices.tolist(), top.values.tolist())]
    return [
        Logprob(token, value, row[: count or 0])
        for token, value, row, count in zip(tokens.tolist(), chosen, best, counts)
    ]
