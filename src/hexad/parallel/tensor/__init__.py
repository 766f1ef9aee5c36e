"""Tensor and sequence parallelism over local tensors, with explicit collectives."""

from .embedding import VocabParallelEmbedding, VocabParallelHead
from .linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
]
