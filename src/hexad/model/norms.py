"""Normalisation layers. Every tensor rank holds their weights."""

from __future__ import annotations

import torch
from torch import nn

from hexad.parallel.sharding import Shard, ShardedModule

from .norms_inventory import NormSpec
from .ops import layer_norm, rms_norm


class RmsNorm(ShardedModule):
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467)."""

    weight: nn.Parameter

    def __init__(self, inventory: NormSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.eps = inventory.eps
        self.declare(*inventory.parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``[..., width]``."""
        return rms_norm(x, self.weight, self.eps, self.shard.compiled)

    @property
    def vectors(self) -> tuple[nn.Parameter, ...]:
        """The parameters in the order of the function's arguments: the weight."""
        return (self.weight,)


class LayerNorm(ShardedModule):
    """LayerNorm (Ba et al., arXiv 1607.06450)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, inventory: NormSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.eps = inventory.eps
        self.declare(*inventory.parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``[..., width]``."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    @property
    def vectors(self) -> tuple[nn.Parameter, ...]:
        """The parameters in the order of the function's arguments: the weight and the bias."""
        return self.weight, self.bias


def make_norm(inventory: NormSpec, shard: Shard) -> RmsNorm | LayerNorm:
    """The norm that an inventory describes."""
    return (LayerNorm if inventory.kind == "layer" else RmsNorm)(inventory, shard)
