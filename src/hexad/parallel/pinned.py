"""Page-locked host memory of exactly the size asked for.

PyTorch's own (``pin_memory``) comes from an allocator that rounds sizes up to powers of two: for the state of
a large model that may be almost twice as much.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Lock a host tensor's memory, so that copies between it and a GPU run beside computation.

    Args:
        tensor: contiguous, on the host, with a storage of its own.

    Returns:
        The same tensor.

    Raises:
        RuntimeError: the driver refuses, most often for the limit of locked memory (``ulimit -l``).
    """
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    runtime: Any = torch.cuda.cudart()
    address = storage.data_ptr()
    error = int(runtime.cudaHostRegister(address, storage.nbytes(), 0))
    if error:
        raise RuntimeError(
            f"cudaHostRegister of {storage.nbytes()} bytes failed with error {error}; raise the limit of "
            "locked memory (ulimit -l), or use memory.offload: none"
        )
    weakref.finalize(storage, runtime.cudaHostUnregister, address)
    return tensor
