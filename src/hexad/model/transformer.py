"""The transformer, for every family: reads as if for one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from hexad.config.schema import ModelSettings
from hexad.parallel.sharding import Placement, ShardedModule, replicated
from hexad.parallel.tensor import VocabParallelEmbedding, VocabParallelHead, cross_entropy_sum

from .attention import Attention, KeyValueStore
from .feedforward import FeedForward
from .norms import residual_norm
from .positions import Geometry, document_positions, rotary_factors, rotary_frequencies

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
"""``precision.dtype`` -> torch's."""


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, model: ModelSettings, place: Placement) -> None:
        super().__init__()
        self.attention_norm = residual_norm(model, place)
        self.attention = Attention(model, place)
        self.ffn_norm = residual_norm(model, place)
        self.ffn = FeedForward(model, place)

    def forward(self, x: torch.Tensor, where: Geometry, store: KeyValueStore | None = None) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        x = x + self.attention(self.attention_norm(x), where, store)
        return x + self.ffn(self.ffn_norm(x))


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


class Transformer(nn.Module):
    """A decoder-only language model over this rank's shards.

    Args:
        model: resolved settings; ``vocab`` and ``max_positions`` are numbers.
        place: this rank's place on the tensor axis, dtype and device.
    """

    def __init__(self, model: ModelSettings, place: Placement) -> None:
        super().__init__()
        self.place = place
        self.vocab = int(model.vocab)
        self.embedding = VocabParallelEmbedding(self.vocab, model.hidden, place, std=model.init_std)
        self.positions: Positions | None = None
        self.frequencies: torch.Tensor | None = None
        if model.family == "gpt2":
            self.positions = Positions(model, place)
        else:
            self.frequencies = rotary_frequencies(model, place.device)
        self.layers = nn.ModuleList([Block(model, place) for _ in range(model.layers)])
        self.norm = residual_norm(model, place)
        tied = self.embedding.weight if model.tied_embeddings else None
        self.head = VocabParallelHead(self.vocab, model.hidden, place, tied=tied, std=model.init_std)

    def forward(
        self,
        tokens: torch.Tensor,
        documents: tuple[int, ...] | None = None,
        stores: Sequence[KeyValueStore] | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        """Hidden states after the final norm, ``[tokens (/ size in sequence parallel), hidden]``.

        Args:
            tokens: int64 ``[sequences, length]``.
            documents: document offsets (see ``Microbatch``), or None.
            stores: one per layer, to go on from what they hold (generation).
            start: position of the first token, where ``stores`` hold what came before.
        """
        where = self._geometry(tokens, documents, start)
        x = self.embedding(tokens.flatten())
        if self.positions is not None:
            x = self.positions(x, where.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, where, stores[index] if stores is not None else None)
        return self.norm(x)

    def loss_sum(
        self, tokens: torch.Tensor, labels: torch.Tensor, documents: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Sum of the token losses, in nats; labels are int64 ``[sequences, length]``, -100 for none."""
        logits = self.head(self(tokens, documents))
        return cross_entropy_sum(logits, labels.flatten(), self.vocab, self.place.axis)

    def _geometry(self, tokens: torch.Tensor, documents: tuple[int, ...] | None, start: int) -> Geometry:
        sequences, length = tokens.shape
        positions = document_positions(sequences, length, documents, tokens.device) + start
        if self.frequencies is None:
            return Geometry(sequences, documents, positions)
        dtype = self.embedding.weight.dtype
        return Geometry(sequences, documents, positions, *rotary_factors(positions, self.frequencies, dtype))
