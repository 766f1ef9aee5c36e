"""Rows of a tensor that context ranks hold by token: which tokens a rank has, and what all of them see."""

from __future__ import annotations

from functools import lru_cache

import torch

from hexad.comm import all_gather, all_reduce
from hexad.topology.mesh import Axis

from .slice import Slice


def numbers_of(slice_: Slice, rank: int) -> torch.Tensor:
    """int64 ``[tokens of a rank]``: their places in the flattened microbatch, ascending."""
    return torch.cat([torch.arange(*run) for run in slice_.runs[rank]])


def gathered_rows(x: torch.Tensor, slice_: Slice, axis: Axis) -> torch.Tensor:
    """The rows of all tokens, in the order of the tokens, on every rank.

    Args:
        x: ``[this rank's tokens, ...]``.
        slice_: which rank holds which tokens, or which group of ranks whose tokens follow each other.
        axis: the context axis.
    """
    rows = all_gather(x.contiguous(), axis)
    return rows if slice_.whole else rows[_places(slice_, x.device)]


def selected_rows(
    x: torch.Tensor, wanted: torch.Tensor, numbers: torch.Tensor | None, axis: Axis
) -> torch.Tensor:
    """The rows of some tokens, on every rank; bitwise the same on all.

    Args:
        x: ``[this rank's tokens, ...]``.
        wanted: int64, numbers of tokens.
        numbers: int64 ``[this rank's tokens]``, ascending; None where every rank has all.
        axis: the context axis.
    """
    if numbers is None:
        return x[wanted]
    place = torch.searchsorted(numbers, wanted).clamp(max=len(numbers) - 1)
    held = numbers[place] == wanted
    found = x[place].masked_fill(~held.view(-1, *[1] * (x.dim() - 1)), 0.0)
    return all_reduce(found, axis)  # one rank holds each, the others add zeros


@lru_cache(maxsize=4)
def _places(slice_: Slice, device: torch.device) -> torch.Tensor:
    """int64 ``[tokens]``: for each token its row where the ranks' rows follow each other."""
    numbers = torch.cat([numbers_of(slice_, rank) for rank in range(slice_.ranks)])
    return numbers.argsort().to(device)
