"""``nemo.utils`` and small functions of other modules: what scripts log to, ranks, optional imports."""

from __future__ import annotations

import logging as _logging
from importlib import import_module
from typing import Any

import torch.distributed as dist

from hexad.launching.environment import environment

logging = _logging.getLogger("hexad.nemo")
"""A logger of Python's ``logging``."""


def get_rank() -> int:
    """The number of this rank: that of the process group, or of the launcher; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else environment().rank


def get_last_rank() -> int:
    """The largest number of a rank."""
    return (dist.get_world_size() if dist.is_initialized() else environment().world) - 1


def is_global_rank_zero() -> bool:
    """Whether this is the first rank."""
    return get_rank() == 0


def barrier() -> None:
    """Wait for all ranks, if there is a process group."""
    if dist.is_initialized():
        dist.barrier()


def teardown(trainer: Any, model: Any = None) -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def get_vocab_size(config: Any, vocab_size: int, make_vocab_size_divisible_by: int = 128) -> int:
    """A vocabulary's size, rounded up to a multiple of that number times the tensor ranks."""
    multiple = make_vocab_size_divisible_by * config.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def safe_import(module: str, *, msg: str | None = None, alt: Any = None) -> tuple[Any, bool]:
    """A module, and whether it could be imported; otherwise ``alt``."""
    try:
        return import_module(module), True
    except ImportError:
        return alt, False


def safe_import_from(
    module: str, symbol: str, *, msg: str | None = None, alt: Any = None, fallback_module: str | None = None
) -> tuple[Any, bool]:
    """A name of a module or of a second one, and whether it could be imported; otherwise ``alt``."""
    for name in filter(None, (module, fallback_module)):
        imported, succeeded = safe_import(name)
        if succeeded and hasattr(imported, symbol):
            return getattr(imported, symbol), True
    return alt, False
