"""NeMo 2's settings of the overlap of tensor parallel communication: accepted without effect, as Hexad's
layers overlap it in any case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class TPOverlapCfg:
    """The base class of the settings of one layer."""


@dataclass
class PipelineOverlapCfg(TPOverlapCfg):
    """Without effect."""

    num_sm: int
    cga_size: int
    num_splits: int
    set_sm_margin: bool
    fp8_buf: bool = False
    atomic_gemm: bool = False
    method: str = "pipeline"


@dataclass
class RingExchangeOverlapCfg(TPOverlapCfg):
    """Without effect."""

    aggregate: bool = False
    method: str = "ring_exchange"
    num_sm: int = 1
    cga_size: int = 1
    set_sm_margin: bool = False
    fp8_buf: bool = False
    atomic_gemm: bool = False


@dataclass
class BulkOverlapCfg(TPOverlapCfg):
    """Without effect."""

    num_sm: int
    cga_size: int
    set_sm_margin: bool
    method: str = "bulk"


@dataclass
class TransformerLayerTPOverlapCfg:
    """The settings of all layers, one for each: without effect."""

    qkv_dgrad: TPOverlapCfg | None
    qkv_wgrad: TPOverlapCfg | None
    fc1_dgrad: TPOverlapCfg | None
    fc1_wgrad: TPOverlapCfg | None
    qkv_fprop: TPOverlapCfg | None
    proj_dgrad: TPOverlapCfg | None
    fc1_fprop: TPOverlapCfg | None
    fc2_dgrad: TPOverlapCfg | None
    proj_fprop: TPOverlapCfg | None
    fc2_fprop: TPOverlapCfg | None


_BULK = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
_RING = ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad", "proj_fprop", "fc2_fprop")


def __getattr__(name: str) -> Any:
    """``userbuffers_<format>_<GPU>_<sizes>``: settings that NeMo has measured for a model and GPU."""
    if not name.startswith("userbuffers_"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    bulk = {part: BulkOverlapCfg(num_sm=2, cga_size=2, set_sm_margin=False) for part in _BULK}
    ring = {part: RingExchangeOverlapCfg() for part in _RING}
    return TransformerLayerTPOverlapCfg(**bulk, **ring)
