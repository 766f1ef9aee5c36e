"""Collectives over an axis: checked, counted in bytes, labelled for the profiler.

A group of size 1 is the identity and costs nothing. Tensors must be contiguous: torch treats a strided view
as contiguous memory and corrupts it in silence.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from hexad.topology.mesh import Axis
from hexad.topology.sent import sent_bytes

from .memory import same_place
from .trace import CallKind, Trace, TracedCall

T = TypeVar("T")

# torch 2.13 renamed two collectives; 2.11 and 2.12 know the old names only.
_all_gather_tensor: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_tensor: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

_OPERATORS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class CommError(RuntimeError):
    """A collective failed, most often because a peer died or hung."""


class Pending:
    """A collective under way. ``wait()`` returns its result; waiting again is free.

    ``finish`` is what remains to be computed on this rank once everything has arrived.
    """

    def __init__(
        self,
        result: Tensor,
        work: Any = None,
        call: TracedCall | None = None,
        axis: Axis | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._result, self._work, self._finish = result, work, finish
        self._call, self._axis = call, axis

    def wait(self) -> Tensor:
        """Block until the result may be used (on a GPU: until the stream may use it)."""
        if self._work is not None:
            work, self._work = self._work, None
            assert self._call is not None and self._axis is not None
            _wait(self._call, self._axis.trace, work.wait, None if self._axis.on_host else work)
            if self._finish is not None:
                self._result = self._finish(self._result)
        return self._result


def _start(
    operation: str,
    axis: Axis,
    nbytes: int,
    result: Tensor,
    call: Callable[[], Any],
    *inputs: Tensor,
    finish: Callable[[Tensor], Tensor] | None = None,
    sent: int | None = None,
    peer: int | None = None,
) -> Pending:
    """Start a collective, or a message to or from ``peer``; it is charged ``sent`` bytes, by default those of
    its formula. One rank alone has the result already."""
    if axis.size == 1:
        return Pending(result)
    for tensor in (result, *inputs):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{operation} over axis {axis.name}: shape {tuple(tensor.shape)} is not contiguous"
            )
    axis.sent[operation] += sent_bytes(operation, axis.size, nbytes) if sent is None else sent
    axis.calls[operation] += 1
    if axis.alone:
        _fill_as_if_alike(result, inputs)
        call = partial(_Returned, inputs)
    kind = axis.kinds.get((operation, peer)) or _kind(operation, axis, peer)
    traced = TracedCall(kind, nbytes, time.time())
    if axis.trace is not None:
        axis.trace.changes += 1
    try:
        return Pending(result, _labelled(kind, "", call), traced, axis, finish)
    except RuntimeError as error:
        raise CommError(f"{kind.what} failed: {error}") from error


class _Returned:
    """A completed ``Work`` for a call without other ranks; keeps the inputs alive until it is waited for."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = inputs

    def wait(self) -> None:
        """No-op."""

    def is_completed(self) -> bool:
        return True


def _fill_as_if_alike(result: Tensor, inputs: Sequence[Tensor]) -> None:
    """Fill the result of a call without other ranks as if these had what this one has: of numbers that are
    known, such as counts on a CPU. Tensors on ``meta`` have no values."""
    if inputs and result.numel() and not any(tensor.is_meta for tensor in (result, *inputs)):
        (source,) = inputs
        times = -(-result.numel() // max(1, source.numel()))
        result.copy_(source.flatten().repeat(times)[: result.numel()].view_as(result))


def _kind(operation: str, axis: Axis, peer: int | None) -> CallKind:
    """The names of such a call, made once: a layer makes ten calls, for which the host has 0.1 ms or less."""
    what = f"{operation} over axis {axis.name}"
    if peer is None:
        what, queue = f"{what} (ranks {_compact(axis.ranks)})", f"{axis.name} {_compact(axis.ranks)}"
    else:
        what = queue = f"{what} with rank {axis.ranks[peer]}"
    kind = axis.kinds[operation, peer] = CallKind(what, f"hexad.{axis.name}.{operation}", queue)
    return kind


def _labelled(kind: CallKind, suffix: str, action: Callable[..., T], *arguments: Any) -> T:
    """Do something under a name in a profile, while one is made: a label takes several microseconds."""
    # The flag of all threads: that of one is not set in autograd's.
    if not profiler._is_profiler_enabled:
        return action(*arguments)
    with torch.profiler.record_function(kind.label + suffix):
        return action(*arguments)


def _compact(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"


def all_reduce_async(tensor: Tensor, axis: Axis, operator: str = "sum") -> Pending:
    """Reduce ``tensor`` in place over the axis (``sum``, ``max`` or ``min``)."""
    call = partial(dist.all_reduce, tensor, _OPERATORS[operator], group=axis.group, async_op=True)
    return _start("all_reduce", axis, tensor.nbytes, tensor, call)


def all_reduce(tensor: Tensor, axis: Axis, operator: str = "sum") -> Tensor:
    """Reduce ``tensor`` in place over the axis and return it."""
    return all_reduce_async(tensor, axis, operator).wait()


def all_gather_async(tensor: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Concatenate every rank's ``[n, ...]`` along dim 0 to ``[size * n, ...]``.

    With ``out`` the result goes there; ``tensor`` may be this rank's own slice of it.
    """
    if axis.size == 1:
        return _alone(tensor, out)
    if out is None:
        out = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    call = partial(_all_gather_tensor, out, tensor, group=axis.group, async_op=True)
    return _start("all_gather", axis, out.nbytes, out, call, tensor)


def _alone(tensor: Tensor, out: Tensor | None) -> Pending:
    """The result on one rank: what it has, in ``out`` if that is given."""
    if out is None or same_place(out, tensor):
        return Pending(tensor if out is None else out)
    return Pending(out.copy_(tensor))


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Run :func:`all_gather_async` and wait for it."""
    return all_gather_async(tensor, axis).wait()


def reduce_scatter_async(tensor: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Sum ``[size * n, ...]`` over the ranks; this rank keeps its ``[n, ...]`` slice of dim 0.

    With ``out`` the result goes there; it may be this rank's own slice of ``tensor``, which must otherwise
    stay unchanged until ``wait()``.
    """
    if axis.size == 1:
        return _alone(tensor, out)
    if tensor.shape[0] % axis.size:
        raise ValueError(
            f"reduce_scatter over axis {axis.name}: {tensor.shape[0]} rows do not divide by {axis.size}"
        )
    if axis.on_host:
        return _reduce_scatter_by_exchange(tensor, axis, out)
    if out is None:
        out = tensor.new_empty((tensor.shape[0] // axis.size, *tensor.shape[1:]))
    call = partial(_reduce_scatter_tensor, out, tensor, group=axis.group, async_op=True)
    return _start("reduce_scatter", axis, tensor.nbytes, out, call, tensor)


def _reduce_scatter_by_exchange(tensor: Tensor, axis: Axis, out: Tensor | None) -> Pending:
    """Every rank sends each peer its slice and adds up what it gets: the bytes of a ring in one round.

    gloo's own took nearly twice as long (2 MiB, two ranks, torch 2.13: 4.8 and 3.7 ms against 2.5 and 2.0).
    """
    parts = torch.empty_like(tensor)
    call = partial(dist.all_to_all_single, parts, tensor, group=axis.group, async_op=True)

    def add(parts: Tensor) -> Tensor:
        return torch.sum(parts.unflatten(0, (axis.size, -1)), 0, out=out)

    return _start("reduce_scatter", axis, tensor.nbytes, parts, call, tensor, finish=add)


def all_to_all_async(
    tensor: Tensor,
    axis: Axis,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Pending:
    """Send a run of rows to every rank of the axis, and receive one from each, both in rank order.

    Args:
        tensor: ``[n, ...]``.
        axis: over which.
        send: rows for each rank, ``n`` in all; by default equal parts.
        receive: rows from each rank; by default as ``send``.
        out: where the result goes; rows beyond it stay as they are.
    """
    size, rows = axis.size, tensor.shape[0]
    if send is None and rows % size:
        raise ValueError(f"all_to_all over axis {axis.name}: {rows} rows do not divide by {size}")
    send = [rows // size] * size if send is None else list(send)
    receive = send if receive is None else list(receive)
    if len(send) != size or len(receive) != size or sum(send) != rows:
        raise ValueError(
            f"all_to_all over axis {axis.name}: {rows} rows, send {send}, receive {receive} for {size} ranks"
        )
    if size == 1:
        return _alone(tensor, out)
    whole = tensor.new_empty((sum(receive), *tensor.shape[1:])) if out is None else out
    result = whole[: sum(receive)]
    away = (rows - send[axis.rank]) * (tensor[:1].nbytes if rows else 0)  # all but this rank's own
    call = partial(dist.all_to_all_single, result, tensor, receive, send, group=axis.group, async_op=True)
    return _start("all_to_all", axis, away, whole, call, tensor, sent=away)


def all_to_all(
    tensor: Tensor,
    axis: Axis,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run :func:`all_to_all_async` and wait for it."""
    return all_to_all_async(tensor, axis, send, receive, out).wait()


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """Run :func:`reduce_scatter_async` and wait for it."""
    return reduce_scatter_async(tensor, axis).wait()


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrite ``tensor`` with that of the axis's rank ``source``, in place, and return it."""
    call = partial(dist.broadcast, tensor, axis.ranks[source], group=axis.group, async_op=True)
    return _start("broadcast", axis, tensor.nbytes, tensor, call).wait()


def send_async(tensor: Tensor, axis: Axis, to: int, tag: int = 0) -> Pending:
    """Send ``tensor`` to the axis's rank ``to``; keep it unchanged until ``wait()``."""
    call = partial(dist.isend, tensor, axis.ranks[to], group=axis.carrier(axis.rank, to), tag=tag)
    return _start("send", axis, tensor.nbytes, tensor, call, sent=tensor.nbytes, peer=to)


def receive_async(tensor: Tensor, axis: Axis, source: int, tag: int = 0) -> Pending:
    """Receive into ``tensor`` from the axis's rank ``source``."""
    call = partial(dist.irecv, tensor, axis.ranks[source], group=axis.carrier(source, axis.rank), tag=tag)
    return _start("receive", axis, tensor.nbytes, tensor, call, sent=0, peer=source)


def exchange_async(message: Tensor, to: int, out: Tensor, source: int, axis: Axis, tag: int = 0) -> Pending:
    """Send ``message`` to the axis's rank ``to`` and receive ``out`` from rank ``source``, together.

    An empty tensor is neither sent nor received. Keep ``message`` unchanged until ``wait()``, which returns
    ``out``.
    """
    sends, receives = message.numel() > 0, out.numel() > 0
    if not (sends or receives):
        return Pending(out)
    parts = [(dist.isend, message, to)] * sends + [(dist.irecv, out, source)] * receives

    def call() -> Any:
        batch = [
            dist.P2POp(kind, tensor, axis.ranks[peer], group=axis.group, tag=tag)
            for kind, tensor, peer in parts
        ]
        return _Together(dist.batch_isend_irecv(batch), message)

    return _start("exchange", axis, message.nbytes, out, call, message, sent=message.nbytes)


def on_stream(operation: str, axis: Axis, sent: int, action: Callable[[], T]) -> T:
    """Carry out a collective by kernels that a library enqueues on the current stream: counted, traced and
    labelled as others are.

    Args:
        operation: as :func:`sent_bytes` knows it.
        axis: over which.
        sent: bytes; where the host does not know the loads, those of an even one.
        action: enqueues the kernels; what it returns is returned.
    """
    results: list[T] = []

    def call() -> _OnStream:
        results.append(action())
        return _OnStream(axis.device)

    _start(operation, axis, sent, torch.empty(0, device="meta"), call, sent=sent).wait()
    return results[0]


class _OnStream:
    """A ``Work`` for kernels on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self) -> None:
        """No-op: what follows on the stream follows them."""

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


class _Together:
    """Several of torch's ``Work``, waited for as one; what is sent lives as long."""

    def __init__(self, works: Sequence[Any], message: Tensor) -> None:
        self._works, self._message = works, message

    def wait(self) -> None:
        """Until all are complete (on a GPU: until the stream can continue)."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def gather_objects(value: object, axis: Axis) -> list[Any]:
    """Every rank's picklable ``value``, in rank order. For set-up, not for the training step; over all ranks
    see :mod:`hexad.comm.agreement`."""
    if axis.size == 1:
        return [value]
    result: list[Any] = [None] * axis.size
    wait_for(axis, lambda: dist.all_gather_object(result, value, group=axis.group))
    return result


def wait_for(axis: Axis, action: Callable[[], T]) -> T:
    """Do something that waits for other ranks, noted in the trace. Returns what it returns.

    Raises:
        CommError: a peer is lost.
    """
    kind = axis.kinds.get(("agreement", None)) or _kind("agreement", axis, None)
    return _wait(TracedCall(kind, 0, time.time()), axis.trace, action)


def _wait(call: TracedCall, trace: Trace | None, action: Callable[[], T], work: Any = None) -> T:
    """Wait for a call by ``action``, noted in the trace, if there is one, and labelled for the profiler."""
    try:
        if trace is None:
            return _labelled(call.kind, ".wait", action)
        return _labelled(call.kind, ".wait", trace.wait, call, action, work)
    except RuntimeError as error:
        raise CommError(f"{call.kind.what} failed: {error}") from error
