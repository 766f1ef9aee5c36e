"""Bytes of the tensors that live at a time, and what those at the peak are."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class _Memory:
    """The memory of one storage.

    Attributes:
        size: bytes, as the allocator rounds them.
        born: when it was allocated, by the ledger's clock.
        action: number of the action that allocated it.
        kind: what it holds, where that is known; empty of what a step allocates.
        died: when it was freed.
    """

    size: int
    born: int
    action: int
    kind: str = ""
    died: int | None = None


class Ledger:
    """Follows storages from the operation that first returns them until they are freed.

    What a kernel allocates and frees by itself is not seen.

    Attributes:
        unit: bytes that every storage is rounded up to a multiple of.
        bytes: alive now.
        peak: most since :meth:`begin_step`.
        at: number of the action at the peak.
    """

    def __init__(self, unit: int = 1) -> None:
        self.unit = unit
        self.bytes = self.peak = self.at = 0
        self._clock = self._peaked = self._action = 0
        self._begins = [0]  # of the actions, by the clock
        self._alive: dict[int, _Memory] = {}
        self._references: dict[int, Any] = {}
        self._freed: list[_Memory] = []  # since the peak, of what was alive then
        self._hosts: set[int] = set()

    def see(self, tensor: Tensor, host: bool = False) -> None:
        """Count the memory of a tensor, if it is new; ``host``: not as the device's."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._hosts:
            return
        if host:
            self._hosts.add(key)
            self._references[key] = weakref.ref(storage, lambda _: self._forget_host(key))
            return
        size = -(-storage.nbytes() // self.unit) * self.unit
        self._clock += 1
        self._alive[key] = _Memory(size, self._clock, self._action)
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.bytes += size
        if self.bytes > self.peak:
            self.peak, self._peaked, self.at = self.bytes, self._clock, self._action
            self._freed.clear()

    def on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor stands for one in the host's memory."""
        return bool(self._hosts) and tensor.untyped_storage()._cdata in self._hosts

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Say what a tensor's memory holds."""
        memory = self._alive.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            memory.kind = kind

    def begin_step(self, kind: str) -> None:
        """Begin a new peak. What is alive now, and not marked, is of a ``kind``."""
        for memory in self._alive.values():
            memory.kind = memory.kind or kind
        self.peak, self._peaked, self._begins = self.bytes, self._clock, [self._clock]
        self._action = self.at = 0
        self._freed.clear()

    def begin_action(self) -> None:
        """Begin the next action; what comes before the first is number 0."""
        self._clock += 1
        self._action += 1
        self._begins.append(self._clock)

    def at_peak(self, kept: str, transient: str, forward: bool) -> Counter[str]:
        """Bytes at the peak by kind. Of what the step has allocated, ``kept`` is what an earlier action did
        and, if the action at the peak is ``forward``, what outlives it; the rest is ``transient``."""
        ends = [*self._begins[1:], self._clock + 1]
        end = ends[self.at]
        bytes_of: Counter[str] = Counter()
        for memory in (*self._freed, *self._alive.values()):
            if memory.born > self._peaked:
                continue
            outlives = memory.died is None or memory.died >= end
            earlier = memory.action != self.at or (forward and outlives)
            bytes_of[memory.kind or (kept if earlier else transient)] += memory.size
        return bytes_of

    def _forget(self, key: int) -> None:
        memory = self._alive.pop(key)
        del self._references[key]
        self._clock += 1
        memory.died = self._clock
        self.bytes -= memory.size
        if memory.born <= self._peaked:
            self._freed.append(memory)

    def _forget_host(self, key: int) -> None:
        self._hosts.discard(key)
        del self._references[key]
