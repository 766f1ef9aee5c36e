"""Kernels of a run's ranks in profiled steps, from the traces in ``run.dir/profile``. No torch.

On a GPU, what counts are its kernels: those of NCCL while no other kernel runs are exposed communication of
the axis that they were started for. On a CPU, time inside operators is compute, time inside collectives
exposed communication. What remains of a step is idle.
"""

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from hexad.config import HexadError, one_line

LARGEST_TRACE = 1 << 30
"""Characters of a trace, decompressed; all of it is in memory."""
TimeSpan = tuple[float, float]
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
        """Seconds without compute and without exposed communication."""
        return max(0.0, self.seconds - self.compute - sum(self.exposed.values()))


def read_traces(directory: str | Path) -> list[RankTrace]:
    """Every rank's trace of a run directory.

    Raises:
        HexadError: there are none, or one is not readable.
    """
    paths = sorted(Path(directory).glob("profile/rank-*.json.gz"))
    if not paths:
        raise HexadError(f"{directory}: no traces in profile/; set log.profile: {{start: STEP, steps: N}}")
    return [_read(path) for path in paths]


def _read(path: Path) -> RankTrace:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            text = stream.read(LARGEST_TRACE + 1)
            if len(text) > LARGEST_TRACE:
                raise ValueError(f"larger than {LARGEST_TRACE:,} characters")
            events = json.loads(text)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error, RecursionError) as error:
        raise HexadError(f"{path}: not a trace of torch's profiler: {one_line(error)}") from None
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
    lengths, (busy, *waiting) = _covered(window, compute, *waits.values())
    if not on_gpu:  # operators inside of a collective are no compute
        busy &= ~np.any([np.zeros_like(busy), *waiting], axis=0)
    scale = 1e6 * len(steps)
    computed, exposed = float(lengths[busy].sum()) / scale, {}
    for axis, covered in sorted(zip(waits, waiting)):
        alone = covered & ~busy
        exposed[axis] = float(lengths[alone].sum()) / scale
        busy |= alone  # what two axes wait for at once counts once
    return RankTrace(rank, len(steps), (window[1] - window[0]) / scale, computed, exposed)


def _covered(
    window: TimeSpan, *groups: Sequence[TimeSpan]
) -> tuple[NDArray[np.float64], list[NDArray[np.bool_]]]:
    """Lengths of the pieces into which the ends of spans cut a window, and which of these pieces the spans of
    each group cover."""
    clipped = [np.clip(np.array(spans, dtype=np.float64).reshape(-1, 2), *window) for spans in groups]
    cuts = np.unique(np.concatenate([np.array(window), *(spans.ravel() for spans in clipped)]))
    covered = []
    for spans in clipped:
        places = np.searchsorted(cuts, spans)
        begun, ended = (np.bincount(places[:, side], minlength=len(cuts)) for side in (0, 1))
        covered.append(np.cumsum(begun - ended)[:-1] > 0)
    return np.diff(cuts), covered


def _is_label(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def _span(event: Mapping[str, Any]) -> TimeSpan:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _cpu(events: Sequence[Mapping[str, Any]]) -> tuple[list[TimeSpan], dict[str, list[TimeSpan]]]:
    """Spans of operators, and of collectives by axis."""
    waits: dict[str, list[TimeSpan]] = defaultdict(list)
    for event in events:
        if _is_label(event) and (label := _COMMUNICATION.fullmatch(event["name"])):
            waits[label[1]].append(_span(event))
    return [_span(event) for event in events if event.get("cat") == "cpu_op"], waits


def _gpu(events: Sequence[Mapping[str, Any]]) -> tuple[list[TimeSpan], dict[str, list[TimeSpan]]]:
    """Spans of kernels other than NCCL's, and of NCCL's by the axis of the label around their launch."""
    labels: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[Any, tuple[Any, float]] = {}
    for event in events:
        if _is_label(event) and (label := _COMMUNICATION.fullmatch(event["name"])):
            labels[event["tid"]].append((*_span(event), label[1]))
        elif str(event.get("cat", "")).startswith("cuda_"):
            launches[event.get("args", {}).get("correlation")] = (event["tid"], float(event["ts"]))
    for spans in labels.values():
        spans.sort()
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


def trace_json(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Seconds per step of every rank."""
    return {"steps": ranks[0].steps, "ranks": [{**asdict(trace), "idle": trace.idle} for trace in ranks]}


def trace_text(ranks: Sequence[RankTrace]) -> Table:
    """A row per rank; parts as milliseconds and per cent of a step."""
    axes = sorted({axis for trace in ranks for axis in trace.exposed})
    table = Table(title=f"mean of {ranks[0].steps} steps, milliseconds", box=None)
    for name in ("rank", "step", "compute", *(f"exposed {axis}" for axis in axes), "idle"):
        table.add_column(name, justify="right")
    for trace in ranks:
        parts = (trace.compute, *(trace.exposed.get(axis, 0.0) for axis in axes), trace.idle)
        cells = (f"{1e3 * part:,.1f} ({part / trace.seconds:.0%})" for part in parts)
        table.add_row(str(trace.rank), f"{1e3 * trace.seconds:,.1f}", *cells)
    return table
