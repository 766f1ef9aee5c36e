"""What a step does on the device: kernels by time and by kind, and the time in which any runs."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
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
        ``ms``, ``calls`` and ``kind``.
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
    milliseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in wanted:
            milliseconds[event["name"]] += event["dur"] / 1e3 / steps
            calls[event["name"]] += 1
    kinds: Counter[str] = Counter()
    for name, spent in milliseconds.items():
        kinds[_kind(name)] += spent
    return {
        "step_ms": 1e3 * summary.seconds,
        "busy_ms": 1e3 * (summary.seconds - summary.idle),
        "kinds_ms": dict(kinds.most_common()),
        "launches": calls.total() / steps,
        "kernels": [
            {"kernel": name[:100], "ms": spent, "calls": calls[name] / steps, "kind": _kind(name)}
            for name, spent in milliseconds.most_common(20)
        ],
    }


def _kind(name: str) -> str:
    found = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "others")
