"""Tensor and sequence parallelism over local tensors, with explicit collectives."""

from .cross_entropy import cross_entropy_sum
from .embedding import VocabParallelEmbedding, VocabParallelHead, padded_vocab
from .linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "cross_entropy_sum",
    "padded_vocab",
]
