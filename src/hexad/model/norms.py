"""Normalisation layers. Every tensor rank holds their weights whole."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from hexad.config.schema import ModelSettings
from hexad.parallel.sharding import ShardedModule, replicated

from .ops import rms_norm


class RmsNorm(ShardedModule):
    """RMSNorm with a weight held whole by every tensor rank."""

    def __init__(
        self, width: int, eps: float, *, partial: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.eps = eps
        weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.declare("weight", weight, replicated("weight", (width,), partial=partial, fill=1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> the same."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(ShardedModule):
    """LayerNorm with weight and bias held whole by every tensor rank."""

    def __init__(
        self, width: int, eps: float, *, partial: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.eps = eps
        weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        bias = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.declare("weight", weight, replicated("weight", (width,), partial=partial, fill=1.0))
        self.declare("bias", bias, replicated("bias", (width,), partial=partial))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> the same."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def residual_norm(
    model: ModelSettings, *, partial: bool, dtype: torch.dtype, device: torch.device
) -> RmsNorm | LayerNorm:
    """The family's norm over the residual stream."""
    kind = LayerNorm if model.family == "gpt2" else RmsNorm
    return kind(model.hidden, model.norm_eps, partial=partial, dtype=dtype, device=device)
