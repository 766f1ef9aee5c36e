"""The ranks that hold one copy of the model: the first of them, the leader, schedules, and all compute."""

from __future__ import annotations

from collections import deque
from math import isnan

import numpy as np

from hexad.comm.messages import Outbox, take
from hexad.config import NOT_FINITE
from hexad.dataset.text.token_text import TokenText
from hexad.topology.mesh import Mesh

from .batch import TokenBatch, TokenSpan
from .messages import Add, Cancel, Stop
from .requests import Request, RequestUpdate, RoutedExperts
from .scheduler import Scheduler
from .sequence import Sequence
from .text_stream import TextStream
from .worker import Worker


class Replica:
    """One copy of the model, as each of its ranks sees it.

    The leader calls :meth:`receive`, :meth:`advance` and :meth:`stop`, the others :meth:`follow`.

    Attributes:
        leads: whether this rank is the leader.
        scheduler: of the leader; not used on others.

    Args:
        worker: of this rank.
        scheduler: decides what is computed.
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
        self._sequences: dict[int, Sequence] = {}
        self._begun: list[Sequence] = []
        self._ended: list[int] = []
        self._under_way: deque[tuple[TokenBatch, list[RequestUpdate] | None]] = deque()
        self._complete: list[RequestUpdate] = []  # without a batch

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return self.scheduler.idle and not self._under_way and not self._complete

    def receive(self, message: Add | Cancel) -> None:
        """Act on a message of the first rank, on the leader."""
        match message:
            case Add(number, request):
                self.add(number, request)
            case Cancel(number):
                self.cancel(number)

    def add(self, number: int, request: Request) -> None:
        """Accept a request; ``number`` is above those before."""
        sampling = request.sampling
        if not sampling.tokens and len(request.prompt) == 1:
            routing = self._without_tokens() if sampling.routing else None
            self._complete.append(RequestUpdate(number, prompt_logprobs=(), ended="length", routing=routing))
            return
        sequence = Sequence(number, request)
        decoder = self._text.decoder(request.prompt)
        sequence.text = TextStream(decoder, self._text.specials, sampling.stop, request.shown)
        self._sequences[number] = sequence
        self.scheduler.add(sequence)
        self._begun.append(sequence)

    def _without_tokens(self) -> RoutedExperts:
        """The experts of no tokens."""
        model = self.worker.model.model
        shape = (0, len(model.expert_layers), 0 if model.moe is None else model.moe.top_k)
        return RoutedExperts(np.empty(shape, np.int32), np.empty(shape, np.float32))

    def cancel(self, number: int) -> None:
        """Forget a request."""
        if number in self._sequences:
            self._close(number)

    def advance(self) -> list[RequestUpdate]:
        """Begin the next batch, and return the results of the oldest one under way, unless it need not be
        waited for."""
        if self._complete:
            updates, self._complete = self._complete, []
            return updates
        planned = self.scheduler.plan()
        if planned is not None:
            self._begin(planned)
        if not self._under_way or (planned is not None and len(self._under_way) < self.scheduler.lanes):
            return []
        return self._end()

    def follow(self) -> None:
        """Compute what the leader plans, until it stops.

        Raises:
            CommError: a rank is lost.
        """
        while not isinstance(message := take(self._world, self._leader), Stop):
            updates = self.worker.compute_batch(message)
            if updates is not None:
                self._outbox.put(updates, [self._leader])
        self.worker.forget()
        self._outbox.flush()

    def stop(self) -> None:
        """End what is under way, forget all requests, and let the other ranks return."""
        while self._under_way:
            self._end()
        for number in list(self._sequences):
            self.cancel(number)
        self._begun, self._ended = [], []
        self.worker.forget()
        self._outbox.put(Stop(), self._others)
        self._outbox.flush()

    def _begin(self, planned: TokenBatch) -> None:
        """Send a batch, with the sequences that are new or have ended, to the other ranks, and compute it."""
        batch = planned._replace(begun=tuple(self._begun), ended=tuple(self._ended))
        self._begun, self._ended = [], []
        self._outbox.put(batch, self._others)
        self._under_way.append((batch, self.worker.compute_batch(batch)))

    def _end(self) -> list[RequestUpdate]:
        """Wait for the oldest batch."""
        batch, local_updates = self._under_way.popleft()
        updates = self._results(batch, local_updates)
        self.scheduler.done(batch)
        complete = (self._complete_update(span, updates.get(span.number)) for span in batch.spans)
        return [update for update in complete if update is not None]

    def _results(
        self, batch: TokenBatch, local_updates: list[RequestUpdate] | None
    ) -> dict[int, RequestUpdate]:
        """The updates of a batch, from the last stage or this rank; experts of all stages are kept."""
        routed = [span for span in batch.spans if span.routing]
        stages: list[dict[int, RequestUpdate]] = []
        for rank in self._stages if routed else self._stages[-1:]:
            local = rank == self._rank and local_updates is not None
            updates = local_updates if local else take(self._world, rank)
            stages.append({update.number: update for update in updates or ()})
        for span in routed:
            if (sequence := self._sequences.get(span.number)) is not None:
                experts = (updates[span.number].routing for updates in stages)
                sequence.routing.append((span.begin, tuple(filter(None, experts))))
        return stages[-1]

    def _complete_update(self, span: TokenSpan, update: RequestUpdate | None) -> RequestUpdate | None:
        """The update of a span with text, end and what is complete; None if there is nothing to report."""
        sequence = self._sequences.get(span.number)
        if sequence is None or update is None:
            return None
        update.routing = None
        if update.ended == "failed":
            self._close(span.number)
            return update
        if update.prompt_logprobs is not None:
            if any(isnan(logprob.value) for logprob in update.prompt_logprobs):
                self._close(span.number)
                return RequestUpdate(span.number, NOT_FINITE, ended="failed")
            sequence.prompt_logprobs.update(enumerate(update.prompt_logprobs, span.begin))
        update.prompt_logprobs = sequence.complete_prompt_logprobs()
        if update.tokens:
            (token,) = update.tokens
            self.scheduler.extend(sequence, token)
            update.text, update.ended = sequence.append_text(token)
            update.cached = sequence.cached or 0
        elif not (sequence.request.sampling.tokens or sequence.scoring):
            update.ended = "length"
        elif update.prompt_logprobs is None:
            return None
        if update.ended is not None:
            self._close(span.number)
            update.routing = sequence.experts()
        return update

    def _close(self, number: int) -> None:
        """Forget a sequence that has ended."""
        del self._sequences[number]
        self.scheduler.remove(number)
        self._ended.append(number)
