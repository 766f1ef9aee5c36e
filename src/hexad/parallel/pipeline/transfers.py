"""Which messages a pipeline rank sends and receives, and in which order; no torch, for the memory model too.

All ranks start their sends and receives in one global order, that of the times at which a simulation produces
the messages. Then there is no deadlock, even if a communicator executes strictly in order (NCCL): the two
ends of the earliest unfinished message have nothing left to do before it.
"""

from __future__ import annotations

from typing import NamedTuple

from .schedule import Message, Schedule
from .simulate import Costs, simulate

AHEAD = 4
"""Receives posted before they are needed, and sends in flight whose receipt no later message implies: enough
to overlap a message with an action, few enough to hold."""


class Transfer(NamedTuple):
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


def transfers(schedule: Schedule) -> list[list[Transfer]]:
    """Every rank's transfers in the global order."""
    timeline = simulate(schedule, Costs.uniform(schedule.stages))
    consumed = {
        message: index
        for actions in schedule.ranks
        for index, action in enumerate(actions)
        if (message := schedule.received(action)) is not None
    }
    found = []
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            message = schedule.sent(action)
            if message is not None:
                found.append((timeline.times[rank][index][1], message, rank, index))
    result: list[list[Transfer]] = [[] for _ in schedule.ranks]
    for _, message, sender, index in sorted(found):
        receiver = schedule.placement[message.target]
        result[sender].append(Transfer(message, True, receiver, consumed[message]))
        result[receiver].append(Transfer(message, False, sender, index))
    return [_with_answers(own) for own in result]


def _with_answers(own: list[Transfer]) -> list[Transfer]:
    last: dict[int, int] = {}
    for transfer in own:
        if not transfer.outgoing:
            last[transfer.peer] = max(transfer.delivered, last.get(transfer.peer, -1))
    return [
        transfer._replace(answered=True)
        if transfer.outgoing and transfer.delivered <= last.get(transfer.peer, -1)
        else transfer
        for transfer in own
    ]
