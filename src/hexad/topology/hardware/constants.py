"""Constants of the time models of kernels (:mod:`hexad.planning.kernels`) and collectives
(:mod:`hexad.planning.links`), as they stand in a hardware file under ``constants``."""

from typing import Annotated, Literal

from pydantic import Field

from hexad.config.model import Name, NonNegativeFloat, Number, PositiveFloat, SettingsGroup

PositiveFraction = Annotated[Number, Field(gt=0, le=1, allow_inf_nan=False)]
"""A share above 0, at most 1."""
Format = Literal["fp64", "fp32", "bf16", "fp8", "fp8_block", "nvfp4"]
"""A number format of operands. ``bf16`` stands for both 16-bit formats; ``fp8`` has a scale per tensor or
row, ``fp8_block`` and ``nvfp4`` one per block."""
MeasuredCollective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
"""Collectives with constants of their own; broadcast and send use those of a similar one."""


class ProductConstants(SettingsGroup):
    """Matrix products of one format."""

    tflops: PositiveFloat
    """Rate of full tiles in full waves, before ``power`` lowers it, in TFLOP/s."""
    start_us: NonNegativeFloat
    """Microseconds of a kernel that hardly computes, also of a sum over parts of k."""
    bandwidth: PositiveFraction
    """Share of the memory bandwidth that operands and result reach."""
    depth: NonNegativeFloat = 0.0
    """Start and end of a tile, in steps along k."""
    area: NonNegativeFloat = 0.0
    """Result elements of a tile that reaches half of the rate: small tiles load more per operation."""
    waves: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """How much of a partly filled wave of tiles counts as full: 1 all of it, 0 none."""
    overlap: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Share of the shorter one of computation and memory traffic that is not hidden by the longer."""
    power: NonNegativeFloat = 0.0
    """Part by which long dense products take longer at most: clocks fall to what the power limit allows."""
    power_us: PositiveFloat = 1000.0
    """Microseconds at ``tflops`` at which half of ``power`` is reached."""
    quantise_bytes: NonNegativeFloat = 0.0
    """Bytes moved per element of the left operand where it is quantised first, in kernels of its own."""
    quantise_us: NonNegativeFloat = 0.0
    """Microseconds of these kernels on a small operand."""
    grouped: Annotated[Number, Field(ge=1, allow_inf_nan=False)] = 1.0
    """How many times longer a grouped product takes than its tiles alone."""


class AttentionConstants(SettingsGroup):
    """Fused attention kernels of one format."""

    tpairs: Annotated[dict[Annotated[int, Field(ge=1)], PositiveFloat], Field(min_length=1)]
    """Width of a head -> 1e12 pairs of query and key per second, in one head, forward."""
    start_us: NonNegativeFloat
    """Microseconds of a kernel that hardly computes."""
    bandwidth: PositiveFraction
    """Share of the memory bandwidth that inputs and output reach."""
    padding: NonNegativeFloat = 0.0
    """Keys that a query costs besides those that it sees: masked parts of tiles, start and end."""
    tail: NonNegativeFloat = 0.0
    """How much of the longest tile of queries is waited for when the others are finished."""
    backward: Annotated[Number, Field(ge=1, allow_inf_nan=False)] = 3.1
    """Time of a backward kernel, in forward kernels: 2.5 times the operations, at a lower rate."""


class MemoryConstants(SettingsGroup):
    """Kernels that only move data."""

    bandwidth: PositiveFraction = 0.9
    """Share of the memory bandwidth that large copies reach; measured on an H100 and an H200."""
    launch_us: NonNegativeFloat = 3.0
    """Microseconds of a kernel that hardly moves anything."""
    half: PositiveFraction | None = None
    """Share of the memory bandwidth where activations have 16 bits, which CPUs widen; None for
    ``bandwidth``."""
    update: PositiveFraction | None = None
    """Share of the memory bandwidth that the optimizer's update reaches; None for ``bandwidth``."""


class CollectiveConstants(SettingsGroup):
    """One operation inside a domain."""

    start_us: NonNegativeFloat
    """Microseconds of a call that hardly sends anything, besides its hops."""
    hop_us: NonNegativeFloat = 0.0
    """Microseconds per step of the ring."""
    gb_per_s: PositiveFloat
    """1e9 bytes per second that a GPU sends at large sizes."""
    copies: NonNegativeFloat = 0.0
    """Time of a rank's part of the tensor besides sending (copied to the result), in parts sent."""
    low_latency: PositiveFraction = 1.0
    """Share of ``gb_per_s`` that the low-latency protocol reaches."""
    switch_us: NonNegativeFloat = 0.0
    """Additional microseconds of the protocol that reaches ``gb_per_s``."""


class NetworkConstants(SettingsGroup):
    """Collectives between domains. Defaults are not measured here."""

    efficiency: PositiveFraction = 0.9
    """Share of the network's bandwidth that collectives reach; Calculon's value (Isaev et al., SC 2023)."""
    latency_us: NonNegativeFloat = 20.0
    """Microseconds of a call that leaves the domain, once; Calculon's value."""
    hop_us: NonNegativeFloat = 4.0
    """Microseconds per step between domains; NCCL's own estimate (``tuning.cc``: ring, LL128)."""
    tree_hop_us: NonNegativeFloat = 8.5
    """Microseconds per level of a tree between domains; NCCL's own estimate (``tuning.cc``: tree, LL128)."""


class OverlapConstants(SettingsGroup):
    """Collectives beside computation. Defaults are published values of other systems."""

    multiprocessors: NonNegativeFloat = 20.0
    """Multiprocessors that a running collective takes from computation: NCCL's channels, 16 to 24 of them on
    A100 and H100 (DeepSeek-V3 uses 20 of 132)."""
    slowdown: Annotated[Number, Field(ge=1, allow_inf_nan=False)] = 1.3
    """How many times longer a collective takes beside computation; vTrain (Bang et al., MICRO 2024)."""
    step: Annotated[Number, Field(ge=1, allow_inf_nan=False)] = 1.03
    """How many times longer products and attention take in a training step than alone, at the clocks of a
    step: 763 against 741 ms on an H100 (Hexad's 8B case)."""


class HostConstants(SettingsGroup):
    """Times that the host spends per call. Defaults were measured beside one H100."""

    operator_us: NonNegativeFloat = 12.0
    """Microseconds per operator call; 7 to 15 on that host, 36 on a slow one."""
    collective_us: NonNegativeFloat = 45.0
    """Microseconds per collective call; 20 to 70 on that host, 89 on a slow one."""
    update_gb_per_s: PositiveFloat = 20.0
    """GB/s that an optimizer's update of state in the host's memory reads and writes, for each GPU.
    DeepSpeed's CPU-Adam updates 4.5e9 parameters a second on both processors of a node (Ren et al., USENIX
    ATC 2021, table 4): 126 GB/s, of which eight GPUs have 16 each; newer hosts have more."""


class Constants(SettingsGroup):
    """Constants of one kind of hardware."""

    source: Literal["fitted", "derived", "calibrated"]
    """``fitted`` on published measurements, ``derived`` from another kind's by the ratio of peaks and
    bandwidths, or ``calibrated`` on the machine."""
    of: Name | None = None
    """derived: the other kind, a name or path."""
    products: dict[Format, ProductConstants] = {}
    """Constants of products by format; missing ones are derived from ``bf16`` (of CPUs from ``fp32``) by the
    ratio of peaks."""
    attention: dict[Format, AttentionConstants] = {}
    """Constants of attention by format, as ``products``."""
    collectives: dict[MeasuredCollective, CollectiveConstants] = {}
    """Constants of collectives by operation."""
    memory: MemoryConstants = MemoryConstants()
    network: NetworkConstants = NetworkConstants()
    overlap: OverlapConstants = OverlapConstants()
    host: HostConstants = HostConstants()
