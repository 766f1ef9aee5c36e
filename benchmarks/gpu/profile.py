"""What a step does on the device: kernels by time and by kind, and the time in which any runs; and on the
host: calls of CUDA, and the lines of Python that are executed."""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hexad.show.trace import summarise
from hexad.training.profile import STEP

from .device import Bench

KINDS = {
    "compiled": r"^triton",
    "attention": r"flash|fmha|sdpa|attention",
    "products": r"gem[mv]|nvjet|cutlass|xmma|cublas|splitk|aten::(mm|addmm|bmm)",
    "nccl": r"nccl",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "copies": r"memcpy|memset|copy",
}
"""Of kernels, by what is in their names; the first that fits. ``others`` are the rest."""


def profiled(bench: Bench, step: Callable[[], Any], steps: int = 2) -> dict[str, Any]:
    """Milliseconds per step of some steps under the profiler, which slows the host a little.

    Returns:
        ``step_ms``, as slow as the profiler makes it; ``busy_ms``, in which a kernel runs (on a CPU an
        operator); ``kinds_ms``; ``launches``; and ``kernels``: the twenty that take longest, each with
        ``ms``, ``calls`` and ``kind``; ``host_calls``: the ten functions of CUDA in which the host spends
        most time, with ``ms`` and ``calls``.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not bench.pretend:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(steps):
            with torch.profiler.record_function(f"{STEP} {number}"):
                step()
                bench.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in trace if event.get("ph") == "X"]
    summary = summarise(0, events)
    wanted = ("cpu_op",) if bench.pretend else ("kernel", "gpu_memcpy", "gpu_memset")
    milliseconds, calls = _totals(events, wanted, steps)
    host, host_calls = _totals(events, ("cuda_runtime", "cuda_driver"), steps)
    kinds: Counter[str] = Counter()
    for name, spent in milliseconds.items():
        kinds[_kind(name)] += spent
    return {
        "step_ms": 1e3 * summary.seconds,
        "busy_ms": 1e3 * (summary.seconds - summary.idle),
        "kinds_ms": dict(kinds.most_common()),
        "launches": calls.total(),
        "kernels": [
            {"kernel": name[:100], "ms": spent, "calls": calls[name], "kind": _kind(name)}
            for name, spent in milliseconds.most_common(20)
        ],
        "host_calls": [
            {"function": name, "ms": spent, "calls": host_calls[name]} for name, spent in host.most_common(10)
        ],
    }


def _totals(
    events: list[dict[str, Any]], categories: tuple[str, ...], steps: int
) -> tuple[Counter[str], Counter[str]]:
    """Milliseconds and calls per step of the events of some categories, by name."""
    milliseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in categories:
            milliseconds[event["name"]] += event["dur"] / 1e3 / steps
            calls[event["name"]] += 1 / steps
    return milliseconds, calls


def _kind(name: str) -> str:
    found = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "others")


INTERVAL = 1e-3
"""Seconds between two samples of the host's stacks."""


def host_stacks(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Where the host's time goes in some steps: samples of what Python executes, of forward and backward
    passes. Operators of PyTorch count for the line that calls them.

    Returns:
        ``samples``; ``collector_ms``, of Python's garbage collector per step; ``lines`` and ``functions``:
        rows with ``where`` and ``share``, of the lines that were executed at a sample, and of the functions
        that were entered, with all that they call.
    """
    lines: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    main, over = threading.get_ident(), threading.Event()
    collections: list[float] = []  # when each began and ended

    def note(*_: Any) -> None:
        collections.append(time.perf_counter())

    def sample() -> None:
        while not over.wait(INTERVAL):
            frames = _stack(sys._current_frames(), main)
            if frames:
                lines[f"{_name(frames[0])}:{frames[0].f_lineno}"] += 1
                functions.update({_name(frame) for frame in frames})

    sampler = threading.Thread(target=sample)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(INTERVAL / 10)  # or samples would be taken only where the host releases the lock
    gc.callbacks.append(note)
    sampler.start()
    try:
        for _ in range(steps):
            step()
    finally:
        over.set()
        sampler.join()
        gc.callbacks.remove(note)
        sys.setswitchinterval(switch)
    return {
        "collector_ms": 1e3 * (sum(collections[1::2]) - sum(collections[::2])) / steps,
        "samples": lines.total(),
        "lines": _shares(lines, lines.total()),
        "functions": _shares(functions, lines.total()),
    }


def _stack(stacks: dict[int, FrameType], main: int) -> list[FrameType]:
    """Frames of the thread that runs the step, innermost first; while it waits for a backward pass, which on
    a GPU runs in a thread that Python has not started, preceded by that one's."""
    known = {thread.ident for thread in threading.enumerate()}
    starts = [stacks[main]]
    if starts[0].f_code.co_name == "_engine_run_backward":
        starts = [stack for thread, stack in stacks.items() if thread not in known] + starts
    frames = []
    for start in starts:
        frame: FrameType | None = start
        while frame is not None and frame.f_code is not host_stacks.__code__:
            frames.append(frame)
            frame = frame.f_back
    return frames


def _name(frame: FrameType) -> str:
    path = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{frame.f_code.co_qualname} {path}"


def _shares(counts: Counter[str], total: int) -> list[dict[str, Any]]:
    return [{"where": where, "share": count / total} for where, count in counts.most_common(40)]
