"""A race detector for the streams of a GPU, that runs on a CPU.

On a GPU a collective runs on its communicator's stream, and ``wait()`` only orders streams: a missing wait,
memory that is written too early, or freed while another stream uses it, corrupts values silently. Here a
dispatch mode sees every operator's reads and writes, the recorder every collective and wait, and vector
clocks (Lamport 1978; Fidge 1988) tell which accesses are ordered. ``torch.cuda._sanitizer`` does the same on
a GPU.

The rules of streams: operators run on the current stream, in order. A collective starts after what was queued
on the current stream, and after its communicator's earlier ones. The host queues and goes on; what it queues
starts after what the host did before.

The rules of memory (PyTorch's caching allocator): a block belongs to the stream that is the current one when
it is allocated, and that stream may use it again as soon as it is freed. So other streams' accesses must be
ordered after the allocation and before the release, unless ``record_stream`` was called. NCCL's work holds
the tensors of a collective until it has been waited for, and calls ``record_stream`` for those of a message.

What is not seen: operators in other threads of the host, ``torch.save``, and that the host waits where a
GPU's memory is copied to or from pageable memory, which orders more than is assumed here.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import hexad
from hexad.comm import streams

from .recorder import (
    COMPUTE,
    NAME,
    Call,
    Computed,
    Followed,
    Marked,
    Reached,
    Recording,
    Synchronised,
    recording,
)

HOST = "host"
"""The host's main thread; a further one is ``host NAME``."""
Clock = dict[str, int]
_aten = torch.ops.aten
_SYNCHRONISING = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
}
"""Operators that need a number, or the size of their result, on the host."""


@dataclass(frozen=True)
class Access:
    """A read or write of part of a storage.

    Attributes:
        stream: that makes it.
        time: of the stream's clock.
        low, high: bytes of the storage.
        write: whether it writes.
        what: the operator or collective, and where it was called.
    """

    stream: str
    time: int
    low: int
    high: int
    write: bool
    what: object

    def conflicts(self, other: Access) -> bool:
        """Whether their order matters."""
        return (self.write or other.write) and self.low < other.high and other.low < self.high


@dataclass
class _Memory:
    """What is known of a storage: the stream that has allocated it, and when; the last access of each kind;
    streams that it was recorded for; whether its release is waited for."""

    owner: str = COMPUTE
    since: int = 0
    accesses: dict[tuple[str, int, int, bool], Access] = field(default_factory=dict)
    streams: set[str] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)
    followed: bool = False


class Races(TorchDispatchMode):
    """Finds accesses that no wait orders. A mode and a recorder's observer at once.

    Attributes:
        found: a line per race.
        waits: places of the package that have waited for a collective.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.found: list[str] = []
        self.waits: set[str] = set()
        self._recording = recording
        self._clocks: dict[str, Clock] = {COMPUTE: {}, HOST: {}}
        self._memory: dict[int, _Memory] = {}
        self._on_host: set[int] = set()
        self._since = 0
        self._marks = count()
        self._lock = threading.RLock()
        self._thread = threading.current_thread()

    # Operators

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._since += 1
        result = function(*args, **kwargs)
        kind = _kind(function)
        if kind.view:
            return result
        given = [*_tensors(args), *_tensors(kwargs.values())]
        storages = {_key(tensor) for tensor in given}
        made = [tensor for tensor in _tensors((result,)) if _key(tensor) not in storages]
        for tensor in made:
            self.allocated(tensor)
        reads, writes = kind.accesses(args, kwargs)
        writes += [] if kind.empty else made
        if reads or writes:
            stream = self.current
            if self._on_host and self._runs_on_host(given):
                stream = HOST
                for tensor in (*reads, *writes):
                    self.keep_on_host(tensor)
            self.access(stream, function, reads, writes)
        if function in _SYNCHRONISING:
            self.synchronise()
        return result

    def _runs_on_host(self, inputs: Sequence[Tensor]) -> bool:
        """Whether an operator's tensors are in the host's memory, but for scalars."""
        kept = [self.is_on_host(tensor) for tensor in inputs if tensor.dim()]
        return all(kept) if kept else bool(inputs) and all(map(self.is_on_host, inputs))

    def allocated(self, tensor: Tensor) -> None:
        """The current stream has allocated a tensor's memory."""
        with self._lock:
            clock = self._clocks[self.current]
            clock[self.current] = clock.get(self.current, 0) + 1
            memory = self._memory[_key(tensor)] = _Memory(self.current, clock[self.current])
            self._on_host.discard(_key(tensor))
            if self.current != COMPUTE:
                self._follow(tensor.untyped_storage(), memory)

    def access(self, stream: str, what: object, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
        """A stream's next operation reads and writes; returns its time."""
        with self._lock:
            clock = self._clocks.setdefault(stream, {})
            if not stream.startswith(HOST):
                _merge(clock, self._clocks[self.host])
            time = clock[stream] = clock.get(stream, 0) + 1
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._check(tensor, stream, time, write, what)
        return time

    def _check(self, tensor: Tensor, stream: str, time: int, write: bool, what: object) -> None:
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        memory = self._memory.setdefault(storage._cdata, _Memory(self.current))
        low = tensor.storage_offset() * tensor.itemsize
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        access = Access(stream, time, low, low + (extent + 1) * tensor.itemsize, write, what)
        if stream not in memory.streams:
            memory.streams.add(stream)
            if not self._ordered(memory.owner, memory.since, stream):
                self._report(
                    f"{_words(access)}{_caller()}, not ordered after its allocation on {memory.owner}"
                )
        if len(memory.streams) > 1:
            for other in memory.accesses.values():
                if not self._ordered(other.stream, other.time, stream) and access.conflicts(other):
                    self._report(f"{_words(access)}{_caller()}, not ordered after {_words(other)}")
        if stream != COMPUTE and not stream.startswith(HOST):
            self._follow(storage, memory)
        memory.accesses[stream, access.low, access.high, write] = access

    def _ordered(self, earlier: str, time: int, stream: str) -> bool:
        """Whether what a stream does now comes after what another one did at a time of its clock."""
        return earlier == stream or time <= self._clocks[stream].get(earlier, 0)

    def _follow(self, storage: Any, memory: _Memory) -> None:
        if not memory.followed:
            memory.followed = True
            weakref.finalize(storage, self._released, storage._cdata, memory)

    def _released(self, key: int, memory: _Memory) -> None:
        """A storage is freed: its owner's next allocation may use it."""
        if self._memory.get(key) is memory:
            del self._memory[key]
            self._on_host.discard(key)
        for access in memory.accesses.values():
            unknown = access.stream not in memory.recorded and not access.stream.startswith(HOST)
            if unknown and not self._ordered(access.stream, access.time, memory.owner):
                self._report(f"memory freed{_caller()} while in use: {_words(access)}")

    def _report(self, what: str) -> None:
        if what not in self.found:
            self.found.append(what)

    # Collectives

    def launched(self, call: Call, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> tuple[str, Clock]:
        """A collective starts on its communicator's stream, after what is on the current one."""
        self._flush()
        stream = f"communicator {call.group}"
        _merge(self._clocks.setdefault(stream, {}), self._clocks[self.current])
        self.access(stream, f"{call.kind}{_caller()}", reads, writes)
        for tensor in (*reads, *writes) if call.message else ():
            if tensor.numel():
                self._memory[_key(tensor)].recorded.add(stream)
        return stream, dict(self._clocks[stream])

    def waited(self, token: tuple[str, Clock]) -> None:
        """The current stream waits for a collective."""
        self._flush()
        self.waits.update(places()[:1])
        _merge(self._clocks[self.current], token[1])

    # Streams and the host

    @property
    def current(self) -> str:
        """The current stream."""
        return self._recording.stream

    def synchronise(self) -> None:
        """The host waits for the current stream."""
        self._flush()
        self._recording.events.append(Synchronised(self.current))
        _merge(self._clocks[self.host], self._clocks[self.current])

    @property
    def host(self) -> str:
        """The host's thread that runs."""
        thread = threading.current_thread()
        if thread is self._thread:
            return HOST
        name = f"{HOST} {thread.name}"
        self._clocks.setdefault(name, {})
        return name

    def mark(self) -> Callable[[], None]:
        """Returns how the host waits for what the current stream has been asked for so far."""
        self._flush()
        number, reached = next(self._marks), dict(self._clocks[self.current])
        self._recording.events.append(Marked(number, self.current))

        def wait() -> None:
            if self.host == HOST:
                self._flush()
                self._recording.events.append(Reached(number))
            _merge(self._clocks[self.host], reached)

        return wait

    def order(self, after: str, before: str) -> None:
        """What stream ``after`` does next starts when ``before`` has done what it was asked so far."""
        self._flush()
        self._recording.events.append(Followed(before, after))
        _merge(self._clocks.setdefault(after, {}), self._clocks.setdefault(before, {}))

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """What is done inside is done on another stream."""
        self._flush()
        before, self._recording.stream = self.current, name
        self._clocks.setdefault(name, {})
        try:
            yield
        finally:
            self._flush()
            self._recording.stream = before

    def keep_on_host(self, tensor: Tensor) -> None:
        """The tensor is in the host's memory: operators on it alone run on the host."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._on_host:
            self._on_host.add(storage._cdata)
            self._memory[storage._cdata] = _Memory(HOST)  # what has filled it has waited for the device
            self._follow(storage, self._memory[storage._cdata])

    def is_on_host(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._on_host

    def thread(self, function: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        """What another thread of the host does comes after what this one has done so far. Returns the
        function for it, and how this thread has waited for its end."""
        begin, end = dict(self._clocks[self.host]), Clock()

        def run() -> Any:
            with self._lock:
                _merge(self._clocks[self.host], begin)
            try:
                return function()
            finally:
                end.update(self._clocks[self.host])

        return run, lambda: _merge(self._clocks[self.host], end)

    def _flush(self) -> None:
        """Note how many operators were queued since the event before."""
        if self._since and threading.current_thread() is self._thread:
            self._recording.events.append(Computed(self._since, self.current))
            self._since = 0


def _key(tensor: Tensor) -> int:
    """Tells a tensor's storage from others that exist."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Kind:
    """What an operator does with memory.

    Attributes:
        view: it returns its inputs' memory, and accesses none.
        empty: its results are not initialised.
        shaped: it reads only the shape of what it is given.
        writes: by the names of its arguments, in order: whether it writes to them.
    """

    view: bool
    empty: bool
    shaped: bool
    writes: dict[str, bool]

    def accesses(self, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors among the arguments that are read, and written."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in (*zip(self.writes, args), *kwargs.items()):
            if self.writes[name]:
                writes += _tensors((value,))
            elif not self.shaped:
                reads += _tensors((value,))
        return reads, writes


@cache
def _kind(function: Any) -> _Kind:
    schema = function._schema
    aliases = [returned.alias_info for returned in schema.returns if returned.alias_info is not None]
    return _Kind(
        view=any(not alias.is_write for alias in aliases),
        empty=schema.name.startswith(("aten::empty", "aten::new_empty")),
        shaped=schema.name.endswith("_like") or schema.name.startswith("aten::new_"),
        writes={a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments},
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _nothing() -> None:
    pass


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if time > clock.get(stream, 0):
            clock[stream] = time


def _words(access: Access) -> str:
    done = "writes" if access.write else "reads"
    return f"{access.what} {done} bytes {access.low} to {access.high} on stream {access.stream}"


_PACKAGE = f"{Path(hexad.__file__).parent}/"  # the repository may be in a directory of that name


def places() -> list[str]:
    """Where in the package, but for ``comm``, something is called: innermost function first."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename.removeprefix(_PACKAGE)
        if name != frame.f_code.co_filename and not name.startswith("comm/"):
            found.append(f"{name}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


def _caller() -> str:
    inner = places()[:2]
    return f" ({', from '.join(inner)})" if inner else ""


class SimulatedStreams(streams.Streams):
    """A GPU's streams, as a detector follows them; what they are asked for is done at once."""

    apart = True

    def __init__(self, races: Races) -> None:
        self._races = races

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        self._races.order(name, self._races.current)
        with self._races.stream(name):
            yield

    def join(self, name: str) -> None:
        self._races.order(self._races.current, name)

    def mark(self) -> Callable[[], None]:
        return self._races.mark()

    def pinned(self, tensor: Tensor) -> Tensor:
        self._races.keep_on_host(tensor)
        return tensor

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        with _disable_current_modes():
            copy = tensor.clone()
        self._races.allocated(copy)
        self._races.access(self._races.current, "moved", [], [copy])
        return copy


@contextmanager
def races(recording: Recording) -> Iterator[Races]:
    """Look for races in what is done inside, on the way that a GPU would take."""
    found = Races(recording)
    recording.observers.append(found)
    submit, outcome = ThreadPoolExecutor.submit, Future.result

    def submitted(pool: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        run, ended = found.thread(lambda: function(*args, **kwargs))
        future: Any = submit(pool, run)
        future.ended = ended
        return future

    def result(future: Any, timeout: float | None = None) -> Any:
        try:
            return outcome(future, timeout)
        finally:
            getattr(future, "ended", _nothing)()

    originals = {name: getattr(Tensor, name) for name in ("tolist", "numpy")}

    def reading(name: str) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if found.is_on_host(tensor):
                found.access(found.host, name, [tensor], [])
            elif found.host == HOST:  # other threads have no tensors of the device
                found.access(found.current, name, [tensor], [])
                found.synchronise()
            return originals[name](tensor, *args, **kwargs)

        return read

    simulated = SimulatedStreams(found)
    with (
        mock.patch.multiple(Tensor, **{name: reading(name) for name in originals}),
        mock.patch.object(streams, "of", lambda device: simulated),
        mock.patch.object(ThreadPoolExecutor, "submit", submitted),
        mock.patch.object(Future, "result", result),
        found,
    ):
        yield found
    recording.observers.remove(found)


@contextmanager
def simulated(rank: int, world: int, store: str | None) -> Iterator[tuple[Recording, Races]]:
    """Look for races in what is done inside, with a recorded default process group.

    ``store`` is a file through which the ranks meet; None in a dry run, in which no other rank runs.
    """
    with recording(store is None) as made:
        if world > 1:
            meeting: Any = FakeStore() if store is None else dist.FileStore(store, world)
            dist.init_process_group(NAME, store=meeting, rank=rank, world_size=world)
        with races(made) as found:
            yield made, found
