"""A rank of a run inside a worker of Ray Train."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hexad.api import train
from hexad.config import HexadError


def train_in_worker(
    config: str, overrides: Sequence[str] = (), directory: str | None = None
) -> dict[str, Any]:
    """Train as :func:`hexad.train` does, in every worker of a ``TorchTrainer``.

    Args:
        config: path of the configuration.
        overrides: settings in place of the file's.
        directory: working directory; relative paths of the settings begin there.

    Returns:
        ``step`` and ``stopped_by`` of the run, the same on all workers; ``error`` instead where a user can
        fix what is wrong: an exception would make Ray start the workers again.
    """
    if directory is not None:
        os.chdir(directory)
    _leave_ray_group()
    try:
        outcome = train(config, overrides)
    except HexadError as error:
        return {"error": str(error)}
    return {"step": outcome.step, "stopped_by": outcome.stopped_by}


def _leave_ray_group() -> None:
    """Replace the process group that Ray has made: Hexad makes its own, at a port that is free."""
    if not dist.is_initialized():
        return
    port = [0]
    if dist.get_rank() == 0:
        with socket.create_server(("", 0)) as server:
            port = [server.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])
