"""``deepspeed.accelerator``: where this rank computes, under DeepSpeed's names."""

import os
import resource
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from hexad.engine.state import resident

from ..facade.installed import refused_name


def _no_op(*_: Any, **__: Any) -> None:
    """No effect: a CPU has nothing to wait for, to select or to return."""


def _allocated(device_index: Any = None) -> int:
    """Bytes of this process in memory."""
    return resident()


def _peak(device_index: Any = None) -> int:
    """Most bytes that this process had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gpu_memory(device_index: int | None = None) -> int:
    index = torch.cuda.current_device() if device_index is None else device_index
    return int(torch.cuda.get_device_properties(index).total_memory)


_NO_OPS = """
    current_stream default_stream empty_cache range_pop range_push reset_max_memory_allocated
    reset_max_memory_reserved reset_peak_memory_stats set_device synchronize
"""
_SYNCHRONOUS = "handles_memory_backpressure is_synchronized_device resolves_data_dependency use_host_timers"
_KINDS = "BFloat16 Byte Double Float Half Int Long"


def _set_visible(current_env: dict[str, str], local_accelerator_ids: Any) -> None:
    current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))


def _builder(name: str) -> type:
    return refused_name(f"deepspeed.ops.op_builder.{name}", "DeepSpeed's kernels are not part of Hexad")


_BOTH: dict[str, Any] = {
    "create_op_builder": lambda name: _builder(name)(),
    "export_envs": list,
    "get_compile_backend": lambda: "inductor",
    "get_op_builder": _builder,
    "get_rss": resident,
    "is_fp64_supported": lambda: True,
    "is_pinned": lambda tensor: tensor.is_pinned(),
    "op_builder_dir": lambda: "deepspeed.ops.op_builder",
    "set_visible_devices_envs": _set_visible,
    "visible_devices_envs": lambda: ["CUDA_VISIBLE_DEVICES"],
    "is_available": lambda: True,
    "is_fp16_supported": lambda: True,
    "lazy_call": lambda callback: callback(),
    "random": lambda: torch.random,
    "supported_dtypes": lambda: [torch.float32, torch.float16, torch.bfloat16],
}
_CPU: dict[str, Any] = {
    **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _KINDS.split()},
    "default_generator": lambda device_index=None: torch.default_generator,
    "device": lambda device_index=None: nullcontext(),
    "is_current_stream_capturing": lambda: False,
    "is_triton_supported": lambda: False,
    "supports_nvtx_domain": lambda: False,
    **dict.fromkeys(_NO_OPS.split(), _no_op),
    **dict.fromkeys(_SYNCHRONOUS.split(), lambda: True),
    **dict.fromkeys(("memory_allocated", "memory_cached", "memory_reserved"), _allocated),
    **dict.fromkeys(("max_memory_allocated", "max_memory_cached", "max_memory_reserved"), _peak),
    "Event": None,
    "Stream": None,
    "communication_backend_name": lambda: "gloo",
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "device_name": lambda device_index=None: "cpu",
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "initial_seed": torch.initial_seed,
    "is_bf16_supported": lambda: True,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "memory_stats": lambda device_index=None: {
        "allocated_bytes.all.current": _allocated(),
        "allocated_bytes.all.peak": _peak(),
    },
    "pin_memory": lambda tensor, align_bytes=1: tensor,
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    "stream": lambda stream: nullcontext(),
    "total_memory": lambda device_index=None: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
}
_GPU: dict[str, Any] = {
    **dict.fromkeys(_SYNCHRONOUS.split(), lambda: False),
    **{f"{kind}Tensor": getattr(torch.cuda, f"{kind}Tensor") for kind in _KINDS.split()},
    "communication_backend_name": lambda: "nccl",
    "default_generator": lambda device_index: torch.cuda.default_generators[device_index],
    "is_triton_supported": lambda: torch.cuda.get_device_capability()[0] >= 7,
    "supports_nvtx_domain": lambda: False,
    "device_name": lambda device_index=None: "cuda" if device_index is None else f"cuda:{device_index}",
    "pin_memory": lambda tensor, align_bytes=1: tensor.pin_memory(),
    "range_pop": torch.cuda.nvtx.range_pop,
    "range_push": torch.cuda.nvtx.range_push,
    "total_memory": _gpu_memory,
}
"""What an accelerator has; a GPU also what ``torch.cuda`` has. A CPU is one device without streams, whose
memory is this process's."""


class Accelerator:
    """The device that PyTorch has, under DeepSpeed's names."""

    def __init__(self) -> None:
        gpu = torch.cuda.is_available()
        self._name = "cuda" if gpu else "cpu"
        self._names = {**vars(torch.cuda), **_BOTH, **_GPU} if gpu else _BOTH | _CPU

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"the accelerator ({self._name}) has no {name!r}")
        return self._names[name]

    def current_device_name(self) -> str:
        """The name of the current device."""
        return str(self.device_name(self.current_device()))

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory that are not allocated."""
        return int(self.total_memory(device_index) - self.memory_allocated(device_index))

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device."""
        return tensor.device.type == self._name


@cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process."""
    return Accelerator()
