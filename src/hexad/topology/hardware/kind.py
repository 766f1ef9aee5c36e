"""A kind of hardware: the content of a hardware file."""

from typing import Annotated, Literal

from pydantic import Field

from hexad.config.model import Integer, Name, Positive, PositiveFloat, SettingsGroup

from .constants import Constants, Format

PeakFormat = Literal["fp64", "fp32", "bf16", "fp8", "fp4"]
"""A format that data sheets state a peak for; ``bf16`` is the 16-bit one."""
PEAK_OF: dict[Format, PeakFormat] = {
    "fp64": "fp64",
    "fp32": "fp32",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "nvfp4": "fp4",
}
"""The peak that bounds products of a format."""
TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64))
"""Rows and columns of the results that GPU kernels compute as a unit."""


class MeasuredRates(SettingsGroup):
    """Rates that programs reach at most, measured on this kind."""

    products_tflops: PositiveFloat
    """Large bf16 matrix products of random numbers, TFLOP/s."""
    attention: Annotated[PositiveFloat, Field(le=1)]
    """Rate of causal attention in bf16, forward and backward, as a share of ``products_tflops``; the half of
    the pairs that are seen counts."""
    copies_gb_per_s: PositiveFloat
    """Copies on the device, 1e9 bytes per second, of which each is read and written."""


class Hardware(SettingsGroup):
    """A kind of GPU or CPU, and what connects several of them."""

    names: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Names by which drivers and people know it; a longer name that contains one counts, in any case."""
    source: Name
    """Source of the facts."""
    vendor: Literal["nvidia", "amd", "cpu"]
    capability: tuple[Integer, Integer] = (0, 0)
    """Compute capability as PyTorch reports it."""
    multiprocessors: Positive
    """Streaming multiprocessors or compute units; 1 for a CPU."""
    tiles: Annotated[tuple[tuple[Positive, Positive], ...], Field(min_length=1)] = TILES
    """Rows and columns of the results that its kernels compute as a unit."""
    peaks_tflops: dict[PeakFormat, PositiveFloat]
    """Dense matrix-multiply peaks without sparsity, TFLOP/s; fp32 with TF32 off."""
    memory_gib: dict[Positive, PositiveFloat] = {}
    """GB that it is sold with -> GiB that programs can use, which is less: the driver keeps some, and
    error-correcting codes take their part."""
    memory_gb_per_s: PositiveFloat
    """Memory bandwidth, 1e9 bytes per second."""
    domain: Positive = 8
    """GPUs that are connected by ``link_gb_per_s``: an NVLink domain, or a host without NVLink."""
    link_gb_per_s: PositiveFloat
    """1e9 bytes per second that a GPU sends inside its domain; it receives as many at the same time."""
    network_gb_per_s: PositiveFloat
    """1e9 bytes per second that a GPU sends to other domains, where each has a typical network card."""
    measured: MeasuredRates | None = None
    """None where nobody has measured it."""
    constants: Constants

    def peak(self, dtype: Format) -> float | None:
        """The dense peak of products of a format, FLOP/s; None where none is stated."""
        peak = self.peaks_tflops.get(PEAK_OF[dtype])
        return None if peak is None else peak * 1e12
