"""``precision.dtype: auto``, decided by the devices of all ranks."""

from __future__ import annotations

from hexad.comm import merged
from hexad.config import Config
from hexad.planning import with_dtype
from hexad.topology.cluster import device_name, has_bf16
from hexad.topology.mesh import Mesh


def with_common_dtype(config: Config, mesh: Mesh) -> Config:
    """With ``precision.dtype: auto`` replaced by bf16 if every rank's device computes it in hardware, else by
    fp32. All ranks call this together."""
    if config.precision.dtype != "auto":
        return config
    return with_dtype(config, merged(has_bf16(mesh.device), mesh.world, lambda one, other: one and other))


def dtype_line(given: Config, resolved: Config, mesh: Mesh) -> str | None:
    """What a run says of its format at the start: what ``auto`` became, or that this rank's device computes
    16 bits in software; None where there is nothing to say."""
    dtype, device = resolved.precision.dtype, device_name(mesh.device)
    if given.precision.dtype == "auto":
        if dtype == "bf16":
            return f"precision.dtype auto: bf16, which {device} computes in hardware"
        lacks = device if not has_bf16(mesh.device) else "the device of another rank"
        return f"precision.dtype auto: fp32, because {lacks} does not compute bf16 in hardware"
    if dtype == "bf16" and not has_bf16(mesh.device):
        return f"precision.dtype bf16: {device} does not compute it in hardware; fp32 is faster here"
    return None
