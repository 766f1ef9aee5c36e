"""``deepspeed.utils``: what scripts import from there."""

from collections.abc import Sequence
from logging import INFO, getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import groups
from .data import RepeatingLoader, map_tensors
from .full_values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
    "RepeatingLoader",
    "clone_tensors_for_torch_save",
    "groups",
    "is_initialized",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
]

logger = getLogger("hexad")


def is_initialized() -> bool:
    """Whether the process group has been initialised."""
    return bool(dist.is_initialized())


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log on some ranks: -1, or none named, is all of them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copies of tensors in containers: a view of a large bucket would be saved with all of it."""
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))


def set_z3_leaf_modules(model: nn.Module, leaf_modules: Sequence[Any]) -> list[nn.Module]:
    """Accepted without effect: modules are gathered as they are called. Returns those that match."""
    kinds = tuple(leaf for leaf in leaf_modules if isinstance(leaf, type))
    return [module for module in model.modules() if isinstance(module, kinds)]
