"""The ranks that hold one copy of the model: the first of them, the leader, schedules, and all compute."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np

from hexad.comm.messages import Outbox, take
from hexad.config import NOT_FINITE
from hexad.dataset.text.token_text import TokenText
from hexad.topology.mesh import Mesh

from .requests import Ending, Logprob, Request, RoutedExperts, Update
from .sampler import Choice
from .scheduler import Part, Scheduler, Sequence, Step
from .text_stream import TextStream
from .worker import Outcome, Worker


@dataclass(eq=False)
class _Session:
    """A request, and what of its result was not passed on yet."""

    request: Request
    text: TextStream
    new: int = 0
    scores: dict[int, Logprob] = field(default_factory=dict)  # by position
    scored: bool = False  # they were passed on
    # Experts of the layers of one stage after the other, of tokens from a position on.
    routing: list[tuple[int, tuple[RoutedExperts, ...]]] = field(default_factory=list)

    def scores_of_prompt(self, complete: bool) -> tuple[Logprob, ...] | None:
        """The log-probabilities of the prompt, once, when there are all."""
        request = self.request
        if request.sampling.prompt_logprobs is None or self.scored or not complete:
            return None
        self.scored = True
        return tuple(self.scores[place] for place in range(len(request.prompt) - 1))

    def experts(self) -> RoutedExperts | None:
        """The experts of all tokens that were computed, in all layers; of a token that was computed again,
        the later ones."""
        if not self.request.sampling.routing:
            return None
        tokens, joined = len(self.request.prompt) + self.new - 1, []
        for name in RoutedExperts._fields:
            parts = [
                (begin, np.concatenate([getattr(stage, name) for stage in stages], axis=1))
                for begin, stages in self.routing
            ]
            whole = np.empty((tokens, *parts[0][1].shape[1:]), parts[0][1].dtype)
            known = np.zeros(tokens, dtype=bool)
            for begin, values in parts:
                whole[begin : begin + len(values)], known[begin : begin + len(values)] = values, True
            assert known.all(), "every token but the last was computed"
            joined.append(whole)
        return RoutedExperts(*joined)


class Replica:
    """One copy of the model, as each of its ranks sees it.

    The leader calls :meth:`add`, :meth:`advance` and :meth:`stop`, the others :meth:`follow`.

    Attributes:
        leads: whether this rank is the leader.
        scheduler: of the leader; not used on others.

    Args:
        worker: of this rank.
        scheduler: see there.
        text: of the model's tokenizer.
        mesh: all ranks.
    """

    def __init__(self, worker: Worker, scheduler: Scheduler, text: TokenText, mesh: Mesh) -> None:
        self.worker, self.scheduler, self._text = worker, scheduler, text
        ranks = sorted(mesh.layout.group(mesh.rank, "tensor", "context", "pipeline"))
        self._world, self._rank, self._leader = mesh.on_hosts(), mesh.rank, ranks[0]
        self._stages = mesh.layout.group(self._leader, "pipeline")  # the first rank of each
        self._others = [rank for rank in ranks if rank != self._leader]
        self.leads = mesh.rank == self._leader
        self._outbox = Outbox(self._world)
        self._sessions: dict[int, _Session] = {}
        self._opened: list[tuple[int, Request]] = []
        self._closed: list[int] = []
        self._under_way: deque[tuple[int, tuple[Part, ...], Outcome | None]] = deque()
        self._complete: list[Update] = []  # without a step

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return self.scheduler.idle and not self._under_way and not self._complete

    def add(self, number: int, request: Request) -> None:
        """Accept a request; ``number`` is above those before."""
        if not request.sampling.tokens and len(request.prompt) == 1:
            routing = self._without_tokens() if request.sampling.routing else None
            self._complete.append(Update(number, prompt_logprobs=(), ended="length", routing=routing))
            return
        decoder = self._text.decoder(request.prompt)
        stream = TextStream(decoder, self._text.specials, request.sampling.stop, request.shown)
        self._sessions[number] = _Session(request, stream)
        # Nothing follows the last token of a prompt that is only scored.
        ids = request.prompt if request.sampling.tokens else request.prompt[:-1]
        self.scheduler.add(Sequence(number, request, list(ids)))
        self._opened.append((number, request))

    def _without_tokens(self) -> RoutedExperts:
        """The experts of no tokens."""
        model = self.worker.model.model
        shape = (0, len(model.expert_layers), 0 if model.moe is None else model.moe.top_k)
        return RoutedExperts(np.empty(shape, np.int32), np.empty(shape, np.float32))

    def cancel(self, number: int) -> None:
        """Forget a request."""
        if self._sessions.pop(number, None) is not None:
            self._close(number)

    def advance(self) -> list[Update]:
        """Begin the next step, and return what the oldest step under way has brought, unless it need not be
        waited for."""
        if self._complete:
            updates, self._complete = self._complete, []
            return updates
        planned = self.scheduler.plan()
        if planned is not None:
            lane, parts = planned
            self._under_way.append((lane, parts, self._begin(Step(parts, *self._changes()))))
        if not self._under_way or (planned is not None and len(self._under_way) < self.scheduler.lanes):
            return []
        return self._end()

    def follow(self) -> None:
        """Compute what the leader plans, until it stops.

        Raises:
            CommError: a rank is lost.
        """
        stopped = False
        while not stopped:
            step = take(self._world, self._leader)
            outcome, stopped = self.worker.compute(step), step.stop
            if outcome is not None:
                self._outbox.put(outcome, [self._leader])
        self._outbox.flush()

    def stop(self) -> None:
        """End what is under way, forget all requests, and let the other ranks return."""
        while self._under_way:
            self._end()
        for number in list(self._sessions):
            self.cancel(number)
        self._begin(Step((), *self._changes(), stop=True))
        self._outbox.flush()

    def _changes(self) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Requests that are new, and numbers of those that have ended, since the step before."""
        changes = tuple(self._opened), tuple(self._closed)
        self._opened, self._closed = [], []
        return changes

    def _begin(self, step: Step) -> Outcome | None:
        self._outbox.put(step, self._others)
        return self.worker.compute(step)

    def _end(self) -> list[Update]:
        """Wait for the oldest step."""
        lane, parts, outcome = self._under_way.popleft()
        choices, scores = self._taken(parts, outcome)
        self.scheduler.done(lane, parts)
        failed = {number: choice.problem for number, choice in choices.items() if choice.token is None}
        for number, (begin, logprobs) in scores.items():
            if (session := self._sessions.get(number)) is not None:
                session.scores.update(enumerate(logprobs, begin))
            if any(isnan(one.value) for one in logprobs):
                failed[number] = NOT_FINITE
        updates = [self._failed(number, failed[number]) for number in failed.keys() & self._sessions.keys()]
        others = (self._update(part, choices.get(part.number)) for part in parts)
        return [*updates, *(update for update in others if update is not None)]

    def _taken(
        self, parts: tuple[Part, ...], own: Outcome | None
    ) -> tuple[dict[int, Choice], dict[int, tuple[int, list[Logprob]]]]:
        """The choices and the scores of a step, from the last stage, or this rank's ``own``; experts from all
        stages go to their sessions."""
        routed = any(part.routing for part in parts)
        stages = self._stages if routed else self._stages[-1:]
        outcomes: list[Outcome] = [
            own if own is not None and rank == self._rank else take(self._world, rank) for rank in stages
        ]
        for number, (begin, _) in outcomes[-1].routing.items():
            if (session := self._sessions.get(number)) is not None:
                experts = tuple(outcome.routing[number][1] for outcome in outcomes)
                session.routing.append((begin, experts))
        return outcomes[-1].choices, outcomes[-1].scores

    def _failed(self, number: int, problem: str) -> Update:
        """End a request that cannot be completed."""
        self._sessions.pop(number)
        self._close(number)
        return Update(number, problem, ended="failed")

    def _update(self, part: Part, choice: Choice | None) -> Update | None:
        """What a part of a step has brought, if anything."""
        number, session = part.number, self._sessions.get(part.number)
        if session is None:
            return None
        sequence = self.scheduler.running[number]
        request, scores = session.request, session.scores_of_prompt(not sequence.scoring)
        cached = sequence.cached or 0
        if choice is None:
            if request.sampling.tokens or sequence.scoring:
                return None if scores is None else Update(number, prompt_logprobs=scores)
            self._sessions.pop(number)
            self._close(number)
            return Update(number, prompt_logprobs=scores, ended="length", routing=session.experts())
        assert choice.token is not None, "the request has failed"
        self.scheduler.extend(number, choice.token)
        session.new += 1
        ended: Ending | None = None
        if session.new == request.sampling.tokens:
            ended = "length"
        if choice.token in request.ends:
            text, ended = "", "document"
        else:
            text = session.text.add(choice.token, session.new > request.sampling.min_tokens)
        if ended is not None and not session.text.stopped:
            text += session.text.end()
        if session.text.stopped and ended != "document":
            ended = "stop"
        if ended is not None:
            self._sessions.pop(number)
            self._close(number)
        logprobs = () if choice.logprob is None else (choice.logprob,)
        routing = None if ended is None else session.experts()
        return Update(number, text, (choice.token,), logprobs, scores, ended, cached, routing)

    def _close(self, number: int) -> None:
        self.scheduler.remove(number)
        self._closed.append(number)
