"""A backend of process groups with NCCL's semantics and gloo's transport: ``staged``, registered on import.

NCCL starts a collective when the current stream has got there and computes on a stream of its own; ``wait()``
only makes the current stream wait for that one. So does this backend, for ranks that share one GPU: a call
copies its inputs to the host on a side stream, a thread runs the collective by gloo, and the results are
copied back on the side stream. Delays of random length, before inputs are read and before results are
written, and NaN where results will be, show whether somebody uses a result, or overwrites an input, without
having waited.

Of CPU tensors the thread itself reads the inputs late and writes the results late, and ``wait()`` blocks.

Collectives of a group are made in the order of the calls, and so are messages to or from one peer, whatever
their tags, as with NCCL. Unlike NCCL's, messages to a peer do not wait for those from it.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .forwarding import Exchange, Forwarding

NAME = "staged"
CYCLES = (0, 10_000, 100_000, 1_000_000)
"""Of delays on a GPU, some 0.5 ms at most."""
SECONDS = (0.0, 0.0, 2e-4, 1e-3)
"""Of delays on a CPU."""


class Staged(Forwarding):
    """A group of ranks, see the module."""

    name = NAME

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._lines: dict[Hashable, _Line] = {}

    def forward(
        self,
        kind: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        exchange: Exchange,
        peer: int | None = None,
    ) -> _Call:
        """In order behind the calls of its line: messages to a peer, messages from it, all others."""
        line = (kind, peer) if kind in ("send", "receive") else "all"
        device = (*inputs, *outputs)[0].device if inputs or outputs else torch.device("cpu")
        key = line, device
        if key not in self._lines:
            self._lines[key] = _Line(device, f"{self.place} {line}")
        return self._lines[key].call(_Call(inputs, outputs, partial(exchange, self._gloo)))

    def shutdown(self) -> None:
        """End the threads; what is queued is done before."""
        for line in self._lines.values():
            line.end()
        self._lines.clear()

    abort = shutdown


class _Line:
    """Calls that are made one after the other, on a thread and a stream of their own."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._chance = random.Random(name)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._held: list[_Call] = []  # as NCCL keeps tensors until the device is done with them
        self._thread = threading.Thread(target=self._work, name=f"staged {name}", daemon=True)
        self._thread.start()

    def call(self, call: _Call) -> _Call:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(self._chance.choice(CYCLES))
                call.host = [
                    _like(tensor).copy_(tensor.detach(), non_blocking=True) for tensor in call.inputs
                ]
                call.staged = self._stream.record_event()
                _spoil(call)
        self._held = [held for held in self._held if not held.is_completed()]
        self._held.append(call)
        self._calls.put(call)
        return call

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)
        while (call := self._calls.get()) is not None:
            try:
                with torch.no_grad():
                    self._run(call)
            except BaseException as error:
                call.error = error
            call.started.set()

    def _run(self, call: _Call) -> None:
        if self._stream is None:
            time.sleep(self._chance.choice(SECONDS))
            call.host = [tensor.detach().clone() for tensor in call.inputs]
            _spoil(call)
        elif call.staged is not None:
            call.staged.synchronize()
        # In place gloo writes to the copy of the inputs.
        results = call.host if call.outputs is call.inputs else [_like(output) for output in call.outputs]
        call.exchange(call.host, results).wait()
        if self._stream is None:
            time.sleep(self._chance.choice(SECONDS))
            _copy(call.outputs, results)
            return
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._chance.choice(CYCLES))
            _copy(call.outputs, results)
            call.done = self._stream.record_event()


class _Call:
    """A collective under way: what torch's ``Work`` is.

    Attributes:
        inputs, outputs: on the device; the same list of calls in place.
        exchange: given both on the host, starts gloo's call.
        host: inputs on the host.
        staged, done: events of a GPU: inputs are there; results are.
        started: the thread has done its part: on a CPU all, on a GPU the copy to it is enqueued.
    """

    def __init__(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        exchange: Callable[[list[Tensor], list[Tensor]], Any],
    ) -> None:
        self.inputs, self.outputs, self.exchange = inputs, outputs, exchange
        self.host: list[Tensor] = []
        self.staged: Any = None
        self.done: Any = None
        self.started = threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait for the results; the host waits for gloo only."""
        self.started.wait()
        if self.error is not None:
            raise self.error
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        return True

    def is_completed(self) -> bool:
        """Whether the results are there."""
        return self.started.is_set() and (self.done is None or self.done.query())


def _like(tensor: Tensor) -> Tensor:
    """An empty tensor on the host, to which or from which a GPU copies by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def _spoil(call: _Call) -> None:
    """Fill the results with NaN, save those in the place of inputs: of some collectives they are valid
    meanwhile."""
    inputs = {tensor.untyped_storage().data_ptr() for tensor in call.inputs}
    for output in call.outputs:
        if output.is_floating_point() and output.untyped_storage().data_ptr() not in inputs:
            output.data.fill_(torch.nan)


def _copy(outputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    for output, result in zip(outputs, results, strict=True):
        output.data.copy_(result, non_blocking=True)  # unseen by autograd, as what NCCL writes


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Staged:
    return Staged(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
