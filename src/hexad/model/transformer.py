"""The transformer, for every family: reads as if for one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hexad.config.schema import ModelSettings
from hexad.parallel.sharding import Placement, ShardedModule, replicated
from hexad.parallel.tensor import VocabParallelEmbedding, VocabParallelHead

from .attention import Attention, KeyValueStore
from .dropout import Draws, Dropper, Site, row_keys
from .feedforward import FeedForward
from .norms import LayerNorm, RmsNorm, residual_norm
from .positions import Geometry, document_positions, rotary_factors, rotary_frequencies
from .recompute import Kind, Recompute

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""``precision.dtype`` -> torch's, of parameters and activations: fp8 is a format of products."""


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, model: ModelSettings, place: Placement, layer: int, recompute: Kind = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = residual_norm(model, place)
        self.attention = Attention(model, place, layer)
        self.ffn_norm = residual_norm(model, place)
        self.ffn = FeedForward(model, place)
        self.droppers = [Dropper(model.dropout, layer, site) for site in (Site.ATTENTION, Site.FEED_FORWARD)]

    def forward(self, x: torch.Tensor, where: Geometry, store: KeyValueStore | None = None) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        recompute = self.recompute if torch.is_grad_enabled() else "none"
        if recompute != "full":
            return self._layer(x, where, store, selective=recompute == "selective")
        repeated = False

        def layer(x: torch.Tensor) -> torch.Tensor:
            nonlocal repeated
            unused, repeated = repeated, True
            return self._layer(x, where, store, unused=unused)

        # Nothing here draws from a generator: dropout is a function of the element.
        return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)

    def _layer(
        self,
        x: torch.Tensor,
        where: Geometry,
        store: KeyValueStore | None,
        selective: bool = False,
        unused: bool = False,
    ) -> torch.Tensor:
        """``selective`` recomputation of what is cheap; ``unused``: only the activations are of interest."""
        again = partial(self.attention_norm, x.detach()) if selective else None
        branch = self.attention(self.attention_norm(x), where, store, again)
        x = x + (branch if where.rows is None else self.droppers[0](branch, where.rows))
        again = partial(self.ffn_norm, x.detach()) if selective else None
        branch = self.ffn(self.ffn_norm(x), again, unused)
        return x + (branch if where.rows is None else self.droppers[1](branch, where.rows))


class Positions(ShardedModule):
    """Learned position embeddings (gpt2), added to this rank's tokens."""

    weight: nn.Parameter

    def __init__(self, model: ModelSettings, place: Placement) -> None:
        super().__init__()
        self.place = place
        shape = (int(model.max_positions), model.hidden)
        declaration = replicated("weight", shape, partial=place.sequence, decay=True, std=model.init_std)
        self.declare("weight", place.parameter(*shape), declaration)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``x [tokens (/ size), hidden]`` plus the embedding of ``positions [tokens]``."""
        if self.place.sequence:
            positions = positions.chunk(self.place.axis.size)[self.place.axis.rank]
        return x + F.embedding(positions, self.weight)


@dataclass(frozen=True)
class Part:
    """The part of a model that one pipeline stage holds.

    Attributes:
        layers: global numbers of its layers.
        first: it has the embedding.
        last: it has the final norm and the output head.
        tied: only in models whose head shares the embedding's weight, on the first and the last stage: the
            parameter itself where a stage of this rank holds it already, ``copy`` where one of another rank
            does.
    """

    layers: range
    first: bool = True
    last: bool = True
    tied: nn.Parameter | Literal["copy"] | None = None


class Transformer(nn.Module):
    """A decoder-only language model, or a pipeline stage of one, over this rank's shards.

    Args:
        model: resolved settings; ``vocab`` and ``max_positions`` are numbers.
        place: this rank's place on the tensor axis, dtype and device.
        part: what the stage holds; by default everything.
        recompute: what its layers compute again in the backward pass.
    """

    def __init__(
        self,
        model: ModelSettings,
        place: Placement,
        part: Part | None = None,
        recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        self.place = place
        self.part = part = part or Part(range(model.layers))
        self.vocab = int(model.vocab)
        self.hidden = model.hidden
        self.heads = model.heads
        self.attention_dropout = model.attention_dropout
        self.dropper = Dropper(model.dropout, -1, Site.EMBEDDING)
        self.embedding: VocabParallelEmbedding | None = None
        self.positions: Positions | None = None
        self.frequencies: torch.Tensor | None = None
        tied = part.tied
        if part.first:
            self.embedding = VocabParallelEmbedding(
                self.vocab, model.hidden, place, std=model.init_std, tied=isinstance(tied, str)
            )
            if model.tied_embeddings and part.last:
                tied = self.embedding.weight
        if model.family != "gpt2":
            self.frequencies = rotary_frequencies(model, place.device)
        elif part.first:
            self.positions = Positions(model, place)
        # Names keep the layer's global number, whatever stage holds it.
        self.layers = nn.ModuleDict(
            {str(n): Block(model, place, n, recompute.of(i)) for i, n in enumerate(part.layers)}
        )
        self.norm: RmsNorm | LayerNorm | None = None
        self.head: VocabParallelHead | None = None
        if part.last:
            self.norm = residual_norm(model, place)
            self.head = VocabParallelHead(self.vocab, model.hidden, place, tied=tied, std=model.init_std)

    def forward(
        self,
        tokens: torch.Tensor,
        documents: tuple[int, ...] | None = None,
        stores: Sequence[KeyValueStore] | None = None,
        start: int = 0,
        inputs: torch.Tensor | None = None,
        draws: Draws | None = None,
    ) -> torch.Tensor:
        """Hidden states, ``[tokens (/ size in sequence parallel), hidden]``; the last stage's are normalised.

        Args:
            tokens: int64 ``[sequences, length]``, on every stage.
            documents: document offsets (see ``Microbatch``), or None.
            stores: one per layer, to go on from what they hold (generation).
            start: position of the first token, where ``stores`` hold what came before.
            inputs: the hidden states of the stage before; None on the first stage.
            draws: what dropout is drawn from; None for none.
        """
        where = self._geometry(tokens, documents, start, draws)
        if self.embedding is not None:
            x = self.embedding(tokens.flatten())
        else:
            assert inputs is not None, "every stage but the first needs the hidden states of the one before"
            x = inputs
        if self.positions is not None:
            x = self.positions(x, where.positions)
        if self.embedding is not None and where.rows is not None:
            x = self.dropper(x, where.rows)
        for index, layer in enumerate(self.layers.values()):
            x = layer(x, where, stores[index] if stores is not None else None)
        return x if self.norm is None else self.norm(x)

    def loss_sum(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        documents: tuple[int, ...] | None = None,
        inputs: torch.Tensor | None = None,
        seed: float | None = 1.0,
        draws: Draws | None = None,
    ) -> torch.Tensor:
        """Sum of the token losses, in nats; labels are int64 ``[sequences, length]``, -100 for none.

        Only the last stage has it; ``inputs`` and ``draws`` as for :meth:`forward`. ``seed`` is what the
        sum's gradient will be in the backward pass; None where none will be asked for.
        """
        assert self.head is not None, "only the last stage has the output head"
        hidden = self(tokens, documents, inputs=inputs, draws=draws)
        return self.head(hidden, labels.flatten(), seed)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[tokens, padded vocab / size]`` of the last stage's hidden states."""
        assert self.head is not None, "only the last stage has the output head"
        return self.head(hidden)

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return next(self.parameters()).dtype

    def _geometry(
        self, tokens: torch.Tensor, documents: tuple[int, ...] | None, start: int, draws: Draws | None
    ) -> Geometry:
        sequences, length = tokens.shape
        positions = document_positions(sequences, length, documents, tokens.device) + start
        rows, queries = self._keys(tokens, draws)
        if self.frequencies is None:
            return Geometry(sequences, documents, positions, rows=rows, queries=queries)
        factors = rotary_factors(positions, self.frequencies, self.dtype)
        return Geometry(sequences, documents, positions, *factors, rows, queries)

    def _keys(
        self, tokens: torch.Tensor, draws: Draws | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Dropout's keys of the residual stream's rows and of attention's queries; see :class:`Geometry`."""
        if draws is None or not (self.dropper.rate or self.attention_dropout):
            return None, None
        axis, (sequences, length) = self.place.axis, tokens.shape
        # Numbers in the global batch: of a token, and of one head's query.
        sequence = torch.arange(draws.sequence, draws.sequence + sequences, device=tokens.device)[:, None]
        position = torch.arange(length, device=tokens.device)
        rows = queries = None
        if self.dropper.rate:
            mine = (sequence * length + position).flatten()
            rows = row_keys(draws, mine.chunk(axis.size)[axis.rank] if self.place.sequence else mine)
        if self.attention_dropout:
            heads = torch.arange(self.heads, device=tokens.device).chunk(axis.size)[axis.rank]
            query = (sequence[:, None] * self.heads + heads) * length + position[:, None]
            queries = row_keys(draws, query.flatten(0, 1))
        return rows, queries


def build_stages(
    model: ModelSettings,
    place: Placement,
    layers: Sequence[range],
    placement: Sequence[int],
    rank: int,
    recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
) -> dict[int, Transformer]:
    """The stages of one pipeline rank, by number, ascending.

    Args:
        model: as for :class:`Transformer`.
        place: this rank's place on the tensor axis.
        layers: for every stage its layers.
        placement: for every stage its pipeline rank.
        rank: whose stages to build.
        recompute: what each stage's layers compute again.
    """
    final = len(placement) - 1
    together = placement[0] == placement[final]
    stages: dict[int, Transformer] = {}
    for stage in (stage for stage, owner in enumerate(placement) if owner == rank):
        first, last = stage == 0, stage == final
        tied: nn.Parameter | Literal["copy"] | None = None
        if model.tied_embeddings and first != last and (first or last):
            if not together:
                tied = "copy"
            elif last:
                embedding = stages[0].embedding
                tied = None if embedding is None else embedding.weight
        stages[stage] = Transformer(model, place, Part(layers[stage], first, last, tied), recompute)
    return stages
