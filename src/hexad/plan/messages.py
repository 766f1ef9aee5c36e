"""Boundary tensors that a pipeline rank holds because of messages, through one step."""

from __future__ import annotations

from collections import deque

from hexad.parallel.pipeline.schedule import Action, Message, Schedule
from hexad.parallel.pipeline.transfers import AHEAD, transfers


class Messages:
    """Follows :class:`hexad.parallel.pipeline.exchange.Exchange` and what the executor hands over between
    stages of one rank; all of it is decided by the schedule alone.

    Args:
        schedule: of a training step.
        pipeline: the rank.
    """

    def __init__(self, schedule: Schedule, pipeline: int) -> None:
        self._schedule = schedule
        self._own = schedule.stages_of(pipeline)
        self._order = transfers(schedule)[pipeline]
        self._position = {transfer.message: index for index, transfer in enumerate(self._order)}
        self._next = 0
        self._arriving: set[Message] = set()
        self._outgoing: set[Message] = set()
        self._sent: dict[int, list[int]] = {}
        self._unanswered: deque[int] = deque(maxlen=AHEAD)
        self._handed: set[Message] = set()

    @property
    def held(self) -> int:
        """Tensors that are on their way, from or to here, or wait for the next stage of this rank."""
        waiting = len(self._arriving) + len(self._outgoing) + len(self._unanswered) + len(self._handed)
        return waiting + sum(map(len, self._sent.values()))

    def before(self, action: Action) -> None:
        """What the action needs belongs to it from now on."""
        message = self._schedule.received(action)
        if message is None:
            kind, stage, microbatch = action
            if kind != "W":
                self._handed.discard(_source(kind, stage, microbatch))
            return
        position = self._position[message]
        self._advance(position)
        self._arriving.discard(message)
        received = self._order[position]
        sent = self._sent.get(received.peer, [])
        self._sent[received.peer] = [delivered for delivered in sent if delivered > received.delivered]
        self._advance()

    def after(self, action: Action) -> None:
        """What the action made leaves for its next stage."""
        message = self._schedule.sent(action)
        if message is not None:
            self._outgoing.add(message)
            self._advance(self._position[message])
            return
        kind, stage, microbatch = action
        made = Message("F" if kind == "F" else "B", stage, microbatch)
        if kind != "W" and made.target in self._own:
            self._handed.add(made)

    def _advance(self, until: int = -1) -> None:
        while self._next < len(self._order):
            transfer = self._order[self._next]
            if transfer.outgoing:
                if transfer.message not in self._outgoing:
                    return
                self._outgoing.discard(transfer.message)
                if transfer.answered:
                    self._sent.setdefault(transfer.peer, []).append(transfer.delivered)
                else:
                    self._unanswered.append(transfer.delivered)
            elif self._next > until and len(self._arriving) >= AHEAD:
                return
            else:
                self._arriving.add(transfer.message)
            self._next += 1


def _source(kind: str, stage: int, microbatch: int) -> Message:
    """The message that an action needs."""
    return Message("F", stage - 1, microbatch) if kind == "F" else Message("B", stage + 1, microbatch)
