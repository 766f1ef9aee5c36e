"""Tokens sent to the ranks of their experts by DeepEP (:mod:`hexad.comm.deep_ep`), and sorted there."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from hexad.comm.deep_ep import DeepEp

from .dispatch import Dispatcher, Route
from .permutation import Permutation


@dataclass(eq=False)
class Deduplicated(Route):
    """A token is sent once to each rank that has experts of it, and summed there before it comes back.

    The way is determined when the first rows are sent, together with the weights of their pairs: only then
    are :attr:`offsets` and :attr:`missed` known.

    Attributes:
        dispatcher: of the layer.
        experts: int64 ``[tokens, top_k]``, -1 of pairs that are not sent.
        most: tokens of the rank that has most; None where the host waits for the number of tokens.
    """

    dispatcher: Dispatcher
    experts: Tensor
    most: int | None
    _arrived: Permutation = field(init=False)
    _handle: Any = field(init=False)

    @property
    def offsets(self) -> Tensor:  # type: ignore[override]
        """Ends of the rows of each of this rank's experts."""
        return self._arrived.offsets

    def scatter_both(self, x: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Scatter rows and the values of their pairs."""
        dispatcher = self.dispatcher
        arrival = self._exchange.dispatch(x, self.experts, pairs, dispatcher.experts, self.most)
        self._handle, local = arrival.handle, dispatcher.local
        present = arrival.experts >= 0
        chosen, rows = torch.where(present, arrival.experts, local), arrival.pairs
        if rows is None:
            assert dispatcher.allowance is not None and self.most is not None
            top_k = chosen.shape[1]
            rows = min(ceil(dispatcher.allowance * self.most * top_k), len(chosen) * min(top_k, local))
            self.missed = (present.sum() - rows).clamp(min=0)
        self._arrived = Permutation.of(chosen, local, rows)
        return self._arrived.rows_of(arrival.x), self._arrived.values_of(arrival.weights)

    def collect_both(
        self, rows: Tensor, values: Tensor, needs_rows: bool = True, needs_values: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sum each token's rows, and the values of its pairs."""
        sums, pairs = self._arrived.sums_of(rows), self._arrived.pairs_of(values) if needs_values else None
        return self._exchange.combine(sums, self.experts, self._handle, pairs)

    def scatter(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[rows of this rank's experts, hidden]``, sorted by expert."""
        return self._arrived.rows_of(self._exchange.again(x, self.experts, self._handle))

    def collect(self, rows: Tensor) -> Tensor:
        """Rows of this rank's experts -> ``[tokens, hidden]``: the sum of each token's rows."""
        return self._exchange.combine(self._arrived.sums_of(rows), self.experts, self._handle)[0]

    @property
    def _exchange(self) -> DeepEp:
        return self.dispatcher.ranks.axis.buffer(DeepEp)


def route(dispatcher: Dispatcher, experts: Tensor, most: int, bounded: bool) -> Route:
    """A route of a microbatch's pairs."""
    sent = torch.where(experts < dispatcher.experts, experts, -1)
    static = dispatcher.allowance is not None and bounded
    return Deduplicated(dispatcher, sent, most if static else None)
