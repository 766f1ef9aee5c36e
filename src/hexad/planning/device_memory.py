"""What a GPU holds besides the tensors of a run: estimates, from measurements on one H100 (PyTorch 2.11). No
torch."""

from __future__ import annotations

from typing import NamedTuple

from hexad.topology.layout import Layout

_RESERVED = 0.145
"""What PyTorch's allocator keeps besides the tensors, as a part of their memory (77.7 GiB reserved, 67.9 in
use)."""
_CONTEXT = 600 * 2**20
"""CUDA's context, and the kernels of its libraries."""
_COMMUNICATOR = 500 * 2**20
"""Buffers of one of NCCL's communicators that is in use: 0.4 to 0.6 GiB."""


class DeviceMemory(NamedTuple):
    """Bytes of a GPU's memory.

    Attributes:
        tensors: the predicted peak.
        reserved: kept by the allocator besides them.
        context: CUDA's.
        communicators: NCCL's buffers.
    """

    tensors: int
    reserved: int
    context: int
    communicators: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def device_memory(tensors: int, layout: Layout, replicas: int) -> DeviceMemory:
    """What a rank needs on a GPU, given the peak of its tensors; ``replicas``: of the sharded state."""
    return DeviceMemory(
        tensors, int(_RESERVED * tensors), _CONTEXT, _COMMUNICATOR * _communicators(layout, replicas)
    )


def _communicators(layout: Layout, replicas: int) -> int:
    """Communicators that a rank uses: of each axis, of the ranks with copies of a shard where these are
    others than those with the other shards, and for the pipeline's messages in each direction."""
    degrees = layout.degrees
    gradient = degrees["data"] * degrees["context"]
    used = [degrees["tensor"] > 1, degrees["context"] > 1, degrees["data"] > 1, 1 < replicas < gradient]
    return sum(used) + 3 * (degrees["pipeline"] > 1)
