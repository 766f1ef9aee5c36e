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
from itertools import count
from threading import current_thread
from typing import Any, Protocol
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hexad.comm import collectives

NAME, COMPUTE = "recorded", "compute"


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
        stream: that it was started from, whose earlier work it follows.
    """

    number: int
    group: str
    kind: str
    nbytes: int
    dtype: str
    peer: int | None = None
    batch: int | None = None
    stream: str = COMPUTE


@dataclass(frozen=True)
class Waited:
    """A stream waits for a call."""

    number: int
    stream: str = COMPUTE


@dataclass(frozen=True)
class Computed:
    """Operators that run between two events."""

    operators: int
    stream: str = COMPUTE


@dataclass(frozen=True)
class Ordered:
    """What a stream does next follows what another one has been asked for."""

    stream: str
    before: str


@dataclass(frozen=True)
class Synchronised:
    """The host waits for the computing stream: it reads a value."""


@dataclass(frozen=True)
class Agreed:
    """The host agrees with the hosts of all ranks."""

    number: int


Event = Created | Call | Waited | Computed | Ordered | Synchronised | Agreed


class Observer(Protocol):
    """Sees calls as they are made."""

    def launched(self, call: Call, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Any:
        """A call was started; returns what :meth:`waited` is called with."""

    def waited(self, token: Any) -> None:
        """The current stream waits for a call."""


@dataclass
class Recording:
    """What this rank has asked of all its process groups, in order."""

    events: list[Event] = field(default_factory=list)
    observers: list[Observer] = field(default_factory=list)
    alone: bool = False
    batch: int | None = None
    stream: str = COMPUTE
    numbers: Iterator[int] = field(default_factory=count)
    batches: Iterator[int] = field(default_factory=count)
    agreements: Iterator[int] = field(default_factory=count)


_current = Recording()


class Work:
    """A call under way: tensors are held until it has been waited for, as NCCL's work holds them."""

    def __init__(
        self, inner: Any, recording: Recording, call: Call, tokens: list[Any], held: Any, last: Any
    ) -> None:
        self._inner, self._recording, self._call = inner, recording, call
        self._tokens, self._held, self._last = tokens, held, last

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait on the host, which is more than a device's stream would; noted as the stream's wait."""
        if self._held is not None:
            if self._inner is not None:
                self._inner.wait()
            with _disable_current_modes():
                self._last()
        self._recording.events.append(Waited(self._call.number, self._recording.stream))
        for observer, token in zip(self._recording.observers, self._tokens):
            observer.waited(token)
        self._held = None
        return True

    def is_completed(self) -> bool:
        return self._held is None


def _nothing() -> None:
    pass


class Recorded(dist.ProcessGroup):
    """Records calls, and passes them on to ``inner``, a gloo group; without one nothing is exchanged."""

    def __init__(self, rank: int, size: int, inner: Any, recording: Recording) -> None:
        super().__init__(rank, size)
        self._place, self._members, self._inner, self._recording = rank, size, inner, recording
        self.label = ""

    def size(self) -> int:
        return self._members

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:
        return NAME

    def _call(
        self,
        kind: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        start: Callable[[Any], Any],
        alone: Callable[[], None] = _nothing,
        last: Callable[[], None] = _nothing,
        peer: int | None = None,
    ) -> Work:
        """Record a call; ``start`` passes it on, ``alone`` is done instead in a dry run, ``last`` once it has
        been waited for."""
        recording = self._recording
        tensor = (*reads, *writes)[0]
        batch = recording.batch if kind in ("send", "receive") else None
        nbytes = sum(part.nbytes for part in reads or writes)
        number, dtype = next(recording.numbers), str(tensor.dtype)
        made = Call(number, self.label, kind, nbytes, dtype, peer, batch, recording.stream)
        recording.events.append(made)
        tokens = [observer.launched(made, reads, writes) for observer in recording.observers]
        with _disable_current_modes():
            if self._inner is None:
                alone()
            inner = None if self._inner is None else start(self._inner)
        return Work(inner, recording, made, tokens, (reads, writes), last if self._inner else _nothing)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._call("all_reduce", tensors, tensors, lambda group: group.allreduce(tensors, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        source = opts.rootRank
        return self._call(
            "broadcast", tensors, tensors, lambda group: group.broadcast(tensors, opts), peer=source
        )

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        def alone() -> None:
            parts = output.view(self._members, *own.shape)
            parts.copy_(own.clone())

        parts, writes = output.view(self._members, *own.shape), [output]
        if own.data_ptr() == parts[self._place].data_ptr():  # in place: this rank's part is only read
            writes = [parts[: self._place], parts[self._place + 1 :]]
        return self._call(
            "all_gather", [own], writes, lambda group: group._allgather_base(output, own), alone
        )

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        # gloo's own does not allow an output inside the input.
        total = given.clone() if self._inner is not None else given

        def last() -> None:
            output.copy_(total.view(self._members, *output.shape)[self._place])

        def alone() -> None:
            output.copy_(given.view(self._members, *output.shape)[self._place].clone())

        return self._call(
            "reduce_scatter", [given], [output], lambda group: group.allreduce([total]), alone, last
        )

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Work:
        def alone() -> None:
            output.zero_()
            rows = min(len(output), len(given))
            output[:rows].copy_(given[:rows])

        return self._call(
            "all_to_all",
            [given],
            [output],
            lambda group: group.alltoall_base(output, given, received, sent),
            alone,
        )

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._call("send", tensors, [], lambda group: group.send(tensors, peer, tag), peer=peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        def alone() -> None:
            tensors[0].fill_(0.01 if tensors[0].is_floating_point() else 0)

        return self._call(
            "receive", [], tensors, lambda group: group.recv(tensors, peer, tag), alone, peer=peer
        )

    def allgather(self, outputs: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> Work:
        def alone() -> None:
            for output in outputs[0]:
                output.copy_(own[0])

        return self._call("all_gather", own, outputs[0], lambda group: group.allgather(outputs, own), alone)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


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
