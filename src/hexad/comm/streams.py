"""How work on a device is ordered: its streams, its copies from and to the host's memory.

A GPU is asked for work that it does later, in the order of a stream. What is done on another stream than the
computing one, or by the host, is ordered here and in :mod:`.collectives` alone.
"""

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("hexad")

_PROBE = 2**26
"""Bytes: more than the usual limit of locked memory."""
SAVING = "saving"
"""The stream that a checkpoint's values are copied on, joined before they change."""
REPLICAS = "replicas"
"""The stream on which sums over replicas follow those over shards."""


class Streams:
    """A CPU's: the thread that asks for work does it at once.

    Attributes:
        apart: the device's memory is not the host's.
    """

    apart = False

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """Work inside is done on the stream ``name``, after what the current stream has been asked for."""
        return nullcontext()

    def join(self, name: str) -> None:
        """Let later work of the current stream wait for the work on the stream ``name``."""

    def mark(self) -> Callable[[], object]:
        """Mark what the current stream has been asked for; returns how the host waits until it is done."""
        return _nothing

    def pinned(self, tensor: Tensor) -> Tensor:
        """Lock a host tensor's memory, so that copies between it and the device run beside computation;
        returns the tensor, which has a storage of its own. Where the driver refuses, most often for the limit
        of locked memory (``ulimit -l``), the memory stays as it is: copies are correct, but the host waits
        for them. That is logged once.
        """
        return tensor

    def try_pinning(self) -> None:
        """Lock some memory for a moment, so that a limit is reported before it matters."""
        self.pinned(torch.empty(_PROBE, dtype=torch.uint8))

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on the device, for which the host does not wait."""
        return tensor.to(device)


def _nothing() -> None:
    pass


class CudaStreams(Streams):
    """A GPU's."""

    apart = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._named: dict[str, torch.cuda.Stream] = {}
        self._refused = False

    @contextmanager
    def beside(self, name: str) -> Any:
        if name not in self._named:
            self._named[name] = torch.cuda.Stream(self._device)
        stream = self._named[name]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def join(self, name: str) -> None:
        if name in self._named:
            torch.cuda.current_stream(self._device).wait_stream(self._named[name])

    def mark(self) -> Callable[[], object]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))

        def wait() -> None:
            # In a thread whose current GPU is another one, which would start CUDA there.
            with torch.cuda.device(self._device):
                event.synchronize()

        return wait

    def pinned(self, tensor: Tensor) -> Tensor:
        # Not by torch's allocator, which rounds up to a power of two.
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        runtime: Any = torch.cuda.cudart()
        address = storage.data_ptr()
        error = int(runtime.cudaHostRegister(address, storage.nbytes(), 0))
        if error:
            self._report(storage.nbytes(), error)
            return tensor

        def unlock() -> None:
            with suppress(RuntimeError):  # the GPU has failed
                torch.cuda.synchronize(self._device)  # copies may be under way
            runtime.cudaHostUnregister(address)

        weakref.finalize(storage, unlock)
        return tensor

    def _report(self, nbytes: int, error: int) -> None:
        with suppress(RuntimeError, AssertionError):  # the error stays until a call reports it
            torch.zeros(1, device=self._device)
        if not self._refused:
            self._refused = True
            text = (
                "%d bytes of the host's memory cannot be locked (cudaHostRegister: error %d): steps wait for "
                "copies of checkpoints and of offloaded state; raise the limit of locked memory (ulimit -l)"
            )
            log.warning(text, nbytes, error)

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # torch's allocator keeps it until the copy is done
        return tensor.to(device, non_blocking=True)


class _WithoutValues(Streams):
    """The streams of ``meta``, which stands for a GPU: nothing is computed, and nothing waited for."""

    apart = True


def of(device: torch.device) -> Streams:
    """A device's streams, the same for all who ask."""
    if device.type != "cuda":
        return _META if device.type == "meta" else _HOST
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


_HOST, _META = Streams(), _WithoutValues()


@cache
def _of_gpu(index: int) -> Streams:
    return CudaStreams(torch.device("cuda", index))
