"""Every kind of call that Hexad makes of NCCL, in a world of one rank, through :mod:`hexad.comm`.

One rank alone makes no call: an axis of size 1 is the identity. The axes here have one rank and a size that
multiplies and divides as 1 does but is not equal to it, so that the calls are made. A message to another rank
cannot be sent: only the exchange with oneself, which is one batch of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hexad import comm
from hexad.comm import Pending
from hexad.topology.mesh import Axis, new_group

from .device import Bench
from .record import Record

LIMIT = timedelta(seconds=20)


class _One(int):
    """Computes as 1, and is not equal to it."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False


class Alone(Axis):
    """An axis of one rank whose calls are made."""

    def __post_init__(self) -> None:
        self.size = _One(1)  # see the module


def run(record: Record) -> None:
    """Groups first, then calls over each."""
    bench = Bench.of(record.pretend)
    begin = time.perf_counter()
    join_alone(bench)
    record.put("default_group_seconds", time.perf_counter() - begin)
    groups = _groups(record, bench)
    axes = {kind: Alone(kind.split(",")[0], (0,), 0, group, bench.device) for kind, group in groups.items()}
    for kind, axis in axes.items():
        _calls(record, bench, kind, _kinds(axis))
    record.absent("send, receive", "a message needs two ranks, unless it is one batch with its receipt")
    if bench.pretend:
        record.absent("exchange", "gloo connects no rank with itself")
    else:  # the last, as a message that nobody receives would hang
        for kind, axis in axes.items():
            _calls(record, bench, kind, _exchange(axis))
    begin = time.perf_counter()
    dist.destroy_process_group()
    record.put("destroy_seconds", time.perf_counter() - begin)


def join_alone(bench: Bench) -> None:
    """Start a world of this process."""
    dist.init_process_group(
        "gloo" if bench.pretend else "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=LIMIT,
        device_id=None if bench.pretend else bench.device,
    )


def _groups(record: Record, bench: Bench) -> dict[str, Any]:
    """As :mod:`hexad.topology.mesh` makes them, split off the default group's communicator: of an urgent axis
    with a stream of high priority, of another one; and split off one of these."""
    groups: dict[str, Any] = {"default": dist.group.WORLD}
    for name, kind, parent in (
        ("tensor", "high priority", "default"),
        ("data", "normal", "default"),
        ("data", "part", "data, normal"),
    ):
        group = f"{name}, {kind}"
        begin = time.perf_counter()
        with record.attempt(f"group {group}"):
            groups[group] = new_group(name, (0,), groups[parent], bench.device, LIMIT, group)
            record.add("groups", {"group": group, "seconds": time.perf_counter() - begin})
    del groups["default"]
    return groups


def _calls(
    record: Record, bench: Bench, kind: str, calls: dict[str, Callable[[torch.Tensor], Pending]]
) -> None:
    """Every call twice, the first of which connects."""
    count = 1000 if bench.pretend else 2**22
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64):
        for name, call in calls.items():
            values = torch.arange(count, device=bench.device).remainder(199).to(dtype).view(-1, 8)
            row = {"group": kind, "call": name, "dtype": str(dtype).removeprefix("torch.")}
            with record.attempt(f"{name} of {row['dtype']} over {kind}"):
                row |= _timed(bench, call, values, first=True) | _timed(bench, call, values, first=False)
                record.add("calls", row)


def _kinds(axis: Axis) -> dict[str, Callable[[torch.Tensor], Pending]]:
    """Calls that return what they were given."""
    whole = slice(None)
    kinds: dict[str, Callable[[torch.Tensor], Pending]] = {
        f"all_reduce {operator}": lambda x, operator=operator: comm.all_reduce_async(x, axis, operator)
        for operator in ("sum", "max", "min")
    }
    return kinds | {
        "all_gather": lambda x: comm.all_gather_async(x, axis),
        "all_gather in place": lambda x: comm.all_gather_async(x[whole], axis, x),
        "reduce_scatter": lambda x: comm.reduce_scatter_async(x, axis),
        "reduce_scatter in place": lambda x: comm.reduce_scatter_async(x, axis, x[whole]),
        "all_to_all": lambda x: comm.all_to_all_async(x, axis),
        "all_to_all uneven": lambda x: comm.all_to_all_async(x, axis, [len(x)], [len(x)]),
        "broadcast": lambda x: Pending(comm.broadcast(x, axis)),
    }


def _exchange(axis: Axis) -> dict[str, Callable[[torch.Tensor], Pending]]:
    """A message to oneself."""
    return {"exchange": lambda x: comm.exchange_async(x, 0, torch.empty_like(x), 0, axis)}


def _timed(
    bench: Bench, call: Callable[[torch.Tensor], Pending], values: torch.Tensor, first: bool
) -> dict[str, Any]:
    """Microseconds of the host until the call returns, and until the result is there; whether torch's
    ``Work`` says so.

    Raises:
        RuntimeError: the result is wrong.
    """
    given = values.clone()
    bench.synchronize()
    begin = time.perf_counter()
    pending = call(given)
    work = pending._work
    host = time.perf_counter() - begin
    result = pending.wait()
    bench.synchronize()
    whole = time.perf_counter() - begin
    name = "first_" if first else ""
    row: dict[str, Any] = {f"{name}host_us": 1e6 * host, f"{name}done_us": 1e6 * whole}
    if not torch.equal(result, values):
        raise RuntimeError("the result is not what one rank has")
    with suppress(AttributeError):  # a broadcast has been waited for
        row["completed"] = _becomes_true(work.is_completed)
    return row


def _becomes_true(ask: Callable[[], bool]) -> bool:
    """NCCL's answer may come a moment after the device has finished."""
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        if ask():
            return True
        time.sleep(0.001)
    return False
