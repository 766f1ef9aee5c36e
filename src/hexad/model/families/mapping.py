"""Between our global tensor names and those of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HuggingFaceTensor:
    """Where one of our global tensors stands in a Hugging Face state dict.

    Attributes:
        name: its key.
        transposed: stored as ``[in, out]``.
        part: ``(i, n)``: ours is the i-th of n equal parts of theirs, along our dim 0.
    """

    name: str
    transposed: bool = False
    part: tuple[int, int] | None = None

    def read(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Our tensor, as a view into theirs. Raises KeyError naming a missing key."""
        tensor = state[self.name]
        if self.transposed:
            tensor = tensor.t()
        if self.part is not None:
            index, count = self.part
            tensor = tensor.chunk(count, dim=0)[index]
        return tensor
