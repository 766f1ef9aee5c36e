"""Hardware facts: what a device can do at best, and which host this is."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import torch

# Dense matrix-multiply peaks without sparsity, FLOP/s, 16-bit and fp32 (TF32 off); vendors' data sheets.
_PEAKS: dict[str, tuple[float, float]] = {
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H200 NVL": (836e12, 60e12),
    "H200": (989e12, 67e12),
    "GH200": (989e12, 67e12),
    "B200": (2250e12, 75e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "H800": (989e12, 67e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "A10G": (70e12, 35e12),
    "V100": (125e12, 15.7e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}


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
    return torch.cuda.get_device_capability(device) >= (8, 9)


def device_name(device: torch.device) -> str:
    """As its maker calls a GPU; ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def published_peaks(name: str) -> tuple[float, float] | None:
    """(16-bit, fp32) peak of a GPU by name, such as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    words = rf"(?<![A-Za-z0-9])({'|'.join(sorted(_PEAKS, key=len, reverse=True))})(?![A-Za-z0-9])"
    found = re.search(words, name)
    return _PEAKS[found[1]] if found else None


def host_identity() -> str:
    """A text that the processes of a host have in common, and those of others have not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:  # not Linux
        return socket.gethostname()
