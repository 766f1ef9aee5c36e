"""A backend of torch.distributed that records what it is asked for.

Calls are passed on to gloo, or in a dry run to nobody: then a rank of a world of any size runs alone, with
values that are finite but meaningless. What a GPU does with them is played from the records: by
:mod:`.races` while they are made, by :mod:`.nccl` afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from threading import current_thread
from typing import Any, Protocol
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hexad.comm import collectives

from ..forwarding import Exchange, Forwarding

NAME = "recorded"
COMPUTE = "compute"
"""The stream that is the current one unless something is done beside it."""


@dataclass(frozen=True)
class Created:
    """A communicator: all of ``ranks`` come together to create it."""

    group: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A collective or message, started.

    Attributes:
        number: of this rank's calls.
        group: the communicator's name.
        kind: ``all_reduce``, ..., ``send``, ``receive``.
        nbytes: of what is sent (received, of a receive).
        dtype: of the elements.
        peer: the other end's place in the group, of messages; the source of a broadcast.
        batch: number of the batch that the message was started in; None of one started by itself.
        stream: the current one, which it follows.
    """

    number: int
    group: str
    kind: str
    nbytes: int
    dtype: str
    peer: int | None = None
    batch: int | None = None
    stream: str = COMPUTE

    @property
    def message(self) -> bool:
        """Whether it is one end of a message."""
        return self.kind in ("send", "receive")


@dataclass(frozen=True)
class Waited:
    """A stream waits for a call."""

    number: int
    stream: str = COMPUTE


@dataclass(frozen=True)
class Computed:
    """Operators that a stream runs between two events."""

    operators: int
    stream: str = COMPUTE


@dataclass(frozen=True)
class Followed:
    """A stream waits for what another one has been asked for."""

    before: str
    stream: str = COMPUTE


@dataclass(frozen=True)
class Marked:
    """A stream has been asked for what the host may wait for."""

    number: int
    stream: str = COMPUTE


@dataclass(frozen=True)
class Reached:
    """The host waits until a stream has come to a mark."""

    number: int


@dataclass(frozen=True)
class Synchronised:
    """The host waits for a stream: it reads a value."""

    stream: str = COMPUTE


@dataclass(frozen=True)
class Agreed:
    """The host agrees with the hosts of all ranks."""

    number: int


Queued = Waited | Computed | Followed | Marked
"""What a stream is asked for."""
Event = Created | Call | Queued | Reached | Synchronised | Agreed


class Observer(Protocol):
    """Sees calls as they are made."""

    def launched(self, call: Call, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Any:
        """A call was started; returns what :meth:`waited` is called with."""

    def waited(self, token: Any) -> None:
        """The current stream waits for a call."""


@dataclass
class Recording:
    """What this rank has asked of all its process groups, in order; ``stream`` is the current one."""

    events: list[Event] = field(default_factory=list)
    observers: list[Observer] = field(default_factory=list)
    alone: bool = False
    stream: str = COMPUTE
    batch: int | None = None
    numbers: Iterator[int] = field(default_factory=count)
    batches: Iterator[int] = field(default_factory=count)
    agreements: Iterator[int] = field(default_factory=count)


_current = Recording()


class Work:
    """A call under way. The tensors of a collective are held until it has been waited for, as NCCL's work
    holds them; those of a message are not: NCCL calls ``record_stream`` for their memory."""

    def __init__(
        self,
        inner: Any,
        recording: Recording,
        call: Call,
        tokens: list[Any],
        held: Any,
        last: Callable[[], object],
    ) -> None:
        self._inner, self._recording, self._call = inner, recording, call
        self._tokens, self._held, self._last = tokens, held, last
        self._over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait on the host, which is more than a device's stream would; noted as the stream's wait."""
        if not self._over:
            with _disable_current_modes():
                if self._inner is not None:
                    self._inner.wait()
                self._last()
        self._over = True
        for observer, token in zip(self._recording.observers, self._tokens):
            observer.waited(token)
        self._recording.events.append(Waited(self._call.number, self._recording.stream))
        self._held = None
        return True

    def is_completed(self) -> bool:
        return self._over


def _nothing() -> None:
    pass


class Recorded(Forwarding):
    """Records calls, and passes them on to ``inner``, a gloo group; without one nothing is exchanged."""

    name = NAME

    def __init__(self, rank: int, size: int, inner: Any, recording: Recording) -> None:
        super().__init__(rank, size)
        self._inner, self._recording = inner, recording
        self.label = ""

    def forward(
        self,
        kind: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        exchange: Exchange,
        peer: int | None = None,
    ) -> Any:
        """Record a call and pass it on; messages of the group of all ranks are those of hosts, on no
        device."""
        if kind in ("send", "receive") and self is dist.group.WORLD and self._inner is not None:
            with _disable_current_modes():
                return exchange(self._inner, inputs, outputs)
        recording, tensors = self._recording, (*inputs, *outputs)
        batch = recording.batch if kind in ("send", "receive") else None
        nbytes = sum(part.nbytes for part in inputs or outputs)
        dtype = str(tensors[0].dtype) if tensors else ""
        call = Call(next(recording.numbers), self.label, kind, nbytes, dtype, peer, batch, recording.stream)
        writes = self._written(kind, inputs, outputs)
        tokens = [observer.launched(call, inputs, writes) for observer in recording.observers]
        recording.events.append(call)
        inner, last = None, _nothing
        with _disable_current_modes():
            if self._inner is None:
                self._alone(kind, inputs, outputs)
            else:
                results = outputs
                if kind == "reduce_scatter":  # gloo's does not allow an output inside the input
                    results = [outputs[0].new_empty(outputs[0].shape)]
                    last = partial(outputs[0].copy_, results[0])
                inner = exchange(self._inner, inputs, results)
        return Work(inner, recording, call, tokens, () if call.message else tensors, last)

    def _written(self, kind: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        """What a call writes: gathered in place, a rank's own part is only read."""
        if kind == "all_gather" and len(outputs) == 1:
            parts = outputs[0].view(self.members, *inputs[0].shape)
            if inputs[0].data_ptr() == parts[self.place].data_ptr():
                return [parts[: self.place], parts[self.place + 1 :]]
        return outputs

    def _alone(self, kind: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Results without other ranks: finite numbers."""
        if kind == "all_gather":
            own = inputs[0].clone()
            for output in outputs:
                output.view(-1, *own.shape).copy_(own)
        elif kind == "reduce_scatter":
            outputs[0].copy_(inputs[0].view(self.members, *outputs[0].shape)[self.place].clone())
        elif kind == "all_to_all":
            rows = min(len(outputs[0]), len(inputs[0]))
            outputs[0].zero_()
            outputs[0][:rows].copy_(inputs[0][:rows])
        elif kind == "receive":
            outputs[0].fill_(0.01 if outputs[0].is_floating_point() else 0)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Recorded:
    recording = _current
    inner = None if recording.alone else dist.ProcessGroupGloo(store, rank, size, timeout)
    return Recorded(rank, size, inner, recording)


dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


@contextmanager
def recording(alone: bool = False) -> Iterator[Recording]:
    """Record what groups of the backend that are created inside are asked for."""
    global _current
    before, _current = _current, Recording(alone=alone)
    made = _current
    helper, together = dist.distributed_c10d._new_process_group_helper, dist.batch_isend_irecv
    waiting, thread = collectives._wait, current_thread()

    def wait(call: Any, trace: Any, action: Callable[[], Any], work: Any = None) -> Any:
        if call.kind.label.endswith(".world.agreement") and current_thread() is thread:
            made.events.append(Agreed(next(made.agreements)))
        return waiting(call, trace, action, work)

    def create(size: int, rank: int, ranks: list[int], *rest: Any, **options: Any) -> Any:
        group, store = helper(size, rank, ranks, *rest, **options)
        if isinstance(group, Recorded):
            group.label = str(options["group_name"] if "group_name" in options else rest[2])
            made.events.append(Created(group.label, tuple(ranks) or tuple(range(size))))
        return group, store

    def batched(operations: list[Any]) -> list[Any]:
        made.batch = next(made.batches)
        try:
            return together(operations)
        finally:
            made.batch = None

    with (
        mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", create),
        mock.patch.object(dist, "batch_isend_irecv", batched),
        mock.patch.object(collectives, "_wait", wait),
    ):
        try:
            yield made
        finally:
            _current = before
