"""Messages: picklable objects from one rank to others, in order. A sender does not wait for its receivers,
nor for their answers; a receiver may wait for days."""

import pickle
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexad.topology.mesh import Axis

from .collectives import CommError

_HEAD = 1024
"""Bytes of a message; what is longer follows in a second one."""
_LENGTH = 8
_TAG = 1 << 16
"""Tag of these messages, which share process groups with others."""
_PATIENCE = timedelta(days=365)
_PENDING = 64
"""Messages under way, after which the sender waits for the oldest."""


class Outbox:
    """Objects that one rank sends to others of an axis whose process group connects hosts, see
    :meth:`~hexad.topology.mesh.Mesh.on_hosts`."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._pending: deque[tuple[Any, Tensor]] = deque()

    def put(self, value: object, places: Iterable[int]) -> None:
        """Send a picklable object to some places of the axis.

        Raises:
            CommError: a receiver is lost.
        """
        places = list(places)
        if not places:
            return
        content = pickle.dumps(value)
        inline = _HEAD - _LENGTH
        head = (len(content).to_bytes(_LENGTH, "little") + content[:inline]).ljust(_HEAD, b"\0")
        for part in (head, content[inline:]):
            if not part:
                continue
            tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            for place in places:
                rank, group = self._axis.ranks[place], self._axis.group
                try:
                    self._pending.append((dist.isend(tensor, rank, group=group, tag=_TAG), tensor))
                except RuntimeError as error:
                    raise CommError(f"a message to rank {rank} failed: {error}") from error
        self._wait(_PENDING)

    def flush(self) -> None:
        """Wait until all is sent.

        Raises:
            CommError: a receiver is lost.
        """
        self._wait(0)

    def _wait(self, left: int) -> None:
        try:
            while len(self._pending) > left:
                self._pending.popleft()[0].wait(_PATIENCE)
        except RuntimeError as error:
            raise CommError(f"a message failed: {error}") from error


def take(axis: Axis, source: int) -> Any:
    """The next object that a place of the axis has sent here.

    Raises:
        CommError: the sender is lost.
    """
    rank, group = axis.ranks[source], axis.group

    def receive(size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        dist.irecv(buffer, rank, group=group, tag=_TAG).wait(_PATIENCE)  # type: ignore[union-attr]
        return bytes(buffer.numpy().tobytes())

    try:
        head = receive(_HEAD)
        length = int.from_bytes(head[:_LENGTH], "little")
        content = head[_LENGTH : _LENGTH + length]
        return pickle.loads(content if length == len(content) else content + receive(length - len(content)))
    except RuntimeError as error:
        raise CommError(f"a message of rank {rank} failed: {error}") from error
