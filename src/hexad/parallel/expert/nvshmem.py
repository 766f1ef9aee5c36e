"""Rows sent to their experts by exchanges whose numbers stay on the device (:mod:`hexad.comm.symmetric`).

All ranks gather the counts of all others, 8 bytes per expert and rank, and compute from them which rows find
a place: those of a rank's experts have the bound in common, whatever ranks they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hexad.comm import all_gather
from hexad.comm.symmetric import Symmetric

from ..pointwise import maybe_compiled
from .dispatch import Dispatcher, Route, Separate
from .permutation import gathered_sum, sorted_by


@dataclass(frozen=True)
class Symmetrical(Separate):
    """Rows are sent as many as there are, and received without gaps between ranks.

    Attributes:
        memory: through which they are exchanged.
        pairs: int64 ``[pairs]``, the pair in each place of what is sent.
        places, present: ``[tokens, top_k]``, of the pairs in what is sent, see :class:`Permutation`.
        sent: int64 ``[experts]``, rows for each.
        received: int64 ``[2, experts]``, rows of each of this rank's experts from each rank, and where these
            begin.
        offsets: see :class:`Route`.
        rows: of this rank's experts, at the most.
        room: rows of a buffer.
        missed: see :class:`Route`.
        compiled: see :class:`Dispatcher`.
        arrival: int64 ``[rows]``, the place in the buffer of each row, as soon as one was sent.
    """

    memory: Symmetric
    pairs: Tensor
    places: Tensor
    present: Tensor
    sent: Tensor
    received: Tensor
    offsets: Tensor
    rows: int
    room: int
    missed: Tensor | None = None
    compiled: bool = False
    arrival: list[Tensor] = field(default_factory=list)

    def scatter(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[rows of this rank's experts, hidden]``, sorted by expert."""
        return self._out(x, self.pairs // self.places.shape[1])

    def collect(self, rows: Tensor) -> Tensor:
        """Rows of this rank's experts -> ``[tokens, hidden]``: the sum of each token's rows."""
        return gathered_sum(self._back(rows), self.places, self.present)

    def scatter_pairs(self, pairs: Tensor) -> Tensor:
        """``[tokens, top_k]`` -> ``[rows of this rank's experts]``: the value of each row's pair."""
        return self._out(pairs.flatten(), self.pairs)

    def collect_pairs(self, values: Tensor) -> Tensor:
        """Values of rows -> ``[tokens, top_k]``, summed over the ranks that have a part of the expert."""
        return torch.where(self.present, self._back(values)[self.places], 0)

    def _out(self, x: Tensor, index: Tensor) -> Tensor:
        """Rows of tokens or pairs -> those of this rank's experts, sorted, without gaps."""
        buffer, arrived = self.memory.to_experts(x, index, self.sent, self.room)
        if not self.arrival:  # the same of all exchanges
            find = maybe_compiled(_gapless, self.compiled)
            self.arrival.append(find(arrived, self.received, self.rows, self.room))
        return buffer[self.arrival[0]]

    def _back(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`_out`, and a row for pairs that have none."""
        back = self.memory.to_tokens(rows, self.received, self.room, len(self.pairs))
        return back[: len(self.pairs) + 1]


def route(dispatcher: Dispatcher, experts: Tensor, most: int, bounded: bool) -> Route:
    """A route of a microbatch's pairs; where the host shall read counts, that of ``alltoall``."""
    if dispatcher.allowance is None or not bounded:
        return dispatcher.exchanged(experts, most, bounded)
    axis, local, top_k = dispatcher.ranks.axis, dispatcher.local, experts.shape[1]
    size, even = axis.size, most * top_k
    order, bounds = sorted_by(experts.flatten(), dispatcher.experts)
    counts = bounds.diff()
    every = all_gather(counts.long(), axis)
    rows = dispatcher.bound(most, top_k).rows
    plan = maybe_compiled(_plan, dispatcher.compiled)
    sent, received, offsets = plan(every, size, local, axis.rank, rows)
    # A place that is never sent remains at the end, for pairs without one.
    find = maybe_compiled(_places, dispatcher.compiled)
    pairs, places, present, missed = find(experts, order, bounds, order.argsort(), sent)
    room = max(even + 1, rows + local)
    memory = axis.buffer(Symmetric)
    way = pairs, places, present, sent, received, offsets, rows, room, missed
    return Symmetrical(memory, *way, dispatcher.compiled)


def _plan(every: Tensor, size: int, local: int, rank: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows that this rank sends to each expert; that each of its experts receives of each rank, and where
    these begin; int32, where those of each of its experts end), given int64 ``[ranks * experts]``, the pairs
    of each rank for each expert. The first rows of a rank have a place, in the order of its experts and of
    the ranks."""
    row_counts = every.view(size, size, local).permute(1, 2, 0).reshape(size, local * size)
    ends = row_counts.cumsum(1).clamp(max=rows)
    placed = torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1]))
    sent = placed.view(size, local, size)[:, :, rank].flatten()
    received = torch.stack((placed[rank], ends[rank] - placed[rank]))
    return sent, received, ends[rank].view(local, size)[:, -1].int()


def _gapless(arrived: Tensor, received: Tensor, rows: int, room: int) -> Tensor:
    """The place of each row in a buffer of ``room``, given how many rows came from each rank, and where they
    are: there, and without gaps."""
    numbers = torch.arange(rows, device=arrived.device)
    run = torch.searchsorted(received.sum(0), numbers, right=True).clamp(max=received.shape[1] - 1)
    return (numbers + (arrived[1] - received[1])[run]).clamp(max=room - 1)


def _places(
    experts: Tensor, order: Tensor, bounds: Tensor, ranks: Tensor, sent: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the pair in each place of what is sent; the place of each pair, the number of all pairs for those
    without one; whether it has one; how many found none), given pairs sorted by expert."""
    ends, last = sent.cumsum(0), len(sent) - 1
    numbers = torch.arange(len(order), device=order.device)
    expert = torch.searchsorted(ends, numbers, right=True).clamp(max=last)
    shift = bounds[:-1] - (ends - sent)
    pairs = order[(numbers + shift[expert]).clamp(max=max(0, len(order) - 1))]
    mine = experts.clamp(max=last)
    place = ranks.view(experts.shape) - shift[mine]
    sent_here = experts <= last
    present = sent_here & (place < ends[mine])
    missed = (sent_here & ~present).sum()
    return pairs, torch.where(present, place, len(order)), present, missed
