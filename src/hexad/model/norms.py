"""Normalisation layers. Every tensor rank holds their weights."""

from torch import Tensor, nn

from hexad.parallel.sharding import Shard, ShardedModule

from . import exact_ops, ops
from .norms_inventory import NormSpec
from .recompute import recomputable
from .recompute_inventory import RecomputedPart


class Norm(ShardedModule):
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467) or LayerNorm (Ba et al., arXiv 1607.06450).

    Attributes:
        part: of a layer, what its output is; see :mod:`hexad.model.recompute`.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, inventory: NormSpec, shard: Shard, part: RecomputedPart = "norms") -> None:
        super().__init__(shard)
        self.part: RecomputedPart = part
        self.kind, self.eps = inventory.kind, inventory.eps
        self.declare(*inventory.parameters)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``[..., width]``."""
        return recomputable(self.part, self.normalised, x)

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``[..., width]``, whether or not the result will be recomputed."""
        functions = exact_ops if self.shard.exact else ops
        if self.kind == "layer":
            return functions.layer_norm(x, self.weight, self.bias, self.eps)
        return functions.rms_norm(x, self.weight, self.eps, self.shard.compiled)

    @property
    def vectors(self) -> tuple[nn.Parameter, ...]:
        """The parameters in the order of the function's arguments: the weight, and LayerNorm's bias."""
        return (self.weight, self.bias) if self.kind == "layer" else (self.weight,)
