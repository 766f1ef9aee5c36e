"""Page-locked memory, streams and threads of GPU runs, by what the driver is asked for."""

import gc

import pytest
import torch

from hexad.launching import launch
from hexad.model.configuration import build_config
from hexad.parallel.data.buckets import pinned
from hexad.planning import resolve
from hexad.topology.layout import Layout


class _Runtime:
    """Records what is locked."""

    def __init__(self, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


def test_exactly_what_is_needed_is_locked_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = _Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
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


def test_the_limit_of_locked_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Runtime(error=2))
    with pytest.raises(RuntimeError, match=r"4000 bytes failed with error 2; raise the limit .*ulimit -l"):
        pinned(torch.zeros(1000))


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
