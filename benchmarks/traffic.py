"""Hexad's communication taken apart: waited for at once, left out, or alone.

Patches :mod:`hexad.comm` in the process that measures; nothing in Hexad knows of it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hexad.comm import collectives

SMALL = 2**14
"""Bytes up to which tensors are always communicated: counts and norms, which must be right."""


class _Done:
    """Work that is no work."""

    def wait(self) -> None: ...


def _same(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill what would come from others with what this rank has, so that numbers stay ordinary."""
    flat = tensor.reshape(-1)
    for part in result.view(-1).split(flat.numel()):
        if part.data_ptr() != flat.data_ptr():
            part.copy_(flat[: part.numel()])


class _Local:
    """``torch.distributed`` whose large collectives stay on the rank. The results are wrong."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.nbytes <= SMALL:
            return dist.all_reduce(tensor, *args, **kwargs)
        return _Done()

    def all_to_all_single(self, result: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if max(result.nbytes, tensor.nbytes) <= SMALL:
            return dist.all_to_all_single(result, tensor, *args, **kwargs)
        _same(result, tensor)
        return _Done()

    def batch_isend_irecv(self, operations: Any) -> list[Any]:
        if max(operation.tensor.nbytes for operation in operations) <= SMALL:
            return dist.batch_isend_irecv(operations)
        for operation in operations:
            if operation.op is dist.irecv:
                operation.tensor.zero_()
        return [_Done()]


def _local_or(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(result: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if max(result.nbytes, tensor.nbytes) <= SMALL:
            return real(result, tensor, *args, **kwargs)
        _same(result, tensor)
        return _Done()

    return call


class Traffic:
    """How communication happens from now on, see :meth:`be`. One per process."""

    MODES = ("overlapped", "waiting", "free", "recording")

    def __init__(self) -> None:
        self._mode = "overlapped"
        self._calls: list[Callable[[], Any]] = []
        gather, scatter = collectives._all_gather_tensor, collectives._reduce_scatter_tensor
        self._real = {"dist": dist, "_all_gather_tensor": gather, "_reduce_scatter_tensor": scatter}
        self._free = {
            "dist": _Local(),
            "_all_gather_tensor": _local_or(gather),
            "_reduce_scatter_tensor": _local_or(scatter),
        }
        self._patch_start()

    def be(self, mode: str) -> None:
        """Set how collectives are treated.

        Args:
            mode: ``overlapped``: as Hexad has it; ``waiting``: each is waited for where it starts; ``free``:
                large ones are left out, and the results are wrong; ``recording``: for :meth:`replay`.
        """
        if mode not in self.MODES:
            raise ValueError(f"found {mode!r}, expected one of {', '.join(self.MODES)}")
        self._mode = mode
        if mode == "recording":
            self._calls = []
        for name, value in (self._free if mode == "free" else self._real).items():
            setattr(collectives, name, value)

    def replay(self) -> None:
        """Start all recorded collectives, in order, then wait for all: the link as busy as it can be."""
        for work in [call() for call in self._calls]:
            work.wait()

    def _patch_start(self) -> None:
        start: Callable[..., collectives.Pending] = collectives._start

        def patched(*args: Any, **kwargs: Any) -> collectives.Pending:
            if self._mode == "recording":
                self._calls += [argument for argument in args if callable(argument)]
            pending = start(*args, **kwargs)
            if self._mode == "waiting":
                pending.wait()
            return pending

        collectives._start = patched
