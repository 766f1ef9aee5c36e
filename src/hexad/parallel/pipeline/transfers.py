"""The messages of a pipeline rank: which it sends and receives, in which order, and which are in flight. No
torch: the executor sends tensors through it, the memory model counts what it holds.

All ranks start their sends and receives in one global order, that of the times at which a simulation produces
the messages. Then there is no deadlock, even if a communicator executes strictly in order (NCCL): the two
ends of the earliest unfinished message have nothing left to do before it.
"""

from collections import deque
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

from .schedule import Message, Schedule
from .simulate import Costs, simulate

AHEAD = 4
"""Receives posted before they are needed, and sends in flight whose receipt no later message implies: enough
to overlap a message with an action, few enough to hold."""


class MessageEnd(NamedTuple):
    """A message as one of its two ends sees it.

    Attributes:
        outgoing: this rank sends it.
        peer: the other rank.
        delivered: position of the action that needs it (outgoing) or produces it (incoming) among the peer's
            actions. A message from a later action of the peer implies that it is done.
        answered: of an outgoing one: whether such a message will follow.
    """

    message: Message
    outgoing: bool
    peer: int
    delivered: int
    answered: bool = False


Order = tuple[MessageEnd, ...]
"""A rank's transfers."""


@lru_cache(maxsize=32)
def transfers(schedule: Schedule, costs: Costs | None = None) -> tuple[Order, ...]:
    """Every rank's transfers in the global order, that of a simulation with these costs (uniform by default).

    Any costs do, as long as all ranks use the same; with those of the run messages wait less for each other.
    Kept for a few schedules: a search asks for the same ones again and again.
    """
    timeline = simulate(schedule, costs or Costs.uniform(schedule.stages))
    consumed = {
        message: index
        for actions in schedule.ranks
        for index, action in enumerate(actions)
        if (message := schedule.received(action)) is not None
    }
    orders = []
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            message = schedule.sent(action)
            if message is not None:
                orders.append((timeline.times[rank][index][1], message, rank, index))
    result: list[list[MessageEnd]] = [[] for _ in schedule.ranks]
    for _, message, sender, index in sorted(orders):
        receiver = schedule.placement[message.target]
        result[sender].append(MessageEnd(message, True, receiver, consumed[message]))
        result[receiver].append(MessageEnd(message, False, sender, index))
    return tuple(map(_with_answers, result))


def _with_answers(ends: list[MessageEnd]) -> Order:
    last: dict[int, int] = {}
    for transfer in ends:
        if not transfer.outgoing:
            last[transfer.peer] = max(transfer.delivered, last.get(transfer.peer, -1))
    return tuple(
        transfer._replace(answered=transfer.outgoing and transfer.delivered <= last.get(transfer.peer, -1))
        for transfer in ends
    )


T = TypeVar("T")
Received = TypeVar("Received", covariant=True)


class Waiting(Protocol[Received]):
    """A transfer in flight."""

    def wait(self) -> Received:
        """Block until it is over; a received tensor may be used then."""
        ...


class Transport(Protocol[T]):
    """Starts transfers."""

    def send(self, message: T, peer: int, tag: int) -> Waiting[object]:
        """Start sending to the pipeline rank ``peer``."""
        ...

    def receive(self, message: Message, peer: int, tag: int) -> Waiting[T]:
        """Start receiving a message."""
        ...


class Exchange(Generic[T]):
    """Sends and receives one step's messages of this rank, in the order of its entry of :func:`transfers`."""

    def __init__(self, schedule: Schedule, order: Order, transport: Transport[T]) -> None:
        self._order = order
        self._transport = transport
        self._microbatches = schedule.microbatches
        self._position = {transfer.message: index for index, transfer in enumerate(order)}
        self._next = 0
        self._outgoing: dict[Message, T] = {}
        self._arriving: dict[Message, Waiting[T]] = {}
        self._sent: dict[int, deque[tuple[int, Waiting[object]]]] = {}  # to be answered, by peer
        self._unanswered: deque[Waiting[object]] = deque()

    @property
    def held(self) -> int:
        """The number of tensors under way, from or to this rank."""
        waiting = len(self._arriving) + len(self._outgoing) + len(self._unanswered)
        return waiting + sum(map(len, self._sent.values()))

    def send(self, message: Message, tensor: T) -> None:
        """Start sending; the tensor must not be changed any more."""
        self._outgoing[message] = tensor
        self._advance(self._position[message])

    def receive(self, message: Message) -> T:
        """The message, once it has arrived."""
        position = self._position[message]
        self._advance(position)
        tensor = self._arriving.pop(message).wait()
        self._release(self._order[position])
        self._advance()
        return tensor

    def finish(self) -> None:
        """Wait until all sends are complete."""
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
                pending = self._transport.send(self._outgoing.pop(message), peer, self._tag(message))
                self._keep(transfer, pending)
            else:
                if self._next > until and len(self._arriving) >= AHEAD:
                    return
                arriving = self._transport.receive(message, peer, self._tag(message))
                self._arriving[message] = arriving
            self._next += 1

    def _keep(self, transfer: MessageEnd, pending: Waiting[object]) -> None:
        """Hold a send buffer. Waiting for the oldest is safe: by the common order of transfers its receiver
        is never prevented from posting it."""
        if transfer.answered:
            self._sent.setdefault(transfer.peer, deque()).append((transfer.delivered, pending))
            return
        self._unanswered.append(pending)
        if len(self._unanswered) > AHEAD:
            self._unanswered.popleft().wait()

    def _release(self, received: MessageEnd) -> None:
        """Release send buffers whose receipt is implied by the message just received: the peer needed them
        before it."""
        pending = self._sent.get(received.peer)
        if pending:
            kept = [entry for entry in pending if entry[0] > received.delivered]
            for position, work in pending:
                if position <= received.delivered:
                    work.wait()  # at once
            self._sent[received.peer] = deque(kept)

    def _tag(self, message: Message) -> int:
        return 2 * (message.stage * self._microbatches + message.microbatch) + (message.kind == "B")
