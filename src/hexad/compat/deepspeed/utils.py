"""``deepspeed.utils``: what scripts import from there."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

__all__ = ["log_dist", "logger"]

logger = logging.getLogger("hexad")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks: -1, or none named, is all of them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
