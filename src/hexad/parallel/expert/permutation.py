"""Rows sorted by expert, and their way back: both gathers, which depend neither on atomic operations nor on
the order in which a device runs them.

A token and one of its experts are a *pair*; pairs are numbered token by token. Rows are pairs in the order of
experts, and of tokens in each. No count is read by the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Permutation(NamedTuple):
    """The order of pairs sorted by expert.

    Attributes:
        order: int64 ``[rows]``, the pair of each row; rows from the last offset on belong to none.
        places: int64 ``[tokens, pairs per token]``, the row of each pair. Pairs without one have the last
            row, which then belongs to no pair.
        present: bool ``[tokens, pairs per token]``, whether a pair has a row; None where all have.
        offsets: int32 ``[experts]``, where the rows of each expert end.
    """

    order: Tensor
    places: Tensor
    present: Tensor | None
    offsets: Tensor

    @classmethod
    def of(cls, experts: Tensor, count: int, most: int | None = None, complete: bool = False) -> Permutation:
        """The permutation of pairs.

        Args:
            experts: int64 ``[tokens, pairs per token]``, of each pair; ``count`` or more of those without a
                row.
            count: of experts.
            most: pairs that have a row at the most, the first ones in the order of experts; None for all.
            complete: every pair has a row.
        """
        order, bounds = sorted_by(experts.flatten(), count)
        places, offsets = order.argsort().view(experts.shape), bounds[1:]
        if complete:
            return cls(order, places, None, offsets)
        most = len(order) if most is None else min(most, len(order))
        offsets = offsets.clamp(max=most)
        present = places < offsets[-1]
        order = torch.cat((order[:most], order.new_zeros(1)))
        return cls(order, torch.where(present, places, most), present, offsets)

    @property
    def pairs_per_token(self) -> int:
        """Experts of a token."""
        return self.places.shape[1]

    def rows_of(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[rows, hidden]``: the token of each row."""
        if not len(x):
            return x.new_zeros((len(self.order), x.shape[1]))
        return x[self.order // self.pairs_per_token]

    def sums_of(self, rows: Tensor, exactly: bool = False) -> Tensor:
        """``[rows, hidden]`` -> ``[tokens, hidden]``: the sum of each token's rows, in the order of its
        pairs; ``exactly``: in float64, one after the other."""
        return gathered_sum(rows, self.places, self.present, exactly)

    def values_of(self, pairs: Tensor) -> Tensor:
        """``[tokens, pairs per token]`` -> ``[rows]``: the value of each row's pair."""
        if not pairs.numel():
            return pairs.new_zeros(len(self.order))
        return pairs.flatten()[self.order]

    def pairs_of(self, values: Tensor) -> Tensor:
        """``[rows]`` -> ``[tokens, pairs per token]``: the value of each pair's row; 0 of those without."""
        pairs = values[self.places]
        return pairs if self.present is None else torch.where(self.present, pairs, 0)


def sorted_by(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(int64, places of int64 ``ids`` in ascending order of these, equal ones in order; int32 ``[count +
    1]``, where the places of each number begin, and where those of the last end)."""
    ids, order = ids.sort(stable=True)
    numbers = torch.arange(count + 1, device=ids.device)
    return order, torch.searchsorted(ids, numbers, out_int32=True)


def gathered_sum(rows: Tensor, places: Tensor, present: Tensor | None, exactly: bool = False) -> Tensor:
    """Sums of rows.

    Args:
        rows: ``[rows, hidden]``.
        places: int64 ``[sums, terms]``, the row of each term; the last row for terms that do not count.
        present: bool, which terms count; None for all.
        exactly: add in float64, one term after the other.

    Returns:
        ``[sums, hidden]``, added in one pass over the rows.
    """
    if not places.numel():
        return rows.new_zeros((len(places), rows.shape[1]))
    if exactly:
        total = rows.new_zeros((len(places), rows.shape[1]), dtype=torch.float64)
        for term in range(places.shape[1]):
            values = rows[places[:, term]].double()
            total += values if present is None else torch.where(present[:, term, None], values, 0.0)
        return total.to(rows.dtype)
    starts = torch.arange(0, places.numel(), places.shape[1], device=places.device)
    last = None if present is None else len(rows) - 1
    by_sum = 0
    total, *_ = torch.embedding_bag(rows, places.flatten(), starts, False, by_sum, False, None, False, last)
    return total
