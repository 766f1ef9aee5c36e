"""A race detector for the streams of a GPU, that runs on a CPU.

On a GPU a collective runs on its communicator's stream, and ``wait()`` only orders streams: a missing wait,
memory that is written too early, or freed while another stream uses it, corrupts values silently. Here a
dispatch mode sees every operator's reads and writes, the recorder every collective and wait, and vector
clocks (Lamport 1978; Fidge 1988) tell which accesses are ordered. ``torch.cuda._sanitizer`` does the same on
a GPU.

The rules of streams: operators run on the current stream, in order. A collective starts after what was queued
on the current stream, and after its communicator's earlier ones. The host queues and goes on; what it queues
starts after what the host did before.

The rules of memory (PyTorch's caching allocator): a block that is freed is used again by its stream at once,
so that other streams' accesses must be ordered before that point, unless ``record_stream`` was called. Work
that has not been waited for holds its tensors.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from hexad.comm import streams

from .recorder import COMPUTE, NAME, Call, Computed, Ordered, Recording, Synchronised, recording

HOST = "host"
"""Streams of which there is one; a further thread of the host is ``host NAME``."""
Clock = dict[str, int]
_aten = torch.ops.aten
_SYNCHRONISING = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}


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
    what: str

    def conflicts(self, other: Access) -> bool:
        """Whether their order matters."""
        return (self.write or other.write) and self.low < other.high and other.low < self.high


@dataclass
class _Memory:
    """What is known of a storage."""

    owner: str = COMPUTE
    accesses: dict[tuple[str, int, int, bool], Access] = field(default_factory=dict)
    streams: set[str] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)
    followed: bool = False


class Races(TorchDispatchMode):
    """Finds accesses that no wait orders. A mode and a recorder's observer at once.

    Attributes:
        found: a line per race.
        operators: how many were seen.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operators = 0
        self.current = COMPUTE
        self._recording = recording
        self._clocks: dict[str, Clock] = {COMPUTE: {}, HOST: {}}
        self._memory: dict[int, _Memory] = {}
        self._on_host: set[int] = set()
        self._since = 0
        self._lock = threading.RLock()
        self._thread = threading.current_thread()

    # Operators

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _aten.record_stream.default:
            return None
        self.operators += 1
        self._since += 1
        result = function(*args, **kwargs)
        reads, writes = _accesses(function, args, kwargs, result)
        if reads or writes:
            tensors = [*reads, *writes]
            stream = self.current
            if self._on_host and self._runs_on_host(args, kwargs):
                stream = HOST
                for tensor in tensors:
                    self.keep_on_host(tensor)
            self.access(stream, str(function), reads, writes)
        if function in _SYNCHRONISING:
            self.synchronise()
        return result

    def _runs_on_host(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator's tensors are in the host's memory, but for scalars."""
        inputs = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        kept = [self.is_on_host(tensor) for tensor in inputs if tensor.dim()]
        return all(kept) if kept else bool(inputs) and all(map(self.is_on_host, inputs))

    def access(self, stream: str, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
        """A stream's next operation reads and writes; returns its time."""
        with self._lock:
            clock = self._clocks.setdefault(stream, {})
            if not stream.startswith(HOST):
                _merge(clock, self._clocks[HOST])
            time = clock[stream] = clock.get(stream, 0) + 1
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._check(tensor, stream, time, write, what)
        return time

    def _check(self, tensor: Tensor, stream: str, time: int, write: bool, what: str) -> None:
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        memory = self._memory.setdefault(storage._cdata, _Memory(self.current))
        low = tensor.storage_offset() * tensor.itemsize
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        access = Access(stream, time, low, low + (extent + 1) * tensor.itemsize, write, what)
        if memory.streams - {stream}:
            clock = self._clocks[stream]
            for other in memory.accesses.values():
                ordered = other.stream == stream or other.time <= clock.get(other.stream, 0)
                by_threads = other.stream.startswith(HOST) and stream.startswith(HOST)
                if not ordered and not by_threads and access.conflicts(other):
                    self._report(f"{_words(access)}{_caller(what)}, not ordered after {_words(other)}")
        if stream not in memory.streams:
            memory.streams.add(stream)
        if stream != COMPUTE and not stream.startswith(HOST):
            self._follow(storage, memory)
        memory.accesses[stream, access.low, access.high, write] = access

    def _follow(self, storage: Any, memory: _Memory) -> None:
        if not memory.followed:
            memory.followed = True
            weakref.finalize(storage, self._released, storage._cdata)

    def _released(self, key: int) -> None:
        """A storage is freed: its owner's next allocation may use it."""
        memory = self._memory.pop(key, None)
        self._on_host.discard(key)
        if memory is None:
            return
        clock = self._clocks[memory.owner]
        for access in memory.accesses.values():
            ordered = access.stream == memory.owner or access.time <= clock.get(access.stream, 0)
            if not ordered and access.stream not in memory.recorded and not access.stream.startswith(HOST):
                self._report(f"memory freed{_caller('')} while in use: {_words(access)}")

    def _report(self, what: str) -> None:
        if what not in self.found:
            self.found.append(what)

    # Collectives

    def launched(self, call: Call, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> tuple[str, Clock]:
        """A collective starts on its communicator's stream, after what is on the current one."""
        self._flush(1)
        stream = f"communicator {call.group}"
        _merge(self._clocks.setdefault(stream, {}), self._clocks[self.current])
        self.access(stream, f"{call.kind}{_caller(call.kind)}", reads, writes)
        return stream, dict(self._clocks[stream])

    def waited(self, token: tuple[str, Clock]) -> None:
        """The current stream waits for a collective."""
        self._flush(1)
        _merge(self._clocks[self.current], token[1])

    # Streams and the host

    def synchronise(self) -> None:
        """The host waits for the current stream."""
        self._flush()
        self._recording.events.append(Synchronised())
        _merge(self._clocks[self.host], self._clocks[self.current])

    @property
    def host(self) -> str:
        """The stream of the host's thread that runs."""
        thread = threading.current_thread()
        if thread is self._thread:
            return HOST
        name = f"{HOST} {thread.name}"
        self._clocks.setdefault(name, {})
        return name

    def mark(self) -> Callable[[], None]:
        """Returns how the host waits for what the current stream has been asked for so far."""
        reached = dict(self._clocks[self.current])
        return lambda: _merge(self._clocks[self.host], reached)

    def order(self, after: str, before: str) -> None:
        """What stream ``after`` does next starts when ``before`` has done what it was asked so far."""
        self._flush()
        self._recording.events.append(Ordered(after, before))
        _merge(self._clocks.setdefault(after, {}), self._clocks.setdefault(before, {}))

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """What is done inside is done on another stream."""
        self._flush()
        before, self.current = self.current, name
        self._clocks.setdefault(name, {})
        self._recording.stream = name
        try:
            yield
        finally:
            self._flush()
            self.current = self._recording.stream = before

    def record_stream(self, tensor: Tensor) -> None:
        """The current stream uses a tensor: its memory is not used again before that is over."""
        key = tensor.untyped_storage()._cdata
        self._memory.setdefault(key, _Memory()).recorded.add(self.current)

    def keep_on_host(self, tensor: Tensor) -> None:
        """The tensor is in the host's memory: operators on it alone run on the host."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._on_host:
            self._on_host.add(storage._cdata)
            self._memory[storage._cdata] = _Memory(HOST)  # what has filled it has waited for the device
            self._follow(storage, self._memory[storage._cdata])

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    def _flush(self, insert: int = 0) -> None:
        """Note how many operators were queued on the current stream since the event before; ``insert``: which
        is one of so many that have been noted already."""
        if self._since:
            events = self._recording.events
            events.insert(len(events) - insert, Computed(self._since, self.current))
            self._since = 0


def _accesses(function: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors whose memory an operator reads, and writes. Views access nothing; factories only write."""
    schema = function._schema
    outputs = [value for value in tree_iter(result) if isinstance(value, Tensor)]
    if any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns
    ):
        return [], []
    if function.namespace == "aten" and schema.name.startswith(("aten::empty", "aten::new_empty")):
        return [], []
    shaped = schema.name.endswith("_like") or schema.name.startswith("aten::new_")
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        tensors = [part for part in tree_iter(value) if isinstance(part, Tensor)] if value is not None else []
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
        elif not shaped:
            reads += tensors
    return reads, writes + [output for output in outputs if not any(output is given for given in writes)]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if time > clock.get(stream, 0):
            clock[stream] = time


def _words(access: Access) -> str:
    done = "writes" if access.write else "reads"
    return f"{access.what} {done} bytes {access.low} to {access.high} on stream {access.stream}"


def _caller(what: str) -> str:
    """Where in the package something was called."""
    frames = [frame for frame in traceback.extract_stack() if "/hexad/" in frame.filename]
    inner = [frame for frame in frames if "/comm/" not in frame.filename][-2:]
    places = (f"{frame.filename.rpartition('/hexad/')[2]}:{frame.name}" for frame in reversed(inner))
    return f" ({', from '.join(places)})" if inner else ""


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
        self._races.access(self._races.current, "moved", [], [copy])
        return copy


@contextmanager
def races(recording: Recording) -> Iterator[Races]:
    """Look for races in what is done inside, on the way that a GPU would take."""
    found = Races(recording)
    recording.observers.append(found)
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
