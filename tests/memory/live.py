"""Bytes of live tensors on this rank, and their peak: counted by storage, as operations make them."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts every storage from the operation that first returns it until it is freed.

    What a kernel allocates and frees by itself is not seen.

    Attributes:
        bytes: alive now.
        peak: most since the last :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.moments: list[int] = []
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, key)

    def restart(self) -> int:
        """Begin a new peak; returns the bytes that are alive."""
        self.peak = self.bytes
        return self.bytes

    def sizes(self) -> list[int]:
        """Of the live storages, in the order in which they were made."""
        return list(self._known.values())

    def _forget(self, key: int) -> None:
        self.bytes -= self._known.pop(key)
