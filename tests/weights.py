"""Whole global tensors as a source of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hexad.checkpoint.chunks import Chunk
from hexad.config import HexadError
from hexad.parallel.rectangle import Rectangle


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


def chunk(
    name: str,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    tensor: torch.Tensor,
    holder: tuple[int, int] | None = (0, 1),
) -> Chunk:
    """The rectangle that begins at ``offset``."""
    return Chunk(Rectangle(name, shape, offset, tuple(tensor.shape)), tensor, holder)
