"""The feed-forward layer."""

from torch import Tensor, nn

from hexad.parallel.sharding import Shard
from hexad.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

from . import exact_ops, ops
from .dropout import Site, adapter_dropper
from .feedforward_inventory import FeedForwardSpec
from .positions import Geometry
from .recompute import recomputable


class FeedForward(nn.Module):
    """SwiGLU, or GELU without a gate."""

    def __init__(self, inventory: FeedForwardSpec, shard: Shard, layer: int) -> None:
        super().__init__()
        self.gated = inventory.gated
        self.compiled, self.exact = shard.compiled, shard.exact
        self.inner = ColumnParallelLinear(inventory.inner, shard)
        self.down = RowParallelLinear(inventory.down, shard)
        self.droppers = (
            adapter_dropper(inventory.layer.lora, layer, Site.ADAPTED_INNER, shard),
            adapter_dropper(inventory.layer.lora, layer, Site.ADAPTED_DOWN, shard, inventory.width),
        )

    @property
    def last(self) -> RowParallelLinear:
        """The product that makes the branch's result."""
        return self.down

    def forward(self, x: Tensor, where: Geometry) -> Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same; ``where``: the tokens' geometry."""
        first, second = (dropper.at(where.adapted) for dropper in self.droppers)
        inner, functions = self.inner(x, first), exact_ops if self.exact else ops
        if self.gated:
            activated = recomputable("activations", functions.swiglu, inner, self.compiled)
        else:
            activated = recomputable("activations", functions.gelu, inner)
        return self.down(activated, second)
