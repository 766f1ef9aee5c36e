"""Data parallelism over flat buffers."""

from .flat import FlatGroup, flatten
from .reducer import GradientReducer

__all__ = ["FlatGroup", "GradientReducer", "flatten"]
