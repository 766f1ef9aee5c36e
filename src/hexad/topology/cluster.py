"""Hardware facts that need torch: what this rank's device can do, and which host this is."""

import socket
import time
from pathlib import Path

import torch

from .devices import BF16_FROM, FP8_FROM, cpu_has_bf16, published_peaks


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak matrix-multiply FLOP/s of one rank's device, the denominator of MFU.

    GPUs: the published figure, None for an unknown one. CPUs publish none that a rank's threads could
    reach, so the rate of a square multiplication is measured here (best of five, about 0.1 s).
    """
    if device.type == "cuda":
        peaks = published_peaks(torch.cuda.get_device_name(device))
        return None if peaks is None or dtype == torch.float64 else peaks[0 if dtype.itemsize == 2 else 1]
    size = 512
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 and e5m2 matrices: NVIDIA GPUs from Ada and Hopper on.

    Under ROCm capabilities are counted otherwise, and the first such GPUs have other 8-bit formats: no.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= FP8_FROM


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 in hardware: GPUs of compute capability 8.0 (Ampere) and later and
    those of ROCm, and CPUs with the instructions for it (:func:`~.devices.cpu_has_bf16`)."""
    if device.type != "cuda":
        return cpu_has_bf16()
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= BF16_FROM


def device_name(device: torch.device) -> str:
    """The vendor's name of a GPU; ``cpu`` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def host_identity() -> str:
    """A text that the processes of a host have in common, and those of others have not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:  # not Linux
        return socket.gethostname()
