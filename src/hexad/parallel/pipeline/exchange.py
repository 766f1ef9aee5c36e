"""The messages of one pipeline rank on their way: when transfers are started, and when buffers are free.

The order is that of :mod:`.transfers`; :mod:`hexad.plan.messages` counts what is held here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from hexad.comm import Pending, receive_async, send_async
from hexad.topology.mesh import Axis

from .schedule import Message, Schedule
from .transfers import AHEAD, Transfer


class Exchange:
    """Carries one step's messages of this rank.

    Args:
        schedule: whose messages.
        order: this rank's entry of :func:`.transfers.transfers`.
        axis: the pipeline axis.
        buffer: makes an uninitialised tensor for a microbatch's message.
    """

    def __init__(
        self, schedule: Schedule, order: list[Transfer], axis: Axis, buffer: Callable[[int], torch.Tensor]
    ) -> None:
        self._order = order
        self._axis = axis
        self._buffer = buffer
        self._microbatches = schedule.microbatches
        self._position = {transfer.message: index for index, transfer in enumerate(order)}
        self._next = 0
        self._outgoing: dict[Message, torch.Tensor] = {}
        self._arriving: dict[Message, Pending] = {}
        self._sent: dict[int, deque[tuple[int, Pending]]] = {}  # to be answered, by peer
        self._unanswered: deque[Pending] = deque()

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start sending; the tensor must not be changed any more."""
        self._outgoing[message] = tensor
        self._advance(self._position[message])

    def receive(self, message: Message) -> torch.Tensor:
        """The message, once it is here."""
        position = self._position[message]
        self._advance(position)
        tensor = self._arriving.pop(message).wait()
        self._release(self._order[position])
        self._advance()
        return tensor

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for pending in (*self._unanswered, *(work for sent in self._sent.values() for _, work in sent)):
            pending.wait()

    def _advance(self, until: int = -1) -> None:
        """Start transfers in order: those up to position ``until``, then as many as may be ahead."""
        while self._next < len(self._order):
            transfer = self._order[self._next]
            message, peer = transfer.message, transfer.peer
            if transfer.outgoing:
                if message not in self._outgoing:
                    return
                pending = send_async(self._outgoing.pop(message), self._axis, peer, self._tag(message))
                self._keep(transfer, pending)
            else:
                if self._next > until and len(self._arriving) >= AHEAD:
                    return
                buffer = self._buffer(message.microbatch)
                self._arriving[message] = receive_async(buffer, self._axis, peer, self._tag(message))
            self._next += 1

    def _keep(self, transfer: Transfer, pending: Pending) -> None:
        """Hold on to what is being sent. Waiting for the oldest is safe: by the common order of transfers its
        receiver is never kept from posting it."""
        if transfer.answered:
            self._sent.setdefault(transfer.peer, deque()).append((transfer.delivered, pending))
            return
        self._unanswered.append(pending)
        if len(self._unanswered) > AHEAD:
            self._unanswered.popleft().wait()

    def _release(self, received: Transfer) -> None:
        """Let go of what the peer must have had before it could make what has just been received."""
        pending = self._sent.get(received.peer)
        if pending:
            kept = [entry for entry in pending if entry[0] > received.delivered]
            for position, work in pending:
                if position <= received.delivered:
                    work.wait()  # at once
            self._sent[received.peer] = deque(kept)

    def _tag(self, message: Message) -> int:
        return 2 * (message.stage * self._microbatches + message.microbatch) + (message.kind == "B")
