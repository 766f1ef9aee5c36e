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
    """Where pairs stand when they are sorted by expert.

    Attributes:
        order: int64 ``[rows]``, the pair of each row; rows beyond the last offset belong to none.
        places: int64 ``[tokens, pairs per token]``, the row of each pair; 0 of those that have none.
        present: bool ``[tokens, pairs per token]``, whether a pair has a row; None where all have.
        offsets: int32 ``[experts]``, where the rows of each expert end.
    """

    order: Tensor
    places: Tensor
    present: Tensor | None
    offsets: Tensor

    @classmethod
    def of(cls, experts: Tensor, count: int, rows: int | None = None, complete: bool = False) -> Permutation:
        """The permutation of pairs.

        Args:
            experts: int64 ``[tokens, pairs per token]``, of each pair; ``count`` or more of those without a
                row.
            count: of experts.
            rows: how many there are at the most; by default one of every pair. Pairs beyond have no row.
            complete: every pair has a row.
        """
        ids, order = experts.flatten().sort(stable=True)
        offsets = torch.searchsorted(ids, torch.arange(count, device=ids.device), right=True, out_int32=True)
        places = order.argsort().view(experts.shape)
        if complete:
            return cls(order, places, None, offsets)
        present = places < offsets[-1]
        if rows is not None and rows < len(order):
            order, present, offsets = order[:rows], present & (places < rows), offsets.clamp(max=rows)
        return cls(order, torch.where(present, places, 0), present, offsets)

    @property
    def pairs_per_token(self) -> int:
        """Experts of a token."""
        return self.places.shape[1]

    def rows_of(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> ``[rows, hidden]``: the token of each row."""
        return x[self.order // self.pairs_per_token]

    def sums_of(self, rows: Tensor, exactly: bool = False) -> Tensor:
        """``[rows, hidden]`` -> ``[tokens, hidden]``: the sum of each token's rows, in the order of its
        pairs; ``exactly``: in float64, one after the other."""
        return gathered_sum(rows, self.places, self.present, exactly)

    def values_of(self, pairs: Tensor) -> Tensor:
        """``[tokens, pairs per token]`` -> ``[rows]``: the value of each row's pair."""
        return pairs.flatten()[self.order]

    def pairs_of(self, values: Tensor) -> Tensor:
        """``[rows]`` -> ``[tokens, pairs per token]``: the value of each pair's row; 0 of those without."""
        pairs = values[self.places]
        return pairs if self.present is None else torch.where(self.present, pairs, 0)


def gathered_sum(rows: Tensor, places: Tensor, present: Tensor | None, exactly: bool = False) -> Tensor:
    """Sums of rows.

    Args:
        rows: ``[rows, hidden]``.
        places: int64 ``[sums, terms]``, the row of each term.
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
    weights = None if present is None else present.to(rows.dtype)
    total, *_ = torch.embedding_bag(
        rows,
        places.flatten(),
        torch.arange(0, places.numel(), places.shape[1], device=places.device),
        False,
        0,  # sum
        False,
        None if weights is None else weights.flatten(),
    )
    return total
