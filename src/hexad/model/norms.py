"""Normalisation layers. Every tensor rank holds their weights whole."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from hexad.config.schema import ModelSettings
from hexad.parallel.sharding import Placement, ShardedModule, replicated

from .ops import rms_norm


class RmsNorm(ShardedModule):
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467).

    Args:
        partial: each tensor rank normalises only part of the activations, so that weight gradients are parts.
    """

    weight: nn.Parameter

    def __init__(self, width: int, eps: float, place: Placement, *, partial: bool) -> None:
        super().__init__()
        self.eps = eps
        self.declare(
            "weight", place.parameter(width), replicated("weight", (width,), partial=partial, fill=1.0)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> the same."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(ShardedModule):
    """LayerNorm (Ba et al., arXiv 1607.06450); ``partial`` as for :class:`RmsNorm`."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, width: int, eps: float, place: Placement, *, partial: bool) -> None:
        super().__init__()
        self.eps = eps
        self.declare(
            "weight", place.parameter(width), replicated("weight", (width,), partial=partial, fill=1.0)
        )
        self.declare("bias", place.parameter(width), replicated("bias", (width,), partial=partial))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> the same."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def residual_norm(model: ModelSettings, place: Placement) -> RmsNorm | LayerNorm:
    """The family's norm over the residual stream."""
    kind = LayerNorm if model.family == "gpt2" else RmsNorm
    return kind(model.hidden, model.norm_eps, place, partial=place.sequence)
