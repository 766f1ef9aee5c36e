"""The transformer, for every family: reads as if for one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from hexad.config.schema import ModelSettings
from hexad.parallel.sharding import ShardedModule, replicated
from hexad.parallel.tensor import VocabParallelEmbedding, VocabParallelHead, cross_entropy_sum
from hexad.topology.mesh import Axis

from .attention import Attention, KeyValueStore
from .feedforward import FeedForward
from .norms import residual_norm
from .positions import Geometry, document_positions, rotary_factors, rotary_frequencies


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(
        self, model: ModelSettings, axis: Axis, *, sequence: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        common = {"dtype": dtype, "device": device}
        self.attention_norm = residual_norm(model, partial=sequence, **common)
        self.attention = Attention(model, axis, sequence=sequence, **common)
        self.ffn_norm = residual_norm(model, partial=sequence, **common)
        self.ffn = FeedForward(model, axis, sequence=sequence, **common)

    def forward(self, x: torch.Tensor, where: Geometry, store: KeyValueStore | None = None) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        x = x + self.attention(self.attention_norm(x), where, store)
        return x + self.ffn(self.ffn_norm(x))


class Positions(ShardedModule):
    """Learned position embeddings (gpt2), added to this rank's tokens."""

    def __init__(
        self, model: ModelSettings, axis: Axis, *, sequence: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence = sequence
        rows = int(model.max_positions)
        weight = nn.Parameter(torch.empty(rows, model.hidden, dtype=dtype, device=device))
        declaration = replicated(
            "weight", (rows, model.hidden), partial=sequence, decay=True, std=model.init_std
        )
        self.declare("weight", weight, declaration)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``x [tokens (/ size), hidden]`` plus the embedding of ``positions [tokens]``."""
        if self.sequence:
            positions = positions.chunk(self.axis.size)[self.axis.rank]
        return x + F.embedding(positions, self.weight)


class Transformer(nn.Module):
    """A decoder-only language model over this rank's shards.

    Args:
        model: resolved settings; ``vocab`` and ``max_positions`` are numbers.
        axis: the tensor axis.
        sequence: divide activations over tokens between the parallel layers (sequence parallel).
        dtype: of parameters and activations.
    """

    def __init__(
        self, model: ModelSettings, axis: Axis, *, sequence: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        sequence = sequence and axis.size > 1
        common = {"dtype": dtype, "device": device}
        parallel = {"sequence": sequence, **common}
        self.axis = axis
        self.sequence = sequence
        self.vocab = int(model.vocab)
        vocab = {"std": model.init_std, **parallel}
        self.embedding = VocabParallelEmbedding(self.vocab, model.hidden, axis, **vocab)
        self.positions: Positions | None = None
        self.frequencies: torch.Tensor | None = None
        if model.family == "gpt2":
            self.positions = Positions(model, axis, **parallel)
        else:
            self.frequencies = rotary_frequencies(model, device)
        self.layers = nn.ModuleList([Block(model, axis, **parallel) for _ in range(model.layers)])
        self.norm = residual_norm(model, partial=sequence, **common)
        tied = self.embedding.weight if model.tied_embeddings else None
        self.head = VocabParallelHead(self.vocab, model.hidden, axis, tied=tied, **vocab)

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
        return cross_entropy_sum(logits, labels.flatten(), self.vocab, self.axis)

    def _geometry(self, tokens: torch.Tensor, documents: tuple[int, ...] | None, start: int) -> Geometry:
        sequences, length = tokens.shape
        positions = document_positions(sequences, length, documents, tokens.device) + start
        if self.frequencies is None:
            return Geometry(sequences, documents, positions)
        dtype = self.embedding.weight.dtype
        return Geometry(
            sequences, documents, positions, *rotary_factors(positions, self.frequencies, dtype)
        )
