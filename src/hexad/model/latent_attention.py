"""Multi-head latent attention over this rank's heads."""

from torch import Tensor
from torch.nn import functional as F

from hexad.parallel.sharding import Shard
from hexad.parallel.tensor.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from hexad.parallel.tensor.regions import copied, gathered_first

from . import exact_ops, ops
from .attention import AttentionCore
from .dropout import Site, adapter_dropper
from .latent_attention_inventory import LatentAttentionSpec
from .norms import Norm
from .positions import Geometry


class LatentAttention(AttentionCore):
    """Multi-head latent attention (DeepSeek-V2: arXiv 2405.04434, section 2.1).

    In sequence parallel, latent vectors are made and normalised of this rank's tokens, and gathered by the
    layers that make heads of them: they are narrower than the residual stream.
    """

    q: ColumnParallelLinear
    q_up: ColumnParallelLinear
    q_down_norm: Norm
    kv_down_norm: Norm

    def __init__(self, inventory: LatentAttentionSpec, shard: Shard, layer: int) -> None:
        super().__init__(inventory, shard, layer)
        self.shard, self.mla = shard, inventory.mla
        self.widths = ops.Widths(
            self.mla.nope_dim, self.mla.rope_dim, self.mla.value_dim, inventory.head_width
        )
        self.down = ReplicatedLinear(inventory.down, shard)
        name = inventory.queries.name.rpartition(".")[2]
        self.add_module(name, ColumnParallelLinear(inventory.queries, shard))
        self.kv_up = ColumnParallelLinear(inventory.kv_up, shard)
        self.out = RowParallelLinear(inventory.out, shard)
        for norm in inventory.norms:
            self.add_module(norm.name.rpartition(".")[2], Norm(norm, shard))
        lora = inventory.layer.lora
        sites = Site.ADAPTED_QKV, Site.ADAPTED_Q, Site.ADAPTED_KV
        self.droppers = (
            *(adapter_dropper(lora, layer, site, shard) for site in sites),
            adapter_dropper(lora, layer, Site.ADAPTED_OUT, shard, inventory.out.inputs),
        )

    def forward(self, x: Tensor, where: Geometry) -> Tensor:
        """Normalised ``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        down, queries, kv_up, out = self.droppers
        latents = self.down(x, down.at(self._own(where.adapted)))
        *of_queries, latent, key = latents.split_with_sizes(self._latent_widths, 1)
        if of_queries:
            q = self.q_up(self.q_down_norm(of_queries[0]), queries.at(where.adapted))
        else:
            q = self.q(x, queries.at(where.adapted))
        q = self._rotated(q.unflatten(1, (self.heads, -1)), where)
        latent = self.kv_down_norm(latent)
        key = self._rotated(self._for_all_heads(key).unsqueeze(1), where)
        kv = self.kv_up(latent, kv_up.at(where.adapted)).unflatten(1, (self.heads, -1))
        k, v = ops.keys_and_values(kv, key, self.widths).split(self.heads, 1)
        attended = self._core(self._padded(q), k, v, where)
        return self.out(self._values(attended), out.at(where.adapted))

    @property
    def _latent_widths(self) -> tuple[int, ...]:
        """Columns of the first product: queries' latent vector, that of keys and values, the keys' rotated
        part."""
        widths = self.mla.kv_rank, self.mla.rope_dim
        return widths if self.mla.q_rank is None else (self.mla.q_rank, *widths)

    def _own(self, rows: Tensor | None) -> Tensor | None:
        """Keys of dropout ``[2, tokens]`` of this rank's rows of the residual stream."""
        if rows is None or not self.shard.sequence:
            return rows
        axis = self.shard.tensor
        return rows.chunk(axis.size, dim=1)[axis.rank]

    def _for_all_heads(self, key: Tensor) -> Tensor:
        """The part of the keys that all heads have in common, of all tokens; each rank's heads make a part of
        its gradient."""
        axis = self.shard.tensor
        if axis.size == 1:
            return key
        return (gathered_first if self.shard.sequence else copied)(key, axis)

    def _rotated(self, x: Tensor, where: Geometry) -> Tensor:
        assert where.cos is not None and where.sin is not None
        rotate = (exact_ops if self.exact else ops).rotate_pairs
        return rotate(x, where.cos, where.sin, self.compiled)

    def _padded(self, q: Tensor) -> Tensor:
        """Queries as wide as attention computes them."""
        missing = self.width - q.shape[2]
        return F.pad(q, (0, missing)) if missing else q

    def _values(self, attended: Tensor) -> Tensor:
        """``[tokens, heads * width]`` of attention -> ``[tokens, heads * value width]``."""
        if self.width == self.mla.value_dim:
            return attended
        return attended.unflatten(1, (self.heads, -1))[..., : self.mla.value_dim].flatten(1)
