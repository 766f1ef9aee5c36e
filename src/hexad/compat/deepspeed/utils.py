"""``deepspeed.utils``, ``runtime.utils``, ``compression.helper`` and ``moe.utils``; an engine's timer."""

from __future__ import annotations

import gc
import logging
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hexad.comm import all_gather
from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.parallel.data.buckets import Bucket

from . import groups as groups
from .accelerator import get_accelerator
from .data import RepeatingLoader as RepeatingLoader
from .data import map_tensors
from .zero import owner_of

logger = logging.getLogger("hexad")


def is_initialized() -> bool:
    """Whether the process group has been initialised."""
    return bool(dist.is_initialized())


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
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


def set_z3_leaf_modules(model: nn.Module, leaf_modules: Iterable[Any]) -> list[nn.Module]:
    """Accepted without effect: modules are gathered as they are called. Returns those that match."""
    kinds = tuple(leaf for leaf in leaf_modules if isinstance(leaf, type))
    return [module for module in model.modules() if isinstance(module, kinds)]


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


# Complete master values, gradients and optimizer state of one parameter, sharded or not. All ranks call these
# together.


class _Place(NamedTuple):
    """A trained parameter in its engine."""

    param: Tensor
    engine: Engine
    bucket: Bucket

    def full(self, shard: Tensor) -> Tensor:
        """The parameter's complete values in a tensor like its bucket's master."""
        shards = self.engine.sharding[self.bucket.traits.grid].shards
        flat = all_gather(shard.to(self.engine.mesh.device), shards)
        begin = self.bucket.offset_of(self.param)
        return flat[begin : begin + self.param.numel()].view(self.param.shape).clone()

    @torch.no_grad()
    def write(self, shard: Tensor, value: Tensor) -> None:
        """Write this rank's part of complete values to a tensor like the bucket's master."""
        if value.shape != self.param.shape:
            found = f"found shape {tuple(value.shape)} for a parameter of shape {tuple(self.param.shape)}"
            raise HexadError(f"value: {found}")
        begin, bucket = self.bucket.offset_of(self.param), self.bucket
        low, high = max(begin, bucket.low), min(begin + self.param.numel(), bucket.high)
        if low < high:
            part = value.reshape(-1)[low - begin : high - begin]
            shard[low - bucket.low : high - bucket.low].copy_(part)

    def states(self) -> dict[str, Tensor]:
        """The optimizer's state of the bucket, by DeepSpeed's names."""
        states = self.engine.optimizer.rule.state(self.bucket)
        return {name.removeprefix("optimizer."): values for name, values in states}

    def gradient(self) -> Tensor | None:
        """The bucket's reduced gradient, a sum over data ranks; None before a backward pass."""
        if not self.engine.gradients.contributed:
            return None
        self.engine.gradients.extend()
        return self.bucket.gradient


def _place(param: Tensor) -> _Place | None:
    owner = owner_of(param)
    return None if owner is None or owner[1].plan.frozen else _Place(param, *owner)


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The master values of a parameter; None of one that is not trained."""
    place = _place(param)
    return None if place is None else place.full(place.bucket.master)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the master values of a parameter, and with them its values."""
    if place := _place(param):
        place.write(place.bucket.master, value)
        place.engine.gatherer.publish(place.bucket)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The optimizer's state of a parameter, such as ``exp_avg``; None if there is none."""
    place = _place(param)
    state = None if place is None else place.states().get(optim_state_key)
    return None if place is None or state is None else place.full(state)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set the optimizer's state of a parameter.

    Raises:
        HexadError: the optimizer has no such state, or not yet.
    """
    if place := _place(param):
        states = place.states()
        if optim_state_key not in states:
            known = ", ".join(states) or "nothing before its first step"
            raise HexadError(
                f"safe_set_full_optimizer_state: the optimizer has no {optim_state_key!r}; it has {known}"
            )
        place.write(states[optim_state_key], value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The gradient of a parameter, accumulated since the last step and averaged over data ranks; in fp16
    multiplied by the loss scale. None before a backward pass, or of a parameter that is not trained."""
    place = _place(param)
    gradient = None if place is None else place.gradient()
    if place is None or gradient is None:
        return None
    return place.full(gradient) / place.engine.mesh.data.size


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient of a parameter, as :func:`safe_get_full_grad` returns it.

    Raises:
        HexadError: before a backward pass.
    """
    if place := _place(param):
        gradient = place.gradient()
        if gradient is None:
            raise HexadError("safe_set_full_grad: found no gradient; call it between backward and step")
        place.write(gradient, value * place.engine.mesh.data.size)


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
