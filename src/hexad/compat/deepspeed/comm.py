"""``deepspeed.comm``: the names of ``torch.distributed``, over the process group that was joined."""

from typing import Any

import torch.distributed as dist

from .entry import init_distributed

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    """Everything else is ``torch.distributed``'s."""
    if name.startswith("__") or not hasattr(dist, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(dist, name)
