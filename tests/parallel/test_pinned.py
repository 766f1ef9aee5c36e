"""Memory, streams and threads of GPU runs, by what the driver is asked for."""

import gc
import logging
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hexad.comm import streams
from hexad.comm.streams import CudaStreams
from hexad.launching import launch
from hexad.model.configuration import build_config
from hexad.planning import resolve
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh
from hexad.training import loop

pinned = CudaStreams(torch.device("cuda", 0)).pinned


class _Runtime:
    """Records what is locked, and how often the device was waited for."""

    def __init__(self, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.error = error
        self.waits = 0

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        assert self.waits  # for copies that may be under way
        del self.locked[address]


def test_exactly_what_is_needed_is_locked_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = _Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", runtime.synchronize)
    tensor = pinned(torch.zeros(1_000_003))
    view = tensor[5:]
    assert runtime.locked == {tensor.data_ptr(): 4_000_012}  # PyTorch's allocator: 4,194,304
    del tensor
    gc.collect()
    assert runtime.locked  # the view still needs it
    del view
    gc.collect()
    assert not runtime.locked
    assert pinned(torch.empty(0)).numel() == 0 and not runtime.locked


def test_memory_that_cannot_be_locked_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning, at the start of a run: copies from and to it are waited for."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Runtime(error=2))
    limited = CudaStreams(torch.device("cuda", 0))
    with caplog.at_level(logging.WARNING, "hexad"):
        limited.try_pinning()
        tensor = torch.ones(1000)
        assert limited.pinned(tensor) is tensor and tensor.sum() == 1000
    (record,) = caplog.records
    assert record.getMessage().startswith("67108864 bytes of the host's memory cannot be locked")
    assert "ulimit -l" in record.getMessage()


def test_a_gpu_has_the_same_streams_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh may be given the current GPU without its number, which tensors always have."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert streams.of(torch.device("cuda")) is streams.of(torch.device("cuda", 3))
    assert streams.of(torch.device("cuda", 0)) is not streams.of(torch.device("cuda", 3))


def test_a_thread_waits_on_the_gpu_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current GPU is the first one, where CUDA would be started."""
    current = [0]
    waits: list[int] = []

    class Selected:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: waits.append(current[-1]))
    monkeypatch.setattr(torch.cuda, "device", Selected)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    wait = CudaStreams(torch.device("cuda", 5)).mark()
    assert not waits
    wait()
    assert waits == [5] and current == [0]


@pytest.mark.parametrize(("data", "size"), [(1, 25.0), (6, 25.0), (7, 28.0), (512, 2048.0)])
def test_buckets_grow_with_the_data_degree(data: int, size: float) -> None:
    config = build_config({"batch": {"micro": 1, "global": 512 * 7 * 6}, "model": {"vocab": 64}})
    resolved = resolve(config, Layout(world=data))
    assert resolved.config.parallel.bucket_mb == size
    given = config.model_copy(update={"parallel": config.parallel.model_copy(update={"bucket_mb": 3.0})})
    assert resolve(given, Layout(world=data)).config.parallel.bucket_mb == 3.0


def test_threads_of_the_host_follow_the_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(64)))
    assert launch.host_threads({}, 8, False) == 8
    assert launch.host_threads({"OMP_NUM_THREADS": "1"}, 8, False) is None
    assert launch.host_threads({"OMP_NUM_THREADS": "1"}, 8, True) == 8  # torchrun's, not the user's
    assert launch.host_threads({"OMP_NUM_THREADS": "4"}, 8, True) is None
    assert launch.host_threads({}, 100, True) == 1
    # Cores bound to each task of a host, or shared by torchrun's ranks inside of one.
    assert launch.host_threads({"SLURM_CPUS_PER_TASK": "12"}, 8, False) == 12
    assert launch.host_threads({"SLURM_CPUS_PER_TASK": "12", "RANK": "0"}, 8, False) == 8


def test_compilers_of_a_host_are_no_more_than_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(variables: dict[str, str], local_world: int) -> str:
        launch.bound_compilers(variables, local_world)
        return variables["TORCHINDUCTOR_COMPILE_THREADS"]

    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(96)))
    assert processes({}, 8) == "12" and processes({}, 200) == "1"
    assert processes({}, 1) == "32"
    assert processes({"SLURM_CPUS_PER_TASK": "6"}, 8) == "6"
    assert processes({"TORCHINDUCTOR_COMPILE_THREADS": "20"}, 8) == "20"


def test_the_compiler_reads_its_number_of_processes_after_a_launch(tmp_path: Path) -> None:
    """Nothing that a run imports imports the compiler, which reads the variable then."""
    code = """
import os, sys
import hexad
from hexad.launching import launch
os.sched_getaffinity = lambda _: set(range(5))  # torch's number
launch._cores = lambda *_: 3
import hexad.training.loop, hexad.cli.worker
with hexad.launch(hexad.load_config({"run": {"device": "cpu"}, "model": {"vocab": 64}})):
    assert "torch._inductor.config" not in sys.modules
    import torch._inductor.config
    print(torch._inductor.config.compile_threads)
"""
    variables = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_COMPILE_THREADS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_segments_grow_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: dict[str, str]
) -> None:
    """The allocator reads its settings when CUDA starts, at the latest when a device is selected."""
    monkeypatch.setattr(os, "environ", dict(given))
    read: list[dict[str, str]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: read.append(dict(os.environ)))
    launch.start_on(GPU)
    (variables,) = read
    assert variables.pop("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING") == "false"
    assert variables == expected


def test_rocm_has_no_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    launch.start_on(GPU)
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(
    ("value", "pipeline", "device", "rank", "warned"),
    [
        ("1", 2, "cuda", 0, True),
        ("1", 2, "cuda", 1, False),
        ("1", 1, "cuda", 0, False),
        ("1", 2, "cpu", 0, False),
        ("8", 2, "cuda", 0, False),
        (None, 2, "cuda", 0, False),
    ],
)
def test_one_queue_for_all_streams_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str | None,
    pipeline: int,
    device: str,
    rank: int,
    warned: bool,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    axes = {name: Axis(name) for name in ("world", "tensor", "context", "data")}
    axes["pipeline"] = Axis("pipeline", tuple(range(pipeline)), rank)
    layout = Layout(world=pipeline, pipeline=pipeline)
    launch.warn_of_one_queue(Mesh(layout, rank, torch.device(device), axes, timedelta(0)))
    assert len(caplog.records) == warned
    if warned:
        assert re.search(r"CUDA_DEVICE_MAX_CONNECTIONS is 1 .* unset it$", caplog.text.strip())


@pytest.mark.parametrize("retries", [0, 3])
def test_memory_of_a_gpu_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, retries: int
) -> None:
    counted = {
        "allocated_bytes.all.peak": 3 << 30,
        "allocated_bytes.all.current": 1 << 30,
        "reserved_bytes.all.peak": 7 << 29,
        "num_alloc_retries": retries,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counted)
    assert loop._memory(GPU) == {
        "peak_memory_bytes": 3 << 30,
        "reserved_memory_bytes": 7 << 29,
        "allocator_retries": retries,
    }
    caplog.set_level(logging.INFO)
    trainer: Any = SimpleNamespace(mesh=Mesh.create(Layout(world=1), GPU))
    loop.Trainer._report_memory(trainer)
    assert "memory of a rank at most: 3.0 GiB allocated, 3.5 GiB reserved" in caplog.text
    assert ("free what it kept 3 times" in caplog.text) == bool(retries)
