"""A sequence of tokens from its request to its last update, with all of its state. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockTable
from .requests import Ending, Logprob, Request, RoutedExperts
from .text_stream import TextStream


@dataclass(eq=False)
class Sequence:
    """A request that is computed, and its state.

    The leader of a replica schedules it and keeps its text. The rank that chooses tokens has the same object,
    or where that is another rank, one of its own, which the request alone was sent for.

    Attributes:
        number: of the request.
        request: what is computed.
        ids: of the prompt and of the new tokens; without the last id of a prompt that is only scored, which
            nothing follows.
        computed: tokens whose keys are in the cache, or will be after the batches under way.
        table: its blocks; None while it waits.
        lane: of its batches.
        scored: positions of the prompt whose log-probability was computed, or will be.
        cached: tokens of the prompt that others had computed; None before it has run.
        text: the text of its new tokens.
        prompt_logprobs: by position, until they are complete and reported.
        reported: whether they were.
        routing: experts in the layers of one stage after the other, of tokens from a position on.
        key: of its random numbers.
        constraint: of its grammar, a :class:`~hexad.generation.sampler.Constraint`.
        chosen: how many tokens were chosen.
        counts: how often every token was.
        problem: why no token can be chosen.
    """

    number: int
    request: Request
    ids: list[int] = field(init=False)
    computed: int = 0
    table: BlockTable | None = None
    lane: int = 0
    scored: int = 0
    cached: int | None = None
    text: TextStream | None = None
    prompt_logprobs: dict[int, Logprob] = field(default_factory=dict)
    reported: bool = False
    routing: list[tuple[int, tuple[RoutedExperts, ...]]] = field(default_factory=list)
    key: int = 0
    constraint: Any = None
    chosen: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    problem: str = ""

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        self.ids = list(prompt if self.request.sampling.tokens else prompt[:-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return Sequence, (self.number, self.request)

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        request = self.request
        return request.sampling.prompt_logprobs is not None and self.scored < len(request.prompt) - 1

    @property
    def plain(self) -> bool:
        """Whether tokens are chosen by the model's logits as they are."""
        sampling = self.request.sampling
        return not (sampling.logit_bias or sampling.penalised or self.constraint or self.early)

    @property
    def early(self) -> bool:
        """Whether the text must not end yet, on the rank that chooses."""
        return self.chosen < self.request.sampling.min_tokens

    def append_text(self, token: int) -> tuple[str, Ending | None]:
        """Add the text of a new token, the last of ``ids``; returns the text that is certain, and what ends
        the sequence if the token does."""
        assert self.text is not None
        sampling, text = self.request.sampling, ""
        ended: Ending | None = None
        new = len(self.ids) - len(self.request.prompt)
        if new == sampling.tokens:
            ended = "length"
        if token in self.request.ends:
            ended = "document"
        else:
            text = self.text.add(token, new > sampling.min_tokens)
        if ended is not None and not self.text.stopped:
            text += self.text.end()
        if self.text.stopped and ended != "document":
            ended = "stop"
        return text, ended

    def complete_prompt_logprobs(self) -> tuple[Logprob, ...] | None:
        """The log-probabilities of the prompt, once, when all are there; else None."""
        request = self.request
        if request.sampling.prompt_logprobs is None or self.reported or self.scoring:
            return None
        self.reported = True
        return tuple(self.prompt_logprobs[place] for place in range(len(request.prompt) - 1))

    def experts(self) -> RoutedExperts | None:
        """The experts of all tokens that were computed, in all layers; of a token that was computed again,
        the later ones. None where they are not returned."""
        if not self.request.sampling.routing:
            return None
        tokens = len(self.ids) - bool(self.request.sampling.tokens)
        return RoutedExperts(*(self._joined(name, tokens) for name in RoutedExperts._fields))

    def _joined(self, name: str, tokens: int) -> NDArray[Any]:
        """One of the arrays of experts, over spans and stages."""
        spans = [
            (begin, np.concatenate([getattr(stage, name) for stage in stages], axis=1))
            for begin, stages in self.routing
        ]
        joined = np.empty((tokens, *spans[0][1].shape[1:]), spans[0][1].dtype)
        known = np.zeros(tokens, dtype=bool)
        for begin, values in spans:
            joined[begin : begin + len(values)], known[begin : begin + len(values)] = values, True
        assert known.all(), "every token but the last was computed"
        return joined
