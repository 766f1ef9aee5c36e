"""Experts that are kept of a forward pass and imposed on another: in reinforcement learning, sampled tokens
pass in training the experts that they passed in generation (Rollout Routing Replay, arXiv 2510.11370)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """The experts of tokens in one layer.

    Attributes:
        experts: int64 ``[tokens, top_k]``, the likeliest first; a negative number: the router chooses.
        weights: as large, float32 at least; None: the router's.
    """

    experts: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class Replay:
    """Experts of a rank's tokens, imposed on a forward pass or kept of it.

    Attributes:
        layers: numbers of the layers that have experts.
        experts: int64 ``[tokens, layers, top_k]``, those that are imposed; None: those that routers choose
            are kept.
        weights: as large, those that are imposed; None: the router's weights of these experts.
        kept: by layer, what routers have chosen for this rank's rows.
    """

    layers: Sequence[int]
    experts: Tensor | None = None
    weights: Tensor | None = None
    kept: dict[int, Chosen] = field(default_factory=dict)

    def imposed(self, layer: int, first: int, tokens: int, rows: int) -> Chosen | None:
        """The choices imposed on a layer's ``rows`` rows, of which ``tokens`` are tokens, from number
        ``first`` of this context rank's on; None: nothing."""
        if self.experts is None:
            return None
        place = self.layers.index(layer)
        experts = self.experts[first : first + tokens, place]
        experts = torch.nn.functional.pad(experts, (0, 0, 0, rows - tokens), value=-1)
        if self.weights is None:
            return Chosen(experts, None)
        weights = self.weights[first : first + tokens, place]
        return Chosen(experts, torch.nn.functional.pad(weights, (0, 0, 0, rows - tokens)))

    def keep(self, layer: int, experts: Tensor, weights: Tensor) -> None:
        """Keep what a router has chosen, unless experts are imposed."""
        if self.experts is None:
            self.kept[layer] = Chosen(experts, weights)


class _Imposed(torch.autograd.Function):
    """Other weights in place of a router's, whose gradient they pass on."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, imposed: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, imposed.to(weights.dtype), weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def with_weights(weights: Tensor, chosen: Chosen) -> Tensor:
    """A router's weights ``[rows, top_k]``, those that are imposed in their place. The backward pass takes
    them for the router's own."""
    if chosen.weights is None:
        return weights
    result: Tensor = _Imposed.apply(weights, chosen.weights, chosen.experts[:, :1] >= 0)
    return result
