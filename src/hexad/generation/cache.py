"""How the tokens of a batch are arranged in the keys and values that a stage keeps.

Context ranks divide the tokens of a batch, equally and in their order; each has the keys of all tokens, and
computes the attention of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from hexad.comm import all_gather
from hexad.model.attention_kernels import AttentionKernel
from hexad.model.positions import LatentHeads
from hexad.topology.mesh import Axis

from .batch import TokenBatch
from .latent_memory import LatentMemory
from .paged_attention import Arrangement, KeyValueMemory, Queries


@dataclass(eq=False)
class BatchCache:
    """The cache as the layers of a model use it in one batch: a
    :class:`~hexad.model.positions.KeyValueCache`.

    Attributes:
        memory: of each of this rank's layers, by its number in the model.
        batch: the tokens.
        context: axis of the ranks that divide them.
        device: of the tensors.
    """

    memory: Mapping[int, KeyValueMemory | LatentMemory]
    batch: TokenBatch
    context: Axis
    device: torch.device

    @cached_property
    def total(self) -> int:
        """Tokens of the batch."""
        return sum(len(span.tokens) for span in self.batch.spans)

    @cached_property
    def share(self) -> int:
        """Tokens of a context rank; the last ones may have padding."""
        return -(-self.total // self.context.size)

    @property
    def begin(self) -> int:
        """Number of this rank's first token."""
        return self.share * self.context.rank

    @cached_property
    def tokens(self) -> Tensor:
        """int64 ``[1, this rank's tokens]``: their ids; of padding 0."""
        return self._mine(list(chain.from_iterable(span.tokens for span in self.batch.spans)))[None]

    @cached_property
    def positions(self) -> Tensor:
        """int64 ``[this rank's tokens]``: the place of each in its sequence."""
        numbers = (range(span.begin, span.begin + len(span.tokens)) for span in self.batch.spans)
        return self._mine(list(chain.from_iterable(numbers)))

    def lengths(self) -> Tensor:
        """int64 ``[this rank's tokens]``: the tokens of the sequence of each."""
        return self._mine([span.length for span in self.batch.spans for _ in span.tokens])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel) -> Tensor:
        """Keep the new tokens' keys and values, and compute attention over all so far.

        Args:
            layer: its number in the model.
            q: ``[this rank's tokens, heads, width]``.
            k, v: ``[this rank's tokens, key/value heads, width]``.
            kernel: the layer's.

        Returns:
            ``[this rank's tokens, heads * width]``.
        """
        if self.context.size > 1:
            k, v = all_gather(torch.cat((k, v), dim=1), self.context).chunk(2, dim=1)
        k, v = k[: self.total], v[: self.total]
        memory = self.memory[layer]
        assert isinstance(memory, KeyValueMemory)
        return memory.attend(q, k, v, self._arrangement, kernel).flatten(1)

    def attend_latent(
        self, layer: int, q: Tensor, latents: Tensor, heads: LatentHeads, kernel: AttentionKernel
    ) -> Tensor:
        """Keep the new tokens' latent vectors ``[this rank's tokens, width]``, and compute attention over the
        keys and values that ``heads`` makes of all so far; returns what :meth:`attend` does."""
        if self.context.size > 1:
            latents = all_gather(latents, self.context)
        memory = self.memory[layer]
        assert isinstance(memory, LatentMemory)
        return memory.attend(q, latents[: self.total], self._arrangement, heads, kernel)

    @cached_property
    def _arrangement(self) -> Arrangement:
        return Arrangement(self._slots(), self._queries(), self.share)

    def _slots(self) -> Tensor:
        """int64 ``[tokens of the batch]``: where the keys of each go."""
        slots: list[int] = []
        for span in self.batch.spans:
            left: list[int] = []
            missing = len(span.tokens)
            for slot, tokens in reversed(span.runs):
                count = min(tokens, missing)
                left[:0] = range(slot + tokens - count, slot + tokens)
                missing -= count
                if not missing:
                    break
            slots += left
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def _queries(self) -> list[Queries]:
        """The parts of this rank's tokens."""
        queries, place = [], 0
        first, last = self.begin, min(self.begin + self.share, self.total)
        for span in self.batch.spans:
            low, high = max(place, first), min(place + len(span.tokens), last)
            if low < high:
                position = span.begin + low - place
                rows = low - first, high - first
                queries.append(Queries(rows, low, position, span.runs, span.origin))
            place += len(span.tokens)
        return queries

    def _mine(self, values: list[int]) -> Tensor:
        """This rank's part of the values of all tokens, with zeros for padding."""
        mine = values[self.begin : self.begin + self.share]
        mine += [0] * (self.share - len(mine))
        return torch.tensor(mine, dtype=torch.int64, device=self.device)
