"""``deepspeed.accelerator``: where this rank computes."""

from functools import cache

import torch


class Accelerator:
    """The device that PyTorch has, under DeepSpeed's names."""

    def device_name(self, device_index: int | None = None) -> str:
        """``cuda``, ``cuda:N`` or ``cpu``."""
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device(self) -> int:
        """The number of the current device."""
        return torch.cuda.current_device() if torch.cuda.is_available() else 0

    def current_device_name(self) -> str:
        """The name of the current device."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Devices of this host; 1 for the CPU."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 1

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        if torch.cuda.is_available():
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        """Whether there is a device."""
        return True

    def communication_backend_name(self) -> str:
        """The backend of ``torch.distributed`` for this device."""
        return "nccl" if torch.cuda.is_available() else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether it computes bf16, in hardware or not."""
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether it computes fp16, in hardware or not."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all kernels that were launched."""
        if torch.cuda.is_available():
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Release unused cached memory."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process."""
    return Accelerator()
