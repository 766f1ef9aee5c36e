"""How rows reach their experts on other ranks, and come back.

A dispatcher makes a :class:`Route` of the experts that a router has chosen. ``Route.scatter`` brings rows to
the experts, ``Route.collect`` brings back what the experts made of them and adds up each token's: either is
the other's backward pass.

On a host, which knows all counts, buffers are as large as they must be. On a device they have a static bound
in training, ``allowance`` times the rows of an even load, so that no count is read by the host, and what did
not fit is counted in :attr:`Route.missed`. Where nobody looks at that, as in evaluation and generation, the
host reads the counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hexad.comm import all_gather, all_to_all, reduce_scatter
from hexad.config.model import DispatcherName
from hexad.topology.mesh import ExpertRanks

from ..contributions import applied
from ..pointwise import maybe_compiled
from .kinds import KINDS, BufferBound
from .permutation import Permutation, gathered_sum, sorted_by


class Route(ABC):
    """The way of one microbatch's rows through one layer's experts: there first (:meth:`scatter_both`), then
    back and forth.

    Attributes:
        offsets: int32 ``[experts of this rank]``, where the rows of each end.
        missed: int64, rows that found no place in a buffer; None where all have one.
        exactly: rows of a token are added in float64, in a fixed order.
    """

    offsets: Tensor
    missed: Tensor | None = None
    exactly: bool = False

    @abstractmethod
    def scatter(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[rows of this rank's experts, hidden]``, sorted by expert."""

    @abstractmethod
    def collect(self, rows: Tensor) -> Tensor:
        """Rows in the order of :meth:`scatter` -> ``[tokens, hidden]``: the sum of each token's rows."""

    @abstractmethod
    def scatter_both(self, x: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`scatter`, and ``pairs [tokens, top_k]`` -> ``[rows of this rank's experts]``: the value of
        each row's pair."""

    @abstractmethod
    def collect_both(
        self, rows: Tensor, values: Tensor, needs_rows: bool = True, needs_values: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """The inverse of :meth:`scatter_both`; values are summed over the ranks that have a part of the
        expert. What is not needed has no meaning."""


class Separate(Route):
    """Sends rows and the values of their pairs one after the other."""

    def scatter_both(self, x: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Scatter rows and the values of their pairs."""
        return self.scatter(x), self.scatter_pairs(pairs)

    def collect_both(
        self, rows: Tensor, values: Tensor, needs_rows: bool = True, needs_values: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sum each token's rows, and the values of its pairs."""
        collected = self.collect(rows) if needs_rows else None
        return collected, self.collect_pairs(values) if needs_values else None

    @abstractmethod
    def scatter_pairs(self, pairs: Tensor) -> Tensor:
        """``[tokens, top_k]`` -> ``[rows of this rank's experts]``: the value of each row's pair."""

    @abstractmethod
    def collect_pairs(self, values: Tensor) -> Tensor:
        """Values in the order of :meth:`scatter_pairs` -> ``[tokens, top_k]``, summed over the ranks that
        have a part of the expert."""


@dataclass(frozen=True)
class Local(Separate):
    """All experts are on this rank.

    Attributes:
        permutation: of the tokens' pairs.
    """

    permutation: Permutation
    exactly: bool = False

    @property
    def offsets(self) -> Tensor:  # type: ignore[override]
        """Ends of the rows of each of this rank's experts."""
        return self.permutation.offsets

    def scatter(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[rows of this rank's experts, hidden]``, sorted by expert."""
        return self.permutation.rows_of(x)

    def collect(self, rows: Tensor) -> Tensor:
        """Rows of this rank's experts -> ``[tokens, hidden]``: the sum of each token's rows."""
        return self.permutation.sums_of(rows, self.exactly)

    def scatter_pairs(self, pairs: Tensor) -> Tensor:
        """``[tokens, top_k]`` -> ``[rows of this rank's experts]``: the value of each row's pair."""
        return self.permutation.values_of(pairs)

    def collect_pairs(self, values: Tensor) -> Tensor:
        """Values of rows -> ``[tokens, top_k]``, summed over the ranks that have a part of the expert."""
        return self.permutation.pairs_of(values)


@dataclass(frozen=True)
class Gathered(Separate):
    """All ranks of the group have all tokens, and sum what their experts make of them.

    Attributes:
        permutation: of the pairs of all tokens whose experts this rank has.
        ranks: the group.
        tokens, most: of this rank, and of the rank that has most: others gather padding.
        missed: see :class:`Route`.
    """

    permutation: Permutation
    ranks: ExpertRanks
    tokens: int
    most: int
    missed: Tensor | None = None

    @property
    def offsets(self) -> Tensor:  # type: ignore[override]
        """Ends of the rows of each of this rank's experts."""
        return self.permutation.offsets

    def scatter(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[rows of this rank's experts, hidden]``, sorted by expert."""
        return self.permutation.rows_of(self._whole(x))

    def collect(self, rows: Tensor) -> Tensor:
        """Rows of this rank's experts -> ``[tokens, hidden]``: the sum of each token's rows."""
        return reduce_scatter(self.permutation.sums_of(rows), self.ranks.axis)[: self.tokens]

    def scatter_pairs(self, pairs: Tensor) -> Tensor:
        """``[tokens, top_k]`` -> ``[rows of this rank's experts]``: the value of each row's pair."""
        return self.permutation.values_of(self._whole(pairs))

    def collect_pairs(self, values: Tensor) -> Tensor:
        """Values of rows -> ``[tokens, top_k]``, summed over the ranks that have a part of the expert."""
        pairs = self.permutation.pairs_of(values).contiguous()
        return reduce_scatter(pairs, self.ranks.axis)[: self.tokens]

    def _whole(self, x: Tensor) -> Tensor:
        """The rows of all ranks."""
        return all_gather(_padded(x, self.most).contiguous(), self.ranks.axis)


def _padded(x: Tensor, rows: int, value: int = 0) -> Tensor:
    """``x [rows, columns]`` with more rows, of one value."""
    return x if len(x) == rows else F.pad(x, (0, 0, 0, rows - len(x)), value=value)


@dataclass(frozen=True)
class Exchanged(Separate):
    """Each row is sent to the ranks of its expert: sorted by rank and expert, exchanged, sorted by expert.

    Attributes:
        order: int64 ``[rows sent]``, the pair of each row that is sent, ``slices`` for each of a token's
            experts.
        places, present: of the pairs among the rows sent, see :class:`Permutation`.
        arrived: the permutation of rows that were received, a pair each.
        ranks: the group.
        send, receive: rows for and from each rank; None where all are as many.
        slices: ranks that have a part of each expert.
        exactly, missed: see :class:`Route`.
    """

    order: Tensor
    places: Tensor
    present: Tensor
    arrived: Permutation
    ranks: ExpertRanks
    send: list[int] | None
    receive: list[int] | None
    slices: int
    exactly: bool = False
    missed: Tensor | None = None

    @property
    def offsets(self) -> Tensor:  # type: ignore[override]
        """Ends of the rows of each of this rank's experts."""
        return self.arrived.offsets

    def scatter(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[rows of this rank's experts, hidden]``, sorted by expert."""
        return self._out(x[self.order // self.places.shape[1]])

    def collect(self, rows: Tensor) -> Tensor:
        """Rows of this rank's experts -> ``[tokens, hidden]``: the sum of each token's rows."""
        return gathered_sum(self._back(rows), self.places, self.present, self.exactly)

    def scatter_pairs(self, pairs: Tensor) -> Tensor:
        """``[tokens, top_k]`` -> ``[rows of this rank's experts]``: the value of each row's pair."""
        # Those of an expert's slices are neighbours.
        order = self.order if self.slices == 1 else self.order // self.slices
        return self._out(pairs.flatten()[order])

    def collect_pairs(self, values: Tensor) -> Tensor:
        """Values of rows -> ``[tokens, top_k]``, summed over the ranks that have a part of the expert."""
        pairs = torch.where(self.present, self._back(values)[self.places], 0)
        return pairs if self.slices == 1 else pairs.unflatten(1, (-1, self.slices)).sum(2)

    def _out(self, rows: Tensor) -> Tensor:
        """Rows in the order of ranks -> those of this rank's experts, sorted."""
        return all_to_all(rows, self.ranks.axis, self.send, self.receive)[self.arrived.order]

    def _back(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`_out`, and a row for pairs that have none."""
        back = rows.new_empty((len(self.order) + 1, *rows.shape[1:]))
        sent = rows[self.arrived.places[:, 0]]
        return all_to_all(sent, self.ranks.axis, self.receive, self.send, back)


@dataclass(frozen=True)
class Dispatcher:
    """Sends rows to their experts.

    Attributes:
        kind: one of :data:`~hexad.parallel.expert.kinds.KINDS`.
        experts: of all ranks.
        ranks: among which they are divided.
        allowance: rows of a buffer of static size, as a multiple of an even load; None where the host reads
            counts.
        exactly: see :class:`Route`.
        compiled: arithmetic of indexes is compiled, see :mod:`hexad.parallel.pointwise`.
    """

    kind: DispatcherName
    experts: int
    ranks: ExpertRanks
    allowance: float | None = None
    exactly: bool = False
    compiled: bool = False

    @property
    def local(self) -> int:
        """Experts of this rank."""
        return self.experts // self.ranks.experts

    def route(
        self, experts: Tensor, complete: bool = False, most: int | None = None, bounded: bool = True
    ) -> Route:
        """The route of a microbatch's pairs; all ranks of the group together.

        Args:
            experts: int64 ``[tokens, top_k]``; ``self.experts`` for pairs that are not sent anywhere.
            complete: all pairs are sent.
            most: tokens of the rank that has most; None: all have as many.
            bounded: buffers may be too small, as :attr:`allowance` says.
        """
        most = len(experts) if most is None else most
        if self.ranks.axis.size == 1:
            return Local(Permutation.of(experts, self.experts, complete=complete), self.exactly)
        route: Route = self._route(self, experts, most, bounded)
        return route

    @cached_property
    def _route(self) -> Any:
        return resolve_name(KINDS[self.kind].route)

    def gathered(self, experts: Tensor, most: int, bounded: bool) -> Route:
        """A route of ``all_gather``."""
        axis, top_k = self.ranks.axis, experts.shape[1]
        every = all_gather(_padded(experts, most, self.experts).contiguous(), axis)
        local, first = self.local, self.ranks.place * self.local
        mine, count = maybe_compiled(_local_experts, self.compiled)(every, first, local)
        if self.allowance is None or not bounded:
            permutation = Permutation.of(mine, local, int(count))
            return Gathered(permutation, self.ranks, len(experts), most)
        rows = self.bound(most, top_k).rows
        missed = (count - rows).clamp(min=0)
        permutation = Permutation.of(mine, local, rows)
        return Gathered(permutation, self.ranks, len(experts), most, missed)

    def _destinations(self, experts: Tensor) -> Tensor:
        """Numbers by which pairs are sorted for sending, ``slices`` for each pair, ``[tokens, top_k *
        slices]``: the rank, times the experts of a rank, plus the expert's number there."""
        if self.ranks.slices == 1 and self.ranks.expert == tuple(range(self.ranks.axis.size)):
            return experts
        place = torch.div(experts, self.local, rounding_mode="floor")
        return (self._ranks_of[place] * self.local + (experts % self.local)[..., None]).flatten(1)

    @cached_property
    def _ranks_of(self) -> Tensor:
        """int64 ``[parts of the experts + 1, slices]``: the ranks that have a part; a number above all ranks
        for pairs that are not sent."""
        ranks = self.ranks
        shape = (ranks.experts + 1, ranks.slices)
        table = torch.full(shape, ranks.axis.size, dtype=torch.int64, device="cpu")
        for rank, (expert, part) in enumerate(zip(ranks.expert, ranks.slice)):
            table[expert, part] = rank
        return table.to(ranks.axis.device)

    def bound(self, tokens: int, top_k: int) -> BufferBound:
        """The size of buffers, given the tokens of the rank that has most."""
        assert self.allowance is not None
        return BufferBound(self.allowance, tokens, top_k, self.ranks.axis.size, self.ranks.slices, self.local)

    def exchanged(self, experts: Tensor, most: int, bounded: bool) -> Route:
        """A route of ``alltoall``."""
        size, destinations = self.ranks.axis.size, self._destinations(experts)
        order, bounds = sorted_by(destinations.flatten(), size * self.local)
        places = order.argsort().view(destinations.shape)
        if self.allowance is not None and bounded:
            return self._in_slots(destinations, order, bounds, places, most)
        counts = bounds.diff().view(size, self.local)
        arriving = all_to_all(counts, self.ranks.axis)
        send, receive = counts.sum(1).tolist(), arriving.sum(1).tolist()
        numbers = torch.arange(self.local, device=counts.device).repeat(size)
        ids = numbers.repeat_interleave(arriving.flatten(), output_size=sum(receive))
        arrived = Permutation.of(ids[:, None], self.local, complete=True)
        rows, present = sum(send), places < bounds[-1]
        sent = order[:rows], places.clamp(max=rows), present, arrived
        return Exchanged(*sent, self.ranks, send, receive, self.ranks.slices, self.exactly)

    def _in_slots(
        self, destinations: Tensor, order: Tensor, bounds: Tensor, places: Tensor, most: int
    ) -> Route:
        """A route in which each rank has as many slots for each other one: sizes that the host knows.

        Args:
            destinations: of each pair, see :meth:`_destinations`.
            order, bounds: pairs by destination, see :func:`sorted_by`.
            places: of each pair in that order.
            most: tokens of the rank that has most.
        """
        size, local = self.ranks.axis.size, self.local
        slots = self.bound(most, places.shape[1] // self.ranks.slices).slots
        numbers = torch.arange(slots, dtype=torch.int32, device=order.device)
        ends, chosen = maybe_compiled(_slots, self.compiled)(bounds, numbers, size, local, len(order))
        arriving = all_to_all(ends, self.ranks.axis)
        ids = torch.searchsorted(arriving, numbers.expand(size, slots).contiguous(), right=True)
        # Every slot is sent back, also empty ones: each has a row of its own.
        arrived = Permutation.of(ids.view(-1, 1), local, complete=True)
        find = maybe_compiled(_places_in_slots, self.compiled)
        slot, present, missed = find(destinations, places, bounds, size, local, slots)
        sent = order[chosen], slot, present, arrived, self.ranks, None, None
        return Exchanged(*sent, self.ranks.slices, self.exactly, missed)


def _local_experts(experts: Tensor, first: int, local: int) -> tuple[Tensor, Tensor]:
    """(the number on this rank of each pair's expert, ``local`` of others; how many pairs have one here)."""
    here = (experts >= first) & (experts < first + local)
    return torch.where(here, experts - first, local), here.sum()


def _slots(bounds: Tensor, numbers: Tensor, size: int, local: int, pairs: int) -> tuple[Tensor, Tensor]:
    """(int32 ``[ranks, experts of a rank]``, where the slots of each expert end among those for its rank;
    int32 ``[ranks * slots]``, the sorted pair in each slot, any in an empty one)."""
    starts = bounds[:-1].view(size, local)[:, :1]
    ends = (bounds[1:].view(size, local) - starts).clamp(max=len(numbers))
    return ends, (starts + numbers).clamp(max=max(0, pairs - 1)).flatten()


def _places_in_slots(
    destinations: Tensor, places: Tensor, bounds: Tensor, size: int, local: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(the slot of each pair, the number of all slots for pairs without one; whether it has one; how many
    pairs found none)."""
    rank = torch.div(destinations, local, rounding_mode="floor").clamp(max=size)
    sent = rank < size
    within = places - bounds[rank.clamp(max=size - 1) * local]
    present = sent & (within < slots)
    return torch.where(present, rank * slots + within, size * slots), present, (sent & ~present).sum()


class _Dispatch(torch.autograd.Function):
    """Rows and the weights of their pairs, at their experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        ctx.route = route
        return route.scatter_both(x, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_weights: Tensor) -> tuple[Tensor | None, ...]:
        gradients, (needs_x, needs_weights, _) = (gradient, of_weights), ctx.needs_input_grad
        whole = (part.contiguous() for part in gradients)
        grad_x, grad_weights = ctx.route.collect_both(*whole, needs_x, needs_weights)
        return grad_x if needs_x else None, grad_weights, None


class _Combine(torch.autograd.Function):
    """The sums of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, like: Tensor, unused: bool) -> Tensor:
        ctx.route = route
        return torch.empty_like(like) if unused else route.collect(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.route.scatter(gradient.contiguous()), None, None, None


def dispatch(x: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """``x [tokens, hidden]`` and ``weights [tokens, top_k]`` -> those of the rows of this rank's experts."""
    rows: tuple[Tensor, Tensor] = applied(_Dispatch, x, weights, route)
    return rows


def combine(rows: Tensor, route: Route, like: Tensor, unused: bool = False) -> Tensor:
    """Combine the results of experts -> ``[tokens, hidden]``, summed over each token's experts.

    Args:
        rows: in the order in which :func:`dispatch` returned them.
        route: as given there.
        like: a tensor of the result's shape and format.
        unused: the result is not used, and neither summed nor sent.
    """
    total: Tensor = applied(_Combine, rows, route, like, unused)
    return total
