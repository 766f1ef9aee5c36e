"""Between our global tensor names and those of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HuggingFaceTensor:
    """Where one of our global tensors stands in a Hugging Face state dict.

    Attributes:
        name: its key.
        shape: of ours.
        transposed: stored as ``[in, out]``.
        part: ``(i, n)``: ours is the i-th of n equal parts of theirs, along our dim 0.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    part: tuple[int, int] = (0, 1)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of theirs."""
        shape = (self.shape[0] * self.part[1], *self.shape[1:])
        return shape[::-1] if self.transposed else shape

    def place(self, offset: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
        """Where in theirs a rectangle of ours stands; transposed there, if ours is."""
        begin = (offset[0] + self.part[0] * self.shape[0], *offset[1:])
        place = tuple(slice(low, low + size) for low, size in zip(begin, sizes))
        return place[::-1] if self.transposed else place

    def read(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Our tensor, as a view into theirs. Raises KeyError naming a missing key."""
        tensor = state[self.name][self.place((0,) * len(self.shape), self.shape)]
        return tensor.t() if self.transposed else tensor
