"""Data parallelism over flat buckets, with the state divided among data ranks or not (ZeRO)."""

from .buckets import Bucket, Formats, make_buckets
from .gatherer import ParameterGatherer
from .pool import BufferPool
from .reducer import GradientReducer
from .sharding import StateSharding

__all__ = [
    "BufferPool",
    "Bucket",
    "Formats",
    "GradientReducer",
    "ParameterGatherer",
    "StateSharding",
    "make_buckets",
]
