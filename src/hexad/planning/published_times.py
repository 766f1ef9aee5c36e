"""The step time of a published row: as printed, or from a throughput whose convention is stated. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from hexad.config import HexadError
from hexad.parallel.inventory import Execution
from hexad.topology.hardware import load_hardware

from .job import Job


class Unstated(HexadError):
    """A row without a step time, and why."""


def step_seconds(row: Mapping[str, Any], job: Job) -> float:
    """Seconds of a step.

    Raises:
        Unstated: none is measured, or the convention of what is measured is not stated.
    """
    measured = row.get("measured") or {}
    if seconds := positive(measured, "step_time_s"):
        return seconds
    tokens = job.tokens / job.layout.world
    if rate := positive(measured, "tokens_per_s_per_gpu"):
        return tokens / rate
    if rate := positive(measured, "samples_per_s_per_gpu"):
        return tokens / job.run.length / rate
    if rate := positive(measured, "tflops_per_gpu"):
        return tokens * _flops_per_token(row, job) / (rate * 1e12)
    if share := positive(measured, "mfu"):
        return tokens * _flops_per_token(row, job) / (share / 100 * _peak(row))
    names = ", ".join(sorted(set(measured) - {"memory_rank", "memory_kind"})) or "nothing"
    raise Unstated(f"no step time or throughput is measured, but {names}")


def positive(measured: Mapping[str, Any], name: str) -> float | None:
    """A positive number of a row; None for anything else."""
    value = measured.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if isfinite(value) and value > 0 else None


def _flops_per_token(row: Mapping[str, Any], job: Job) -> float:
    """FLOPs of a token by the convention of the row's note: of products, with all pairs of attention or the
    half that is seen; hardware FLOPs count what is recomputed."""
    note = str(row.get("note") or "").lower()
    if re.search(r"no causal halving|full attention", note):
        pairs = 2.0
    elif re.search(r"causal[- ](attention )?halved|causal halving", note):
        pairs = 1.0
    else:
        raise Unstated("the convention of FLOPs is not stated")
    whole = job.model.stage(range(job.model.settings.layers))
    run = Execution(1, job.run.length, byte=2)
    products = [product for product in whole.products(run) if not product.again]
    attention = sum(product.flops for product in products if product.kernel == "attention")
    others = sum(product.flops for product in products if product.kernel != "attention")
    flops = (others + pairs * attention) / job.run.length
    if "hardware" in note and job.recompute.kind == "full":
        flops *= 4 / 3
    return flops


def _peak(row: Mapping[str, Any]) -> float:
    """FLOP/s that an MFU is a part of: as the note states it, or the bf16 peak of the GPU."""
    if stated := re.search(r"\bpeak (\d{3,4}(?:\.\d+)?)", str(row.get("note") or "")):
        return float(stated[1]) * 1e12
    peak = load_hardware(str(row.get("gpu"))).peak("bf16")
    if peak is None:
        raise Unstated("the peak that MFU is a part of is not known")
    return peak
