"""The feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn

from hexad.parallel.sharding import Shard
from hexad.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

from . import feedforward_inventory
from .ops import gelu, swiglu


class FeedForward(nn.Module):
    """SwiGLU, or GELU without a gate."""

    def __init__(self, inventory: feedforward_inventory.FeedForward, shard: Shard) -> None:
        super().__init__()
        self.gated = inventory.gated
        self.compiled = shard.compiled
        self.inner = ColumnParallelLinear(inventory.inner, shard)
        self.down = RowParallelLinear(inventory.down, shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        inner = self.inner(x)
        return self.down(swiglu(inner, self.compiled) if self.gated else gelu(inner))
