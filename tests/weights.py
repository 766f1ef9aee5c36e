"""Whole global tensors as a source of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hexad.checkpoint.chunks import Chunk
from hexad.config import HexadError


@dataclass(frozen=True)
class WholeTensors:
    """Tensors by our global name, in memory."""

    tensors: Mapping[str, torch.Tensor]

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Copy the rectangles that a rank holds."""
        for chunk in chunks:
            whole = self.tensors[chunk.name.removeprefix("model.")]
            shape = chunk.rectangle.shape
            if tuple(whole.shape) != shape:
                raise HexadError(f"{chunk.name}: found {tuple(whole.shape)}, expected {shape}")
            chunk.tensor.copy_(whole[chunk.rectangle.slices])
