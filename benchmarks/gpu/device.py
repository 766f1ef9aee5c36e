"""What a step measures on, and how long something takes there."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hexad.launching.launch import start_on


@dataclass(frozen=True)
class Bench:
    """The GPU, or with ``--pretend`` the CPU in its place.

    Attributes:
        device: where tensors are.
        pretend: no figure is one of a GPU.
    """

    device: torch.device
    pretend: bool

    @classmethod
    def of(cls, pretend: bool) -> Bench:
        """The first GPU, with the allocator set up as ``hexad train`` does; a CPU if that is pretended."""
        device = torch.device("cpu") if pretend else torch.device("cuda", 0)
        if not pretend:
            start_on(device)
        return cls(device, pretend)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if not self.pretend:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], Any], repeats: int = 10, warm_up: int = 3) -> float:
        """Median seconds of an action on the device: between CUDA events, so that the host does not count
        unless the device waits for it."""
        repeats, warm_up = (2, 1) if self.pretend else (repeats, warm_up)
        for _ in range(warm_up):
            action()
        if self.pretend:
            return median(_wall(action) for _ in range(repeats))
        torch.cuda.synchronize(self.device)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in pairs:
            begin.record()
            action()
            end.record()
        torch.cuda.synchronize(self.device)
        return median(begin.elapsed_time(end) for begin, end in pairs) / 1e3

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers: a GPU multiplies zeros faster, as it takes less power."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def memory(self) -> dict[str, Any] | None:
        """GiB of the allocator at most, and how often it had to free its cache and try again; None on a
        CPU."""
        if self.pretend:
            return None
        statistics = torch.cuda.memory_stats(self.device)
        return {
            "allocated_gib": torch.cuda.max_memory_allocated(self.device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(self.device) / 2**30,
            "retries": statistics.get("num_alloc_retries", 0),
            "out_of_memory": statistics.get("num_ooms", 0),
        }

    def capacity(self) -> float:
        """Bytes that the device has."""
        return float("inf") if self.pretend else torch.cuda.mem_get_info(self.device)[1]


def _wall(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def gpu_facts() -> dict[str, Any]:
    """Name, memory, driver and clocks of the GPUs, and the libraries of this PyTorch; nothing that would take
    memory of a GPU."""
    query = "name,memory.total,driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"nvidia-smi: {error}"
    known: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.version.cuda is not None:
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        known |= {"cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, nccl)), query: said}
    return known
