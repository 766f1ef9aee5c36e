"""The memory of a GPU besides the tensors of a run: estimates, from measurements on one H100 (PyTorch 2.11).
No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hexad.topology.layout import Layout

from . import Resolved
from .communicators import Communicator, communicators

_RESERVED = 0.145
"""Memory that PyTorch's allocator keeps besides the tensors, as a part of their memory (77.7 GiB reserved,
67.9 in use)."""
_CONTEXT = 600 * 2**20
"""CUDA's context, and the kernels of its libraries."""
_COMMUNICATOR = 500 * 2**20
"""Buffers of one of NCCL's communicators that is in use: 0.4 to 0.6 GiB."""
_EXCHANGE = 3_300_000_000
"""Buffers of a communicator in which each rank sends to every other: what its first call took."""


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

    def holding(self, tensors: int) -> DeviceMemory:
        """This memory with other tensors. Without a context it is a CPU, whose allocator keeps nothing."""
        return self._replace(tensors=tensors, reserved=int(_RESERVED * tensors) if self.context else 0)

    def room(self, capacity: int) -> float:
        """Bytes of tensors that fit on a device of so many bytes."""
        return (capacity - self.context - self.communicators) / (1 + (_RESERVED if self.context else 0.0))

    @property
    def figures(self) -> dict[str, int]:
        """The three numbers that tools report: PyTorch's peaks of allocated and of reserved memory, and what
        is used of the device."""
        return {"tensors": self.tensors, "reserved": self.tensors + self.reserved, "device": self.total}


HOST = DeviceMemory(0, 0, 0, 0)
"""A CPU's rank has nothing besides its tensors that grows with them."""


def device_memory(tensors: int, resolved: Resolved) -> DeviceMemory:
    """The memory that a rank needs on its device, given the peak of its tensors; on a CPU only these."""
    if resolved.config.run.device == "cpu":
        return HOST._replace(tensors=tensors)
    return _with(tensors, communicators(resolved))


def least_device_memory(tensors: int, layout: Layout) -> DeviceMemory:
    """A lower bound on :func:`device_memory` for all configurations with a layout in which gradients pass all
    stages."""
    axes = ("tensor", "context", "expert", "expert_tensor", *["pipeline"] * 3)
    sizes = (layout.gradient_ranks, *(layout.degrees[axis] for axis in axes))
    return _with(tensors, (Communicator("", size) for size in sizes if size > 1))


def _with(tensors: int, used: Iterable[Communicator]) -> DeviceMemory:
    buffers = sum(_EXCHANGE if communicator.exchanges else _COMMUNICATOR for communicator in used)
    return DeviceMemory(0, 0, _CONTEXT, buffers).holding(tensors)


@dataclass
class DeviceRoom:
    """The memory of a device, and whether tensors fit into it.

    Attributes:
        capacity: bytes of its memory.
        cpu: it is a CPU's.
    """

    capacity: int
    cpu: bool
    _devices: dict[Any, DeviceMemory] = field(default_factory=dict, repr=False)

    def device(self, resolved: Resolved, tensors: int) -> DeviceMemory:
        """The memory used with tensors of so many bytes."""
        settings = resolved.config.parallel
        key = resolved.layout, settings.zero, settings.replicas, settings.context_method
        if key not in self._devices:
            self._devices[key] = device_memory(0, resolved)
        return self._devices[key].holding(tensors)

    def fits(self, resolved: Resolved, tensors: int) -> bool:
        """Whether tensors of so many bytes fit."""
        return self.device(resolved, tensors).total <= self.capacity

    def most(self, layout: Layout) -> float:
        """Bytes of tensors that may fit, in any configuration with a layout."""
        if layout not in self._devices:
            self._devices[layout] = HOST if self.cpu else least_device_memory(0, layout)
        return self._devices[layout].room(self.capacity)
