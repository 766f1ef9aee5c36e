"""Scripts that name GPUs, on a host without one: their tensors and modules stay on the CPU, and gloo is in
NCCL's place."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hexad.launching.environment import environment


def _on_cpu(device: Any) -> Any:
    """The CPU in place of a GPU; any other device, or argument, as it is."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    return device


class _CpuForCuda(TorchFunctionMode):
    """Replaces GPUs in calls of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        device = kwargs.get("device") if kwargs else None
        if device is not None:
            number = isinstance(device, int) and not isinstance(device, bool)
            kwargs = {**kwargs, "device": "cpu" if number else _on_cpu(device)}
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``torch.distributed`` that creates groups, with gloo in place of NCCL."""

    @wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if isinstance(arg, str) and arg == "nccl" else arg for arg in args)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        if kwargs.get("device_id") is not None:
            kwargs["device_id"] = None
        return function(*args, **kwargs)

    return create


_NO_EFFECT = ("empty_cache", "set_device", "synchronize", "reset_peak_memory_stats")
_TYPES = ("ByteTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")
_mode: list[_CpuForCuda] = []


def use_cpu_for_cuda() -> None:
    """Let what a script does on GPUs happen on the CPU, in this process, unless there is a GPU."""
    if _mode or torch.cuda.is_available():
        return
    _mode.append(_CpuForCuda())
    _mode[0].__enter__()
    for name in _NO_EFFECT:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in _TYPES:
        setattr(torch.cuda, name, getattr(torch, name))
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: environment().local_world  # scripts start a rank for each
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    dist.init_process_group = _gloo(dist.init_process_group)
    dist.new_group = _gloo(dist.new_group)
