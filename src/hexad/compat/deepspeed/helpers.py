"""Functions of ``deepspeed.runtime.utils``, ``compression.helper`` and ``moe.utils``; an engine's timer."""

import gc
import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from .accelerator import get_accelerator
from .data import map_tensors

log = logging.getLogger("hexad")


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the device's memory on the first rank, if forced, and begin a new peak."""
    if not force or (dist.is_initialized() and dist.get_rank()):
        return
    gc.collect()
    device = get_accelerator()
    names = "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"
    figures = ", ".join(f"{name} {getattr(device, name)() / 2**30:.2f} GiB" for name in names)
    log.info("%s: %s", message, figures)
    device.reset_peak_memory_stats()


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


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is an expert's: never."""
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a module has experts, and how many: none."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups of an optimizer, as a list: there are no experts, which would have groups of their own."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [{**group, "params": list(group["params"])} for group in groups]
