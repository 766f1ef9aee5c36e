"""Hardware facts that need no torch: published figures of GPUs (from the files of :mod:`.hardware`), and what
this host's CPU has in hardware."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hexad.config import HexadError

from .hardware import Hardware, hardware_named, hardware_names, read_hardware

BF16_FROM, FP8_FROM = (8, 0), (8, 9)
"""Compute capabilities of the first NVIDIA GPUs with matrix units for a format: Ampere; Ada and Hopper."""


@dataclass(frozen=True)
class Attainable:
    """Rates that programs reach at most on a kind of GPU, which is less than its published peaks: under load
    its clocks fall to what the power limit allows.

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
        capability: compute capability as PyTorch reports it.
        attainable: what programs reach; None where nobody has measured it.
        vendor: ``nvidia``, ``amd`` or ``cpu``, of which few of these facts are known.
    """

    half: float
    single: float
    memory: dict[int, float]
    capability: tuple[int, int]
    attainable: Attainable | None = None
    vendor: str = "nvidia"

    @property
    def bf16(self) -> bool:
        """Whether it multiplies bf16 in hardware; a CPU, whether that is faster."""
        return self.half > self.single if self.vendor == "cpu" else self.capability >= BF16_FROM

    @property
    def fp8(self) -> bool:
        """Whether it multiplies e4m3 and e5m2 in hardware: AMD counts capabilities otherwise, and its first
        such GPUs have other 8-bit formats."""
        return self.vendor == "nvidia" and self.capability >= FP8_FROM


def known_gpu(name: str) -> Gpu | None:
    """The kind of a GPU by its name, such as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    kind = hardware_named(name)
    return None if kind is None else _gpu(read_hardware(kind))


def _gpu(hardware: Hardware) -> Gpu:
    measured = hardware.measured
    attainable = None
    if measured is not None:
        products = measured.products_tflops * 1e12
        attainable = Attainable(products, measured.attention * products, measured.copies_gb_per_s * 1e9)
    single = hardware.peaks_tflops["fp32"] * 1e12
    half = hardware.peaks_tflops["bf16"] * 1e12 if "bf16" in hardware.peaks_tflops else single
    memory = {int(sold): usable for sold, usable in hardware.memory_gib.items()}
    return Gpu(half, single, memory, hardware.capability, attainable, hardware.vendor)


def published_peaks(name: str) -> tuple[float, float] | None:
    """(16-bit, fp32) peak of a GPU by name; None if unknown."""
    gpu = known_gpu(name)
    return None if gpu is None else (gpu.half, gpu.single)


def named_gpus() -> dict[str, tuple[Gpu, int]]:
    """(GPU, bytes that programs can use) by name: ``h100``, ``h100-nvl``, ``a100-40gb``, ``a100`` (the
    largest)."""
    gpus: dict[str, tuple[Gpu, int]] = {}
    for kind in hardware_names():
        gpus |= _sizes(kind, _gpu(read_hardware(kind)))
    return gpus


def named_gpu(name: str) -> tuple[Gpu, int] | None:
    """A value of :func:`named_gpus`, or the GPU of a user's hardware file (``*.yaml``) with its largest
    memory; reads one file. None for other names.

    Raises:
        HexadError: the file is damaged or incomplete, or not of a GPU.
    """
    if name.endswith((".yaml", ".yml")):
        hardware = read_hardware(name)
        for peak in ("fp32",) if hardware.vendor == "cpu" else ("bf16", "fp32"):
            if peak not in hardware.peaks_tflops:
                raise HexadError(f"{name}: peaks_tflops.{peak}: is missing; it is needed here")
        if not hardware.memory_gib:
            raise HexadError(f"{name}: memory_gib: is missing; it is needed here, such as {{80: 79.1}}")
        gpu = _gpu(hardware)
        return gpu, int(max(gpu.memory.values()) * 2**30)
    known = hardware_names()
    kind = next((kind for kind in (name, re.sub(r"-\d+gb$", "", name)) if kind in known), None)
    return None if kind is None else _sizes(kind, _gpu(read_hardware(kind))).get(name)


def _sizes(kind: str, gpu: Gpu) -> dict[str, tuple[Gpu, int]]:
    """The names of a kind, with and without the size of its memory."""
    sizes = {f"{kind}-{sold}gb": int(usable * 2**30) for sold, usable in gpu.memory.items()}
    largest = max(sizes.values())
    if len(sizes) == 1 and max(gpu.memory) < 80:  # the size adds nothing to the name
        sizes = {}
    return {name: (gpu, size) for name, size in {kind: largest, **sizes}.items()}


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
