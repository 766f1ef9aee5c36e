"""Exchanges of rows whose numbers stay on the device: PyTorch's operators on NVSHMEM's symmetric memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hexad.topology.mesh import Axis

from .collectives import on_stream


class _Buffers(NamedTuple):
    """Memory at the same place on all ranks.

    Attributes:
        sent: rows that others read.
        splits, arrived: int64, what the operators take here, and what they write on other ranks.
    """

    sent: Tensor
    splits: Tensor
    arrived: Tensor


class Symmetric:
    """Symmetric memory of an axis's ranks, used by all their exchanges in turn.

    NVSHMEM allocates it on all ranks of the default process group together, with one size: they make their
    first exchange, and one that needs more, at the same place of a step. It is not freed: PyTorch keeps what
    it knows of an address.

    An exchange begins with a barrier of its ranks but does not end with one: others may still read what a
    rank sent. Two sets of buffers take turns: a rank that writes to one has passed the barrier of the
    exchange before, which the others reach after their last one of this set.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis, self._turn = axis, 0
        self._bytes = self._splits = 0
        self._sets: list[_Buffers] = []
        self._received: list[Tensor] = []

    def to_experts(self, x: Tensor, index: Tensor, splits: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Send the rows ``x[index]``, sorted by expert, to the ranks that have these.

        Args:
            x: ``[n, ...]``.
            index: int64, the row in each place; those beyond the sum of ``splits`` are not sent.
            splits: int64 ``[experts]``, rows for each.
            room: rows that buffers have, on all ranks as many, and more than arrive: an expert without a row
                takes one.

        Returns:
            (``[room, ...]``, the rows of this rank's experts, valid until the next exchange; int64 ``[2,
            experts]``, how many each of them has of each rank, and where these begin).
        """
        here, received = self._next(x, len(index), room, len(splits))
        torch.index_select(x, 0, index, out=here.sent)
        here.splits[0].copy_(splits)
        operator, name = torch.ops.symm_mem.all_to_all_vdev_2d, self._name

        def action() -> None:
            operator(here.sent, received, here.splits[0], here.arrived, name)

        on_stream("all_to_all", self._axis, self._away(here.sent, len(index)), action)
        return received, here.arrived

    def to_tokens(self, rows: Tensor, splits: Tensor, room: int, even: int) -> Tensor:
        """The inverse of :meth:`to_experts`.

        Args:
            rows: sorted by expert and rank.
            splits: int64 ``[2, experts]``, rows of each of this rank's experts for each rank, and where these
                begin.
            room: as there.
            even: rows that a rank sends with an even load.

        Returns:
            ``[room, ...]``: the rows that were sent there, in their order, valid until the next exchange.
        """
        here, received = self._next(rows, len(rows), room, splits.shape[1])
        here.sent.copy_(rows)
        here.splits.copy_(splits)
        operator, name = torch.ops.symm_mem.all_to_all_vdev_2d_offset, self._name

        def action() -> None:
            operator(here.sent, received, here.splits, here.arrived, name)

        on_stream("all_to_all", self._axis, self._away(here.sent, even), action)
        return received

    @property
    def _name(self) -> str:
        assert self._axis.group is not None
        return str(self._axis.group.group_name)

    def _away(self, rows: Tensor, even: int) -> int:
        """Bytes of an even load's rows that leave this rank."""
        size, row_bytes = self._axis.size, rows[:1].nbytes
        return even * (size - 1) // size * row_bytes

    def _next(self, x: Tensor, rows: int, room: int, splits: int) -> tuple[_Buffers, Tensor]:
        """(the set whose turn it is, for so many rows and experts; ``[room, ...]`` for what is received)."""
        nbytes = room * (x.shape[1:].numel() * x.element_size())
        if nbytes > self._bytes or splits > self._splits:
            self._bytes, self._splits = max(nbytes, self._bytes), max(splits, self._splits)
            self._received.append(self._allocated(self._bytes, torch.uint8, x.device))
            for _ in range(2):
                numbers = (self._allocated(2 * self._splits, torch.int64, x.device) for _ in range(2))
                self._sets.append(_Buffers(self._allocated(self._bytes, torch.uint8, x.device), *numbers))
        self._turn = 1 - self._turn
        memory = self._sets[-2:][self._turn]
        sent, *tables = _viewed(memory.sent, x, rows), memory.splits, memory.arrived
        here = _Buffers(sent, *(table[: 2 * splits].view(2, splits) for table in tables))
        return here, _viewed(self._received[-1], x, room)

    def _allocated(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory at the same place on all ranks; ordinary memory on devices other than GPUs."""
        if device.type != "cuda":
            return torch.empty(count, dtype=dtype, device=device)
        from torch.distributed import _symmetric_memory

        if _symmetric_memory.get_backend(device) != "NVSHMEM":
            _symmetric_memory.set_backend("NVSHMEM")
        memory = _symmetric_memory.empty(count, dtype=dtype, device=device)
        assert self._axis.group is not None
        _symmetric_memory.rendezvous(memory, self._axis.group)
        return memory


def _viewed(memory: Tensor, like: Tensor, rows: int) -> Tensor:
    """The first bytes of some memory as rows of a tensor's format and width."""
    shape = (rows, *like.shape[1:])
    count = torch.Size(shape).numel()
    return memory[: count * like.element_size()].view(like.dtype).view(shape)


def missing() -> str | None:
    """The requirement of the exchanges that this process does not meet, in words; None if it meets all."""
    if torch.version.hip:
        return "a PyTorch for CUDA"
    from torch.distributed import _symmetric_memory

    return None if _symmetric_memory.is_nvshmem_available() else "a PyTorch with NVSHMEM"
