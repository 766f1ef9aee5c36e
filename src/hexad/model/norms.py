"""Normalisation layers. Every tensor rank holds their weights."""

from torch import Tensor, nn

from hexad.parallel.sharding import Shard, ShardedModule

from .norms_inventory import NormSpec
from .ops import layer_norm, rms_norm


class Norm(ShardedModule):
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467) or LayerNorm (Ba et al., arXiv 1607.06450)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, inventory: NormSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.kind, self.eps = inventory.kind, inventory.eps
        self.declare(*inventory.parameters)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``[..., width]``."""
        if self.kind == "layer":
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, self.shard.compiled)

    @property
    def vectors(self) -> tuple[nn.Parameter, ...]:
        """The parameters in the order of the function's arguments: the weight, and LayerNorm's bias."""
        return (self.weight, self.bias) if self.kind == "layer" else (self.weight,)
