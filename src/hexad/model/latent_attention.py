"""Multi-head latent attention over this rank's heads."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hexad.parallel.sharding import Shard
from hexad.parallel.tensor.adapters import Drop
from hexad.parallel.tensor.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from hexad.parallel.tensor.regions import copied, gathered_first

from . import exact_ops, ops
from .attention import AttentionCore
from .dropout import Site, adapter_dropper
from .latent_attention_inventory import LatentAttentionSpec
from .norms import Norm
from .positions import Geometry
from .recompute import recomputable


class LatentAttention(AttentionCore):
    """Multi-head latent attention (DeepSeek-V2: arXiv 2405.04434, section 2.1).

    In sequence parallel, latent vectors are made and normalised of this rank's tokens, and gathered by the
    layers that make heads of them: they are narrower than the residual stream. Where queries, keys and values
    are recomputed (``mla_up``), these layers gather again, on all ranks in the same order, rather than that
    the vectors of all tokens are kept; the part of the keys that all heads share is kept as it was gathered.
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
            self.add_module(norm.name.rpartition(".")[2], Norm(norm, shard, "latent_norms"))
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
        of_queries = self.q_down_norm(*of_queries) if of_queries else x
        latent, key = self.kv_down_norm(latent), self._for_all_heads(key).unsqueeze(1)
        if where.cache is not None:
            q = self._queries(of_queries, where, queries.at(where.adapted))
            kept = torch.cat((latent, self._rotated(key, where).squeeze(1)), dim=1)
            attended = where.cache.attend_latent(self.layer, q, kept, self, self.kernel)
            return self.out(attended, out.at(where.adapted))
        q = recomputable("mla_up", self._padded_queries, of_queries, where, queries.at(where.adapted))
        k, v = recomputable("mla_up", self._rotated_pairs, latent, key, where, kv_up.at(where.adapted))
        attended = self._core(q, k, v, where)
        return self.out(self.joined(attended.unflatten(1, (self.heads, -1))), out.at(where.adapted))

    def _queries(self, x: Tensor, where: Geometry, drop: Drop | None) -> Tensor:
        """Rotated queries ``[tokens, heads, head_dim]``, given normalised latent vectors, or the layer's
        input where queries have none, ``[tokens (/ size in sequence parallel), width]``."""
        project = self.q if self.mla.q_rank is None else self.q_up
        return self._rotated(project(x, drop).unflatten(1, (self.heads, -1)), where)

    def _padded_queries(self, x: Tensor, where: Geometry, drop: Drop | None) -> Tensor:
        """Rotated queries ``[tokens, heads, padded width]``, given what :meth:`_queries` takes."""
        return self.padded(self._queries(x, where, drop))

    def _rotated_pairs(
        self, latent: Tensor, key: Tensor, where: Geometry, drop: Drop | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values ``[tokens, heads, padded width]``, as :meth:`_keys_and_values` makes them, given
        the keys' common part ``[tokens, 1, rope_dim]`` before it is rotated."""
        return self._keys_and_values(latent, self._rotated(key, where), drop)

    def _keys_and_values(
        self, latent: Tensor, key: Tensor, drop: Drop | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values ``[tokens, heads, padded width]``, given normalised latent vectors ``[tokens (/
        size in sequence parallel), kv_rank]`` and the rotated part ``[tokens, 1, rope_dim]``."""
        kv = self.kv_up(latent, drop).unflatten(1, (self.heads, -1))
        k, v = recomputable("pairs", ops.keys_and_values, kv, key, self.widths).split(self.heads, 1)
        return k, v

    def _exchanged(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange heads for tokens among context ranks; received tensors are recomputed together with sent
        ones."""
        if self.ulysses.size == 1:
            return q, k, v
        return recomputable("mla_up", super()._exchanged, q, k, v)

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

    def padded(self, q: Tensor) -> Tensor:
        """Queries as wide as attention computes them."""
        missing = self.width - q.shape[2]
        return F.pad(q, (0, missing)) if missing else q

    def joined(self, attended: Tensor) -> Tensor:
        """``[tokens, heads, width]`` of attention -> ``[tokens, heads * value width]``."""
        return attended[..., : self.mla.value_dim].flatten(1)

    # Generation: see LatentHeads.

    @property
    def kv_rank(self) -> int:
        """Leading elements of these that are the latent vector."""
        return self.mla.kv_rank

    @property
    def latent(self) -> int:
        """Elements that are kept of a token."""
        return self.mla.kv_rank + self.mla.rope_dim

    def expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latent vectors ``[tokens, kv_rank + rope_dim]``."""
        latent, key = latents.split_with_sizes((self.mla.kv_rank, self.mla.rope_dim), 1)
        return self._keys_and_values(latent, key.unsqueeze(1))

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries to which latent vectors are the keys."""
        nope, rope = q.split_with_sizes((self.mla.nope_dim, self.mla.rope_dim), 2)
        keys = slice(0, self.mla.nope_dim)
        inner = nope.transpose(0, 1)  # [heads, tokens, nope_dim]
        rows = torch.bmm(inner, self._per_head(self.kv_up.weight)[:, keys])
        adapters = self.kv_up.adapters()
        if adapters is not None:
            rows += torch.bmm(inner, self._per_head(adapters.b[0])[:, keys]) @ adapters.a * adapters.scale
        return torch.cat((rows.transpose(0, 1), rope), dim=2)

    def restored(self, weighted: Tensor) -> Tensor:
        """Values of weighted sums of latent vectors."""
        values = slice(self.mla.nope_dim, None)
        sums = weighted.transpose(0, 1)  # [heads, tokens, kv_rank]
        out = torch.bmm(sums, self._per_head(self.kv_up.weight)[:, values].transpose(1, 2))
        adapters = self.kv_up.adapters()
        if adapters is not None:
            b = self._per_head(adapters.b[0])[:, values]
            out += torch.bmm(sums @ adapters.a.t(), b.transpose(1, 2)) * adapters.scale
        return out.transpose(0, 1).flatten(1)

    def _per_head(self, rows: Tensor) -> Tensor:
        """``[heads, nope_dim + value_dim, ...]`` of what has so many rows for each head."""
        return rows.unflatten(0, (self.heads, -1))
