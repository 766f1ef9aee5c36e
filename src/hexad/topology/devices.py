"""Hardware facts that need no torch: published figures of GPUs, and what this host's CPU has in hardware."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

BF16_FROM, FP8_FROM = (8, 0), (8, 9)
"""Compute capabilities of the first NVIDIA GPUs with matrix units for a format: Ampere; Ada and Hopper."""


@dataclass(frozen=True)
class Attainable:
    """What programs reach at most on a kind of GPU, which is less than its published peaks: under load its
    clocks fall to what the power limit allows.

    Attributes:
        products: large bf16 matrix products of random numbers, FLOP/s.
        attention: causal attention in bf16, forward and backward, FLOP/s; the half of the pairs that are seen
            counts.
        copies: copies on the device, bytes per second, of which each is read and written.
        source: ``measured``, on a GPU of this kind.
    """

    products: float
    attention: float
    copies: float
    source: str = "measured"


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        half, single: dense matrix-multiply peaks without sparsity, FLOP/s, of 16 bits and of fp32 (TF32 off);
            from the vendors' data sheets.
        memory: GB that it is sold with -> GiB that programs can use, which is less: the driver keeps some,
            and error-correcting codes take their part. The smallest "total capacity" seen in out-of-memory
            errors that users of PyTorch (2.1 to 2.9) have published.
        capability: NVIDIA's compute capability.
        attainable: what programs reach; None where nobody has measured it.
    """

    half: float
    single: float
    memory: dict[int, float]
    capability: tuple[int, int]
    attainable: Attainable | None = None

    @property
    def bf16(self) -> bool:
        """Whether it multiplies bf16 in hardware."""
        return self.capability >= BF16_FROM

    @property
    def fp8(self) -> bool:
        """Whether it multiplies e4m3 and e5m2 in hardware."""
        return self.capability >= FP8_FROM


_ATTENTION = 0.65
"""Of the rate of products; 0.60 to 0.70 was measured on an H100."""
_GPUS = {
    "H100": Gpu(989e12, 67e12, {80: 79.1}, (9, 0), Attainable(798e12, _ATTENTION * 798e12, 3.0e12)),
    "H100 PCIe": Gpu(756e12, 51e12, {80: 79.1}, (9, 0)),
    "H100 NVL": Gpu(835e12, 60e12, {94: 93.0}, (9, 0)),
    "H200": Gpu(989e12, 67e12, {141: 139.7}, (9, 0), Attainable(788e12, _ATTENTION * 788e12, 4.3e12)),
    "H200 NVL": Gpu(836e12, 60e12, {141: 139.7}, (9, 0)),
    "GH200": Gpu(989e12, 67e12, {96: 94.5}, (9, 0)),
    "B200": Gpu(2250e12, 75e12, {180: 178.3}, (10, 0)),
    "A100": Gpu(312e12, 19.5e12, {80: 79.1, 40: 39.3}, (8, 0)),
    "A800": Gpu(312e12, 19.5e12, {80: 79.1, 40: 39.3}, (8, 0)),
    "H800": Gpu(989e12, 67e12, {80: 79.1}, (9, 0)),
    "L40S": Gpu(362e12, 91.6e12, {48: 44.3}, (8, 9)),
    "L40": Gpu(181e12, 90.5e12, {48: 44.3}, (8, 9)),
    "L4": Gpu(121e12, 30.3e12, {24: 22.0}, (8, 9)),
    "A10": Gpu(125e12, 31.2e12, {24: 21.9}, (8, 6)),
    "A10G": Gpu(70e12, 35e12, {24: 21.9}, (8, 6)),
    "V100": Gpu(125e12, 15.7e12, {32: 31.7, 16: 15.7}, (7, 0)),
    "T4": Gpu(65e12, 8.1e12, {16: 14.5}, (7, 5)),
    "RTX 4090": Gpu(165e12, 82.6e12, {24: 23.5}, (8, 9)),
    "RTX 3090": Gpu(71e12, 35.6e12, {24: 23.5}, (8, 6)),
}


def known_gpu(name: str) -> Gpu | None:
    """The kind of a GPU by its name, such as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    words = rf"(?<![A-Za-z0-9])({'|'.join(sorted(_GPUS, key=len, reverse=True))})(?![A-Za-z0-9])"
    match = re.search(words, name)
    return _GPUS[match[1]] if match else None


def published_peaks(name: str) -> tuple[float, float] | None:
    """(16-bit, fp32) peak of a GPU by name; None if unknown."""
    gpu = known_gpu(name)
    return None if gpu is None else (gpu.half, gpu.single)


def named_gpus() -> dict[str, tuple[Gpu, int]]:
    """(GPU, bytes that programs can use) by name: ``h100``, ``h100-nvl``, ``a100-40gb``, ``a100`` (the
    largest)."""
    gpus: dict[str, tuple[Gpu, int]] = {}
    for name, gpu in _GPUS.items():
        word = name.lower().replace(" ", "-")
        sizes = {f"{word}-{sold}gb": int(usable * 2**30) for sold, usable in gpu.memory.items()}
        if len(sizes) == 1 and max(gpu.memory) < 80:  # the size adds nothing to the name
            sizes = {word: max(sizes.values())}
        gpus |= {name: (gpu, size) for name, size in {word: max(sizes.values()), **sizes}.items()}
    return gpus


def gpu_visible(devices: Path = Path("/dev")) -> bool:
    """Whether this host has a GPU that PyTorch may use, without asking its driver: a device file of NVIDIA's
    or AMD's driver (or of WSL's), not hidden by ``CUDA_VISIBLE_DEVICES``."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(devices.glob("nvidia[0-9]*")) or any((devices / name).exists() for name in ("kfd", "dxg"))


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this host's CPU multiplies bf16 in hardware: x86 with AVX512-BF16 or AMX-BF16, Arm with BF16.

    Without, PyTorch converts every operand, several times slower than fp32. False where the operating system
    does not list the CPU's features.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    listed = features[1].split() if features else []
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(listed)
