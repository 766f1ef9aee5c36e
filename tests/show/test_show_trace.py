"""Profiles: what every rank did in the steps that ``log.profile`` names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hexad.config import HexadError
from hexad.config.schema import ProfileSettings
from hexad.dataset.indexed import IndexedWriter
from hexad.show.trace import summarise
from hexad.training.profile import StepProfile

from ..pool import Pool
from ..training.command import call, write_run


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, correlation: int = 0) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": ts,
        "dur": dur,
        "tid": tid,
        "args": {"correlation": correlation},
    }


def test_kernels_of_a_gpu() -> None:
    """Two steps of 1,000 us: what overlaps counts as compute, and each exposed part for its axis."""
    label, launch, kernel = "user_annotation", "cuda_runtime", "kernel"
    events = [
        event("hexad.step 7", label, 0, 1000),
        event("hexad.step 8", label, 1000, 1000),
        event("hexad.data.all_reduce", label, 100, 10),
        event("cudaLaunchKernel", launch, 105, 1, correlation=1),
        event("hexad.tensor.all_gather", label, 120, 10),
        event("cudaLaunchKernelExC", launch, 121, 1, correlation=2),
        event("cudaLaunchKernel", launch, 140, 1, correlation=3),
        event("gemm", kernel, 0, 400, tid=7),
        event("gemm", kernel, 300, 300, tid=8),  # on another stream, partly at once
        event("ncclDevKernel_AllReduce", kernel, 500, 300, tid=20, correlation=1),  # 200 us of it exposed
        event("ncclDevKernel_AllGather", kernel, 700, 200, tid=21, correlation=2),  # 100 us more
        event("ncclDevKernel_Broadcast", kernel, 1500, 50, tid=20, correlation=3),  # not ours
        event("Memset", "gpu_memset", 1900, 300, tid=7),  # to 2,000: the steps end there
    ]
    trace = summarise(3, events)
    assert (trace.rank, trace.steps, trace.seconds) == (3, 2, pytest.approx(1e-3))
    assert trace.compute == pytest.approx(350e-6)
    exposed = {"data": 100e-6, "other": 25e-6, "tensor": 50e-6}
    assert dict(trace.exposed) == pytest.approx(exposed)
    assert trace.idle == pytest.approx(475e-6)


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """Processes of its own: a profiler's threads stay until the process ends."""
    own = Pool()
    yield own
    own.close()


def test_a_run_writes_traces_of_its_ranks(tmp_path: Path, own_pool: Pool) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document(np.arange(900) % 250)
    run = write_run(
        tmp_path, str(tmp_path / "data"), run={"steps": 4}, log={"profile": {"start": 2, "steps": 2}}
    )
    assert [status for status, _ in run.world(own_pool, 2, "parallel.data=2")] == [0, 0]
    assert len(list((run.directory / "profile").iterdir())) == 2
    result = call("show", "trace", str(run.directory), "--json")
    assert result.status == 0, result.err
    document = json.loads(result.out)
    assert document["steps"] == 2 and [rank["rank"] for rank in document["ranks"]] == [0, 1]
    measured = [line["step_seconds"] for line in run.metrics if line["step"] in (2, 3)]  # by the first rank
    assert document["ranks"][0]["seconds"] >= 0.9 * sum(measured) / 2
    for rank in document["ranks"]:
        # Another rank may begin a step later: the first one waits for it.
        assert rank["seconds"] >= 0.9 * min(measured) and rank["compute"] > 0 < rank["exposed"]["data"]
        parts = rank["compute"] + sum(rank["exposed"].values()) + rank["idle"]
        assert parts == pytest.approx(rank["seconds"])
    assert "exposed data" in call("show", "trace", str(run.directory)).out


def test_a_run_without_traces(tmp_path: Path) -> None:
    result = call("show", "trace", str(tmp_path))
    assert result.status == 2 and "no traces in profile/; set log.profile" in result.error
    with pytest.raises(HexadError, match="rank 1: the trace has no step"):
        summarise(1, [])


def test_memory_of_a_gpu_is_recorded_with_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run ends before the last step that was to be profiled."""
    done: list[object] = []

    class Profiler:
        def __init__(self, activities: list[torch.profiler.ProfilerActivity], **options: Any) -> None:
            done.append([activity.name for activity in activities])

        def start(self) -> None: ...
        def stop(self) -> None: ...

        def export_chrome_trace(self, path: str) -> None:
            done.append(Path(path).name)

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", done.append)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: done.append(Path(path).name))
    settings = ProfileSettings(start=2, steps=5)
    profile = StepProfile(settings, tmp_path, 4, torch.device("cuda"), lambda action: action())
    for number in (1, 2, 3):
        with profile.step(number):
            assert bool(done) == (number > 1)
    profile.finish()
    written = ["rank-00004.json.gz", "rank-00004-memory.pickle"]
    assert done == ["all", ["CPU", "CUDA"], *written, None]
