"""Choosing the next tokens of many sequences from their logits, and the log-probabilities of given ones.

A sequence's random numbers follow from its seed, its prompt and the number of the token, not from what is
computed beside it: see :func:`~hexad.generation.requests.streams`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hexad.config import NOT_FINITE
from hexad.parallel import exact

from .requests import Logprob, Request, drawn, streams


class Constraint(Protocol):
    """Which tokens may follow in a text of a given form."""

    def allowed(self, device: torch.device) -> Tensor | None:
        """bool ``[vocab]``; None if that cannot be said."""
        ...

    def accept(self, token: int) -> None:
        """Add a token to the text."""
        ...


class Choice(NamedTuple):
    """A token that was chosen, and how likely it was, if that is wanted; or why none can be."""

    token: int | None
    logprob: Logprob | None = None
    problem: str = ""


@dataclass(eq=False)
class _State:
    """What choices for a sequence depend on besides its logits."""

    request: Request
    key: int
    constraint: Constraint | None
    new: int = 0
    seen: Counter[int] = field(default_factory=Counter)  # in the new text
    problem: str = ""  # why no token can be chosen

    @property
    def plain(self) -> bool:
        """Whether the model's logits are used as they are."""
        sampling = self.request.sampling
        return not (sampling.logit_bias or sampling.penalised or self.constraint or self.early)

    @property
    def early(self) -> bool:
        """Whether the text may not end yet."""
        return self.new < self.request.sampling.min_tokens


class Sampler:
    """Chooses tokens, on the first rank of the last stage.

    Args:
        constrain: makes the constraint of a grammar.
        exactly: log-probabilities are those of exact arithmetic.
    """

    def __init__(self, constrain: Any = None, exactly: bool = False) -> None:
        self._constrain, self.exactly = constrain, exactly
        self._states: dict[int, _State] = {}

    def open(self, number: int, request: Request) -> None:
        """Prepare for a sequence."""
        key = request.key
        if key is None:
            (key,) = streams(request.sampling.seed, [request.sample], request.prompt)
        constraint = None if request.sampling.grammar is None else self._constrain(request.sampling.grammar)
        self._states[number] = _State(request, key, constraint)

    def close(self, number: int) -> None:
        """Forget a sequence."""
        self._states.pop(number, None)

    def scoring(self, number: int) -> int | None:
        """How many of the most likely tokens are wanted beside each of a prompt's."""
        return self._states[number].request.sampling.prompt_logprobs

    def choose(self, logits: Tensor, numbers: Sequence[int]) -> list[Choice]:
        """The next token of each sequence, which from now on is part of it; None where logits are not finite,
        or where a grammar is too complex.

        Args:
            logits: ``[sequences, vocab]``, in at least float32.
            numbers: of the sequences.
        """
        states = [self._states[number] for number in numbers]
        changed = logits
        if not all(state.plain for state in states):
            changed = logits.clone()
            for row, state in zip(changed, states):
                self._change(row, state)
        tokens = changed.argmax(-1)
        random = [row for row, state in enumerate(states) if state.request.sampling.temperature > 0]
        if random:
            rows = torch.tensor(random, device=logits.device)
            tokens[rows] = _sampled(changed[rows], [states[row] for row in random])
        # A logit of -inf alone is a token that cannot follow.
        chosen = torch.where(logits.amax(-1).isfinite(), tokens, -1).tolist()
        logprobs: list[Logprob | None] = [None] * len(states)
        wanted = [row for row, state in enumerate(states) if state.request.sampling.logprobs is not None]
        if wanted:
            rows, counts = (
                torch.tensor(wanted, device=logits.device),
                [states[r].request.sampling.logprobs for r in wanted],
            )
            made = log_probabilities(logits[rows], tokens[rows], counts, self.exactly)
            for row, logprob in zip(wanted, made):
                logprobs[row] = logprob
        for state, token in zip(states, chosen):
            if token < 0:
                state.problem = state.problem or NOT_FINITE
            if state.problem:
                continue
            state.new += 1
            state.seen[token] += 1
            if state.constraint is not None:
                state.constraint.accept(token)
        return [
            Choice(None, None, state.problem) if state.problem else Choice(token, logprob)
            for state, token, logprob in zip(states, chosen, logprobs)
        ]

    def _change(self, row: Tensor, state: _State) -> None:
        """Add what a request adds to its logits ``[vocab]``, in place."""
        sampling = state.request.sampling
        if sampling.logit_bias:
            biased, biases = zip(*sampling.logit_bias)
            row[list(biased)] += torch.tensor(biases, dtype=row.dtype, device=row.device)
        if sampling.repetition_penalty != 1:
            ids = torch.tensor(sorted({*state.request.prompt, *state.seen}), device=row.device)
            values, penalty = row[ids], sampling.repetition_penalty
            row[ids] = torch.where(values > 0, values / penalty, values * penalty)
        if state.seen and (sampling.presence_penalty or sampling.frequency_penalty):
            ids, counts = (torch.tensor(part, device=row.device) for part in zip(*sorted(state.seen.items())))
            row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(row.dtype)
        if state.early and state.request.ends:
            row[sorted(end for end in state.request.ends if end < len(row))] = -torch.inf
        if state.constraint is not None:
            allowed = state.constraint.allowed(row.device)
            if allowed is None:
                state.problem = "the grammar of the text is too complex"
            else:
                row.masked_fill_(~allowed[: len(row)], -torch.inf)


def _sampled(logits: Tensor, states: Sequence[_State]) -> Tensor:
    """int64 ``[sequences]``: tokens drawn from logits ``[sequences, vocab]``, by the inverse of the
    cumulative distribution."""
    settings = [state.request.sampling for state in states]

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
    place = column([drawn(state.key, state.new) for state in states]) * total
    # Below the total even if that product is rounded up: the last token with a probability then.
    place = torch.minimum(place, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, place, right=True).squeeze(1).clamp_(max=vocab - 1)


def log_probabilities(
    logits: Tensor, tokens: Tensor, counts: Sequence[int | None], exactly: bool = False
) -> list[Logprob]:
    """How likely given tokens are.

    Args:
        logits: ``[rows, vocab]``, in at least float32.
        tokens: int64 ``[rows]``.
        counts: of the most likely tokens that are wanted beside each.
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
