"""The transformer, for every family, written as for one device."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexad.config.model import ModelSettings
from hexad.config.schema import ParallelSettings
from hexad.parallel import exact
from hexad.parallel.context.exchange import numbers_of
from hexad.parallel.context.slice import Slice
from hexad.parallel.context.spans import Spans
from hexad.parallel.inventory import KV_AXES
from hexad.parallel.sharding import Shard, ShardedModule
from hexad.parallel.tensor.embedding import VocabParallelEmbedding, VocabParallelHead
from hexad.topology.mesh import Mesh

from .attention import Attention
from .attention_inventory import AttentionSpec
from .auxiliary import Auxiliary
from .block_inventory import BlockSpec, BranchSpec
from .dropout import DropoutKey, Dropper, Site, row_keys
from .experts import MixtureOfExperts
from .experts_inventory import ExpertsSpec
from .feedforward import FeedForward
from .feedforward_inventory import FeedForwardSpec
from .inventory import ModelInventory, PositionsSpec, StageSpec
from .latent_attention import LatentAttention
from .latent_attention_inventory import LatentAttentionSpec
from .norms import Norm
from .positions import Geometry, KeyValueCache, Rotary
from .recompute import Last, recomputing
from .recompute_inventory import Recompute
from .replay import Replay
from .residual import Residual

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""``precision.dtype`` -> torch's, of parameters and activations: fp8 is a format of products."""


class Branch(Protocol):
    """A module from the normalised residual stream to what is added to the stream; its specification is a
    :class:`~hexad.model.block_inventory.BranchSpec`."""

    @property
    def last(self) -> Last:
        """The operation that computes its result."""
        ...

    def __call__(self, x: Tensor, where: Geometry) -> Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        ...


BRANCHES: dict[type[BranchSpec], Callable[[Any, Shard, int], nn.Module]] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    FeedForwardSpec: FeedForward,
    ExpertsSpec: MixtureOfExperts,
}
"""The module of a branch, constructed from its specification, the shard and the number of the layer."""


class Block(nn.Module):
    """One layer: branches, each normalised before and added to the residual stream."""

    def __init__(self, block: BlockSpec, shard: Shard, layer: int, model: ModelSettings) -> None:
        super().__init__()
        norms, branches, residuals = [], [], []
        for site, (norm, branch) in zip((Site.ATTENTION, Site.FEED_FORWARD), block.branches, strict=True):
            norms.append(Norm(norm, shard))
            branches.append(BRANCHES[type(branch)](branch, shard, layer))
            self.add_module(norm.name.rpartition(".")[2], norms[-1])
            self.add_module(branch.name.rpartition(".")[2], branches[-1])
            dropper = Dropper(model.dropout, layer, site, shard.device, shard.compiled)
            residuals.append(Residual(model.residual_multiplier, dropper, shard.compiled, shard.exact))
        self.norms, self.branches, self.residuals = norms, cast(list[Branch], branches), residuals

    def forward(self, x: Tensor, where: Geometry) -> Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        branch = self.branches[0](self.norms[0](x), where)
        for residual, norm, following in zip(self.residuals, self.norms[1:], self.branches[1:]):
            x, normed = residual.add_and_normalise(x, branch, where.rows, norm)
            branch = following(normed, where)
        return self.residuals[-1].add(x, branch, where.rows)


class Positions(ShardedModule):
    """Learned position embeddings, added to this rank's tokens."""

    weight: nn.Parameter

    def __init__(self, inventory: PositionsSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.declare(*inventory.parameters)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [tokens (/ size), hidden]`` plus the embedding of ``positions [tokens]``."""
        if self.shard.sequence:
            axis = self.shard.tensor
            positions = positions.chunk(axis.size)[axis.rank]
        return x + F.embedding(positions, self.weight)


def scaled(x: Tensor, factor: float) -> Tensor:
    """``x`` times a constant; ``x`` itself where that is 1."""
    return x if factor == 1 else x * factor


class Transformer(nn.Module):
    """A decoder-only language model, or a pipeline stage of one, over this rank's shards.

    Args:
        stage: what it holds.
        shard: which shard of every layer, dtype and device.
        recompute: what its layers recompute in the backward pass.
        tied: the embedding's weight, where an earlier stage of this rank holds it for the head.
    """

    def __init__(
        self,
        stage: StageSpec,
        shard: Shard,
        recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
        tied: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.inventory, self.shard = stage, shard
        self.model = model = stage.model.settings
        self.vocab, self.hidden = int(model.vocab), model.hidden
        self.dropper = Dropper(model.dropout, -1, Site.EMBEDDING, shard.device, shard.compiled)
        self.embedding = self.positions = self.norm = self.head = None
        self.rotary: Rotary | None = None
        if stage.embedding is not None:
            self.embedding = VocabParallelEmbedding(stage.embedding, shard)
            tied = self.embedding.weight
        if stage.positions is not None:
            self.positions = Positions(stage.positions, shard)
        if shard.exact:
            exact.check_arithmetic(shard.device)
        if stage.rotary:
            self.rotary = Rotary(model, shard.device, shard.exact)
        self.loss: nn.Module | None = None  # a user's
        self.layers = nn.ModuleDict()
        for position, number in enumerate(stage.layers):
            # Names keep the layer's global number, on whatever stage it is.
            block = Block(stage.model.block(number), shard, number, model)
            self.layers[str(number)] = recomputing(block, recompute.of(position), block.branches[-1].last)
        if stage.norm is not None and stage.head is not None:
            self.norm = Norm(stage.norm, shard)
            self.head = VocabParallelHead(stage.head, shard, tied)

    def forward(
        self,
        tokens: Tensor,
        spans: Spans | None = None,
        inputs: Tensor | None = None,
        key: DropoutKey | None = None,
        auxiliary: Auxiliary | None = None,
        cache: KeyValueCache | None = None,
        replay: Replay | None = None,
    ) -> Tensor:
        """Hidden states, ``[tokens (/ size in sequence parallel), hidden]``; the last stage's are normalised.

        Args:
            tokens: int64 ``[sequences, length]``, on every stage; ``[1, tokens]``, those of a context rank.
            spans: documents of the tokens, and which rank holds which; None where every sequence is one, and
                every rank has all.
            inputs: the hidden states of the stage before; None on the first stage.
            key: of dropout; None for none.
            auxiliary: where layers add losses of their own; None outside of training.
            cache: keeps keys and values between passes (generation), and knows where the tokens, ``[1, this
                rank's tokens]``, stand.
            replay: experts that are imposed or kept; None: neither.
        """
        where = self._geometry(tokens, spans, key, auxiliary) if cache is None else self._cached(cache)
        if replay is not None:
            where = replace(where, replay=replay)
        if self.embedding is not None:
            x = scaled(self.embedding(tokens.flatten()), self.model.embedding_multiplier)
        else:
            assert inputs is not None, "every stage but the first needs the hidden states of the one before"
            x = inputs
        if self.positions is not None:
            x = self.positions(x, where.positions)
        if self.embedding is not None and where.rows is not None:
            x = self.dropper(x, where.rows)
        for layer in self.layers.values():
            x = layer(x, where)
        # Scaled here, logits need not be.
        return x if self.norm is None else scaled(self.norm(x), 1 / self.model.logits_scaling)

    def loss_sum(
        self,
        tokens: Tensor,
        labels: Tensor,
        spans: Spans | None = None,
        inputs: Tensor | None = None,
        scale: float | None = 1.0,
        key: DropoutKey | None = None,
        auxiliary: Auxiliary | None = None,
        replay: Replay | None = None,
    ) -> Tensor:
        """Sum of the token losses, in nats; labels are int64 ``[sequences, length]``, -100 for none.

        Only the last stage has it; ``inputs`` and all from ``key`` on as for :meth:`forward`. ``scale`` is
        what the sum will be multiplied by before it is differentiated; None where it will not be.
        """
        assert self.head is not None, "only the last stage has the output head"
        hidden = self(tokens, spans, inputs=inputs, key=key, auxiliary=auxiliary, replay=replay)
        return self.head(hidden, labels.flatten(), scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[tokens, padded vocab / size]`` of the last stage's hidden states."""
        assert self.head is not None, "only the last stage has the output head"
        return self.head(hidden)

    @property
    def dtype(self) -> torch.dtype:
        """The number format of parameters and activations."""
        return next(self.parameters()).dtype

    def _geometry(
        self,
        tokens: Tensor,
        spans: Spans | None,
        key: DropoutKey | None,
        auxiliary: Auxiliary | None = None,
    ) -> Geometry:
        spans = spans or Spans(tokens.numel(), len(tokens))
        positions = spans.positions(tokens.device)
        whole = None if spans.slice is None else spans.slice.grouped(self.shard.ulysses.size)
        cos = sin = None
        if self.rotary is not None:
            cos, sin = self.rotary.factors(positions, partial(spans.lengths, tokens.device), self.dtype)
        keys = self._keys(spans, whole, key)
        return Geometry(spans, positions, cos, sin, *keys, slice=whole, auxiliary=auxiliary)

    def _cached(self, cache: KeyValueCache) -> Geometry:
        positions, cos, sin = cache.positions, None, None
        if self.rotary is not None:
            cos, sin = self.rotary.factors(positions, cache.lengths, self.dtype)
        return Geometry(Spans(len(positions), 1), positions, cos, sin, cache=cache)

    def _keys(
        self, spans: Spans, ring: Slice | None, key: DropoutKey | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Dropout's keys of the residual stream's rows, of attention's queries and of the inputs of adapters;
        see :class:`Geometry`."""
        lora = self.model.lora
        adapters = lora is not None and lora.dropout > 0
        if key is None or not (self.dropper.rate or self.model.attention_dropout or adapters):
            return None, None, None
        axis, device, length = self.shard.tensor, self.shard.device, spans.tokens // spans.sequences
        # Numbers in the global batch: of a token, and of one head's query.
        numbers = torch.arange(spans.tokens, device=device) if spans.numbers is None else spans.numbers
        rows = queries = None
        mine = key.sequence * length + numbers
        adapted = row_keys(key, mine) if adapters else None
        if self.dropper.rate:
            rows = row_keys(key, mine.chunk(axis.size)[axis.rank] if self.shard.sequence else mine)
        if self.model.attention_dropout:
            heads = torch.arange(self.model.heads, device=device).chunk(axis.size)[axis.rank]
            if ring is not None:  # of the tokens and heads after these have been exchanged
                group = self.shard.ulysses
                heads = heads.chunk(group.size)[group.rank]
                mine = key.sequence * length + numbers_of(ring, self.shard.ring.rank).to(device)
            sequence, position = (mine // length)[:, None], (mine % length)[:, None]
            queries = row_keys(key, (sequence * self.model.heads + heads) * length + position)
        return rows, queries, adapted


def factored_mesh(model: ModelSettings, parallel: ParallelSettings, mesh: Mesh) -> Mesh:
    """The mesh with the axes that the model's weights are divided over, and those of attention over context
    ranks; every rank of the default process group calls this together."""
    copies = ModelInventory(model, tensor=mesh.tensor.size).kv_copies
    if copies > 1:
        mesh = mesh.factored("tensor", KV_AXES, copies)
    return mesh.grouped_context(parallel.ulysses) if mesh.context.size > 1 else mesh


def make_shard(parallel: ParallelSettings, mesh: Mesh, dtype: torch.dtype) -> Shard:
    """The shard of every layer that this rank holds, given resolved settings and what :func:`factored_mesh`
    returned."""
    names = ("tensor", "context", "ring", "ulysses")
    axes = {name: axis for name, axis in mesh.axes.items() if name in names}
    expert_ranks = None
    if parallel.expert * parallel.expert_tensor > 1:
        axes |= {axis.name: axis for axis in mesh.model_axes("expert")}
        expert_ranks = mesh.expert_ranks()
    method: Literal["ring", "all_gather"]
    method = "all_gather" if parallel.context_method == "all_gather" else "ring"
    chunks = 1 if parallel.tensor_chunks == "auto" else parallel.tensor_chunks
    return Shard(
        axes,
        parallel.sequence_parallel,
        dtype,
        mesh.device,
        chunks=chunks,
        method=method,
        expert_ranks=expert_ranks,
    )


def build_stages(
    model: ModelSettings,
    shard: Shard,
    layers: Sequence[range],
    placement: Sequence[int],
    rank: int,
    recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
) -> dict[int, Transformer]:
    """The stages of one pipeline rank, as :meth:`ModelInventory.stages` lists them for resolved settings;
    ``recompute``: what each stage's layers recompute."""
    stages: dict[int, Transformer] = {}
    whole = ModelInventory(model, shard.sequence, shard.tensor.size)
    for number, stage in whole.stages(layers, placement, rank).items():
        first = stages.get(0)
        embedding = None if first is None else first.embedding
        tied = None if embedding is None else embedding.weight
        stages[number] = Transformer(stage, shard, recompute, tied)
    return stages
