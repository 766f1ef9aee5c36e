"""``run.deterministic``: repeats of a run in one layout on the same devices agree bit for bit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from hexad.config import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")
"""cuBLAS's workspaces that do not depend on which stream is free."""
_NO_IMPLEMENTATION = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic(wanted: bool, device: torch.device) -> Iterator[None]:
    """Let torch choose deterministic algorithms, and raise where an operator has none.

    Args:
        wanted: ``run.deterministic``; else nothing is changed.
        device: of this rank. On a CPU all operators in use are deterministic anyway.

    Raises:
        ConfigError: cuBLAS cannot be set up for it any more, or is set up otherwise.
    """
    if not wanted:
        yield
        return
    if device.type == "cuda":
        _fix_workspace()
    cuda, memory = torch.backends.cuda, cast(Any, torch.utils.deterministic)
    fill = memory.fill_uninitialized_memory
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    kernels = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    torch.use_deterministic_algorithms(True)
    # Nothing reads memory before it is written; filling it would cost a pass over every temporary.
    memory.fill_uninitialized_memory = False
    # Their backward passes add up in any order; the flash kernel and plain products can do without.
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_mem_efficient_sdp(kernels[0])
        cuda.enable_cudnn_sdp(kernels[1])
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _fix_workspace() -> None:
    """Set cuBLAS's workspace, which is read when CUDA starts."""
    found = os.environ.get(_WORKSPACE)
    if found is None and torch.cuda.is_initialized():
        raise ConfigError(
            "run.deterministic",
            f"found true after CUDA has started without {_WORKSPACE}; set it to {_FIXED[0]} beforehand",
        )
    if found not in (None, *_FIXED):
        raise ConfigError(
            "run.deterministic",
            f"found true with {_WORKSPACE}={found} in the environment; remove it, or set {_FIXED[0]}",
        )
    os.environ[_WORKSPACE] = found or _FIXED[0]


@contextmanager
def naming_operators() -> Iterator[None]:
    """Around a step: an operator without a deterministic implementation is a setting's error.

    Raises:
        ConfigError: names the operator.
    """
    try:
        yield
    except RuntimeError as error:
        found = _NO_IMPLEMENTATION.search(str(error))
        if found is None:
            raise
        raise ConfigError(
            "run.deterministic",
            f"found true, but {found[1]} has no deterministic implementation on this device; set it to false",
        ) from error
