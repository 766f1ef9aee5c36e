"""``deepspeed.utils``, ``runtime.utils``, ``compression.helper`` and ``moe.utils``; an engine's timer."""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from logging import INFO, getLogger
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import groups as groups
from .accelerator import get_accelerator
from .data import RepeatingLoader as RepeatingLoader
from .data import map_tensors
from .parameter_values import safe_get_full_fp32_param as safe_get_full_fp32_param
from .parameter_values import safe_get_full_grad as safe_get_full_grad
from .parameter_values import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from .parameter_values import safe_get_local_fp32_param as safe_get_local_fp32_param
from .parameter_values import safe_get_local_grad as safe_get_local_grad
from .parameter_values import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from .parameter_values import safe_set_full_fp32_param as safe_set_full_fp32_param
from .parameter_values import safe_set_full_grad as safe_set_full_grad
from .parameter_values import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from .parameter_values import safe_set_local_fp32_param as safe_set_local_fp32_param
from .parameter_values import safe_set_local_grad as safe_set_local_grad
from .parameter_values import safe_set_local_optimizer_state as safe_set_local_optimizer_state

Function = TypeVar("Function", bound=Callable[..., Any])

logger = getLogger("hexad")


def is_initialized() -> bool:
    """Whether the process group has been initialised."""
    return bool(dist.is_initialized())


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log on some ranks; -1 in place of the first is all of them."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank < 0 or (ranks and (ranks[0] == -1 or rank in ranks)):
        logger.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the device's memory on the first rank, if forced, and begin a new peak."""
    if not force or (dist.is_initialized() and dist.get_rank()):
        return
    gc.collect()
    device = get_accelerator()
    names = "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"
    figures = ", ".join(f"{name} {getattr(device, name)() / 2**30:.2f} GiB" for name in names)
    logger.info("%s: %s", message, figures)
    device.reset_peak_memory_stats()


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copies of tensors in containers: a view of a large bucket would be saved with all of it."""
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))


def move_to_device(item: Any, device: torch.device | str, criterion_func: Any = None) -> Any:
    """Tensors in containers on a device: those that fulfil a criterion, by default all."""
    return map_tensors(item, lambda x: x.to(device) if criterion_func is None or criterion_func(x) else x)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The module with a dotted name."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: nn.Module) -> None:
    """Replace the module with a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def instrument_w_nvtx(func: Function) -> Function:
    """``func``: ranges of a profile are those of ``torch.profiler``."""
    return func


noop_decorator = instrument_w_nvtx
log_dist_once = log_dist


def empty_cache() -> None:
    """Return the device's memory that is cached."""
    get_accelerator().empty_cache()


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Any = None) -> Any:
    """See :func:`move_to_device`."""
    return move_to_device(item, device, criterion_func)


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Create the directory of a file."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether PyTorch's release is within two bounds, each inclusive."""
    release = torch.torch_version.TorchVersion(torch.__version__)
    return (min_version is None or release >= str(min_version)) and (
        max_version is None or release <= str(max_version)
    )


def prefix_sum_inc(weights: Iterable[Any]) -> list[Any]:
    """Sums of the first one, two, ... weights."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The bounds of runs of as many items, the first ones of one more."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    from .pipe import uniform

    return [0, *(run.stop for run in uniform(num_items, num_parts))]


def partition_balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """The bounds of runs of nearly the same weight."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    from .pipe import balanced

    return [0, *(run.stop for run in balanced(weights, num_parts))]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as text."""
    named = (f"{name}={value!r}" for name, value in kwargs.items())
    return f"{base}({', '.join([*map(repr, args), *named])})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The one value that all items have.

    Raises:
        RuntimeError: they have several.
    """
    values = set(items)
    if len(values) != 1:
        raise RuntimeError(f"found {len(values)} values, expected one: {sorted(map(str, values))}")
    return values.pop()


def is_model_parallel_parameter(parameter: Tensor) -> bool:
    """Whether a parameter is marked as one of tensor ranks."""
    marks = (getattr(parameter, name, False) for name in ("model_parallel", "tensor_model_parallel"))
    return any(bool(mark) for mark in marks)


# Leaves of ZeRO 3, which have no effect: modules are gathered as they are called


def set_z3_leaf_modules(
    model: nn.Module, leaf_modules: Iterable[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of some classes, or with some names of classes, without effect; returns them."""
    leaves = list(leaf_modules)
    kinds, names = tuple(leaf for leaf in leaves if isinstance(leaf, type)), [str(leaf) for leaf in leaves]
    marked = [module for module in model.modules() if isinstance(module, kinds) or _class_in(module, names)]
    for module in marked:
        set_z3_leaf_module(module, True)
    return marked


def _class_in(module: nn.Module, names: Sequence[str]) -> bool:
    kind = type(module)
    return kind.__qualname__ in names or f"{kind.__module__}.{kind.__qualname__}" in names


def unset_z3_leaf_modules(
    model: nn.Module, leaf_modules: Iterable[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of :func:`set_z3_leaf_modules`; returns the modules."""
    modules = set_z3_leaf_modules(model, leaf_modules)
    for module in modules:
        set_z3_leaf_module(module, False)
    return modules


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, without effect."""
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


class ThroughputTimer:
    """An engine's ``tput_timer``: samples per second since its second step.

    Attributes:
        epoch_count: passes over the data, as the script counts them.
    """

    def __init__(self) -> None:
        self.epoch_count = self._steps = self._samples = 0
        self._began = self._ended = 0.0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1

    def step(self, samples: int) -> None:
        """Count a step's samples, of all ranks."""
        self._steps += 1
        self._ended = time.perf_counter()
        if self._steps <= 2:
            self._began = self._ended
        else:
            self._samples += samples

    def avg_samples_per_sec(self) -> float:
        """Samples per second; minus infinity before the third step."""
        return self._samples / (self._ended - self._began) if self._samples else -math.inf


# Of mixtures of experts, which no module has


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is an expert's: never."""
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a module has experts, and how many: none."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups of an optimizer, as a list: there are no experts, which would have groups of their own."""
    groups_given = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [{**group, "params": list(group["params"])} for group in groups_given]
