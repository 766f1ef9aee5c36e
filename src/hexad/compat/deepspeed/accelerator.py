"""``deepspeed.accelerator``: where this rank computes."""

import os
import resource
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from hexad.engine.state import resident


class Accelerator:
    """The device that PyTorch has, under DeepSpeed's names; other names are those of ``torch.cuda``, or their
    counterparts of a CPU: see :class:`Host`."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._device: Any = torch.cuda if torch.cuda.is_available() else Host()

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._device, name):
            raise AttributeError(f"the accelerator ({self._name}) has no {name!r}")
        return getattr(self._device, name)

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, ``cuda:N`` or ``cpu``."""
        return self._name if device_index is None or self._name == "cpu" else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        """The name of the current device."""
        return self.device_name(self.current_device())

    def is_available(self) -> bool:
        """Whether there is a device."""
        return True

    def communication_backend_name(self) -> str:
        """The backend of ``torch.distributed`` for this device."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether it computes bf16, in hardware or not."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether it computes fp16, in hardware or not."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The formats that it computes."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_synchronized_device(self) -> bool:
        """Whether operators have ended when they return."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def random(self) -> Any:
        """The module of random numbers."""
        return torch.random

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory."""
        if self._name == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        index = torch.cuda.current_device() if device_index is None else device_index
        return int(torch.cuda.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory that are not allocated."""
        return self.total_memory(device_index) - int(self.memory_allocated())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A copy in page-locked memory, for a GPU; else the tensor."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def lazy_call(self, callback: Any) -> Any:
        """Call a function."""
        return callback()

    def range_push(self, message: str) -> None:
        """Begin a range of the profiler's timeline."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        """End a range of the profiler's timeline."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()


class Host:
    """What ``torch.cuda`` has, for a CPU: one device without streams, whose memory is this process's."""

    Stream = Event = None

    def current_device(self) -> int:
        """The number of the current device."""
        return 0

    def device_count(self) -> int:
        """Devices of this host."""
        return 1

    def no_op(self, *_: Any, **__: Any) -> None:
        """No effect: there is nothing to wait for, to select or to return."""

    set_device = synchronize = empty_cache = reset_peak_memory_stats = current_stream = default_stream = no_op
    reset_max_memory_allocated = reset_max_memory_reserved = no_op

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        """No effect: there are no streams."""
        return nullcontext()

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of this process in memory."""
        return resident()

    def max_memory_allocated(self, device: Any = None) -> int:
        """Most bytes that this process had in memory."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    memory_reserved = memory_cached = memory_allocated
    max_memory_reserved = max_memory_cached = max_memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """The two figures of memory, under names of ``torch.cuda.memory_stats``."""
        current, peak = self.memory_allocated(), self.max_memory_allocated()
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": peak}

    def manual_seed(self, seed: int) -> Any:
        """Seed the generator."""
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """The generator's seed."""
        return torch.initial_seed()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The generator's state."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Set the generator's state."""
        torch.set_rng_state(new_state)


@cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process."""
    return Accelerator()
