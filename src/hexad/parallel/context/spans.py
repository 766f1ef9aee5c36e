"""Sequences and documents among the tokens of a microbatch, and this rank's tokens of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from hexad.comm import streams

from .slice import Slice


@dataclass(eq=False)
class Spans:
    """Runs of flattened tokens inside which attention stays.

    Attributes:
        tokens: of the microbatch.
        sequences: of the microbatch.
        bounds: where documents begin, and the total at the end; None where every sequence is one span.
        slice: which context rank holds which of the tokens; None where every rank has all.
        numbers: int64, with a slice, those of the tokens that this rank holds.
        most: tokens that any rank holds of its microbatch at the same time; None: as many as this one.
    """

    tokens: int
    sequences: int
    bounds: Sequence[int] | None = None
    slice: Slice | None = None
    numbers: Tensor | None = None
    most: int | None = None
    _offsets: Tensor | None = None

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest span."""
        if self.bounds is None:
            return self.tokens // self.sequences
        return max(end - begin for begin, end in pairwise(self.bounds))

    @cached_property
    def undivided(self) -> Slice:
        """The slice of one rank, which has all tokens."""
        length = self.tokens // self.sequences
        bounds = tuple(self.bounds or range(0, self.tokens + 1, length))
        return Slice(self.sequences, length, bounds, (((0, self.tokens),),))

    def offsets(self, device: torch.device) -> Tensor:
        """int32 ``[spans + 1]``: first token of every span, and the total (``cu_seqlens``); made once."""
        if self._offsets is None and self.bounds is not None:
            self._offsets = streams.of(device).moved(torch.tensor(self.bounds, dtype=torch.int32), device)
        elif self._offsets is None:
            length = self.tokens // self.sequences
            self._offsets = torch.arange(0, self.tokens + 1, length, dtype=torch.int32, device=device)
        return self._offsets

    def positions(self, device: torch.device) -> Tensor:
        """int64 ``[tokens]``: the place of each of this rank's tokens in its sequence, or in its document if
        there are any."""
        tokens = self.tokens
        if self.bounds is None:
            numbers = torch.arange(tokens, device=device) if self.numbers is None else self.numbers
            return numbers % (tokens // self.sequences)
        starts = self.offsets(device).long()
        positions = torch.arange(tokens, device=device) - self._of_tokens(starts[:-1], starts)
        return positions if self.numbers is None else positions[self.numbers]

    def lengths(self, device: torch.device) -> Tensor:
        """int64 ``[tokens]``: the tokens of the sequence, or document, of each of this rank's tokens."""
        starts = self.offsets(device).long()
        lengths = self._of_tokens(starts.diff(), starts)
        return lengths if self.numbers is None else lengths[self.numbers]

    def _of_tokens(self, values: Tensor, starts: Tensor) -> Tensor:
        """The value of every token's span."""
        # Without the size of its result, repeat_interleave would wait for the device.
        return values.repeat_interleave(starts.diff(), output_size=self.tokens)
