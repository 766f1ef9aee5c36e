"""What the ranks of a run did in profiled steps, from the traces in ``run.dir/profile``. No torch.

On a GPU, what counts are its kernels: those of NCCL while no other kernel runs are exposed communication of
the axis that they were started for. On a CPU, time inside operators is compute, time inside collectives
exposed communication. What remains of a step is idle.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hexad.config import HexadError

Span = tuple[float, float]
"""Beginning and end, in microseconds."""

_STEP = re.compile(r"hexad\.step (\d+)")
_COMMUNICATION = re.compile(r"hexad\.(\w+)\.(\w+?)(\.wait)?")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class RankTrace:
    """One rank's seconds per step, the mean of those profiled.

    Attributes:
        rank: its number.
        steps: how many steps were profiled.
        seconds: duration of a step.
        compute: seconds in which something was computed.
        exposed: seconds of communication while nothing was, by axis.
    """

    rank: int
    steps: int
    seconds: float
    compute: float
    exposed: Mapping[str, float]

    @property
    def idle(self) -> float:
        """Seconds of neither."""
        return max(0.0, self.seconds - self.compute - sum(self.exposed.values()))


def read_traces(directory: str | Path) -> list[RankTrace]:
    """Every rank's trace of a run directory.

    Raises:
        HexadError: there are none, or one is not readable.
    """
    found = sorted(Path(directory).glob("profile/rank-*.json.gz"))
    if not found:
        raise HexadError(f"{directory}: no traces in profile/; set log.profile: {{start: STEP, steps: N}}")
    return [_read(path) for path in found]


def _read(path: Path) -> RankTrace:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            events = json.load(stream)["traceEvents"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise HexadError(f"{path}: not a trace of torch's profiler: {error}") from None
    rank = int(path.name.removeprefix("rank-").removesuffix(".json.gz"))
    return summarise(rank, [event for event in events if event.get("ph") == "X"])


def summarise(rank: int, events: Sequence[Mapping[str, Any]]) -> RankTrace:
    """The seconds of a rank's complete events ("X") in the trace.

    Raises:
        HexadError: no profiled step is among them.
    """
    labels = [event for event in events if _STEP.fullmatch(event["name"]) and _is_label(event)]
    steps = [_span(event) for event in labels]
    if not steps:
        raise HexadError(
            f"rank {rank}: the trace has no step; the run may have ended before log.profile.start"
        )
    window = (min(begin for begin, _ in steps), max(end for _, end in steps))
    on_gpu = any(event.get("cat") in _ON_GPU for event in events)
    threads = {event.get("tid") for event in labels}  # others work beside the step, such as those that save
    compute, waits = _gpu(events) if on_gpu else _cpu([e for e in events if e.get("tid") in threads])
    busy = _within(_union(compute), window)
    exposed = {}
    for axis, spans in sorted(waits.items()):
        alone = _subtract(_within(_union(spans), window), busy)
        exposed[axis] = _length(alone) / len(steps) / 1e6
        busy = _union([*busy, *alone])  # what two axes wait for at once counts once
    total = _length(_within(_union(compute), window))
    return RankTrace(
        rank, len(steps), _length([window]) / len(steps) / 1e6, total / len(steps) / 1e6, exposed
    )


def _is_label(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _cpu(events: Sequence[Mapping[str, Any]]) -> tuple[list[Span], dict[str, list[Span]]]:
    """Operators, without those inside of a collective, and the time spent in collectives, by axis."""
    waits: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if _is_label(event) and (label := _COMMUNICATION.fullmatch(event["name"])):
            waits[label[1]].append(_span(event))
    operators = _union(_span(event) for event in events if event.get("cat") == "cpu_op")
    return _subtract(operators, _union(span for spans in waits.values() for span in spans)), waits


def _gpu(events: Sequence[Mapping[str, Any]]) -> tuple[list[Span], dict[str, list[Span]]]:
    """Kernels other than NCCL's, and NCCL's by the axis of the label inside which they were launched."""
    labels: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[Any, tuple[Any, float]] = {}
    for event in events:
        if _is_label(event) and (label := _COMMUNICATION.fullmatch(event["name"])):
            labels[event["tid"]].append((*_span(event), label[1]))
        elif str(event.get("cat", "")).startswith("cuda_"):
            launches[event.get("args", {}).get("correlation")] = (event["tid"], float(event["ts"]))
    for each in labels.values():
        each.sort()
    compute, waits = [], defaultdict(list)
    for event in events:
        if event.get("cat") in _ON_GPU:
            if "nccl" in event["name"].lower():
                launch = launches.get(event.get("args", {}).get("correlation"))
                waits[_axis(labels, launch)].append(_span(event))
            else:
                compute.append(_span(event))
    return compute, waits


def _axis(labels: Mapping[Any, Sequence[tuple[float, float, str]]], launch: tuple[Any, float] | None) -> str:
    """The axis of the label around a launch, (thread, time)."""
    if launch is not None:
        thread = labels.get(launch[0], ())
        at = bisect_right(thread, (launch[1], float("inf"), "")) - 1
        if at >= 0 and launch[1] <= thread[at][1]:
            return thread[at][2]
    return "other"


def _union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint, ascending."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _within(spans: Iterable[Span], window: Span) -> list[Span]:
    clipped = ((max(begin, window[0]), min(end, window[1])) for begin, end in spans)
    return [(begin, end) for begin, end in clipped if begin < end]


def _subtract(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The parts of ``spans`` outside of ``holes``; both disjoint and ascending."""
    left, at = [], 0
    for begin, end in spans:
        while at < len(holes) and holes[at][1] <= begin:
            at += 1
        hole = at
        while hole < len(holes) and holes[hole][0] < end:
            if begin < holes[hole][0]:
                left.append((begin, holes[hole][0]))
            begin = max(begin, holes[hole][1])
            hole += 1
        if begin < end:
            left.append((begin, end))
    return left


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def trace_json(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Seconds per step of every rank."""
    return {
        "steps": ranks[0].steps,
        "ranks": [
            {
                "rank": each.rank,
                "seconds": each.seconds,
                "compute": each.compute,
                "exposed": dict(each.exposed),
                "idle": each.idle,
            }
            for each in ranks
        ],
    }


def trace_text(ranks: Sequence[RankTrace]) -> Table:
    """A row per rank; parts as milliseconds and per cent of a step."""
    axes = sorted({axis for each in ranks for axis in each.exposed})
    table = Table(title=f"mean of {ranks[0].steps} steps, milliseconds", box=None)
    for name in ("rank", "step", "compute", *(f"exposed {axis}" for axis in axes), "idle"):
        table.add_column(name, justify="right")
    for each in ranks:
        parts = (each.compute, *(each.exposed.get(axis, 0.0) for axis in axes), each.idle)
        cells = (f"{1e3 * part:,.1f} ({part / each.seconds:.0%})" for part in parts)
        table.add_row(str(each.rank), f"{1e3 * each.seconds:,.1f}", *cells)
    return table
