"""The memory plans that ``hexad show memory`` and ``hexad train --dry-run`` print."""

from __future__ import annotations

from typing import NamedTuple

from hexad.config import ConfigError, HexadError, did_you_mean
from hexad.model.configuration import load_config
from hexad.planning import Resolved, planned_layout, resolve
from hexad.planning.memory import MemoryPlan, per_pipeline_rank, predict
from hexad.show.memory import Device
from hexad.topology.devices import named_gpus

from .options import split_settings


class Planned(NamedTuple):
    """What ``hexad show memory`` shows.

    Attributes:
        resolved: the run.
        plan: of the rank asked for, or of one that needs the most.
        ranks: plans by pipeline coordinate.
        device: whose memory the largest plan is compared with, if any.
    """

    resolved: Resolved
    plan: MemoryPlan
    ranks: list[MemoryPlan]
    device: Device | None


def planned(settings: tuple[str, ...], world: int | None, rank: int | None, device: str | None) -> Planned:
    """The plans of a configuration file with overrides, in the smallest world if none is given.

    Raises:
        HexadError: the settings are refused, or there is no such rank or device.
    """
    path, overrides = split_settings("show memory", settings)
    if path is None:
        raise HexadError("show memory: found no configuration file; give one")
    found = None if device is None else device_of(device)
    gpu = None if found is None else found.gpu
    if gpu is not None:
        overrides += ["run.device=cuda"]  # planned for the GPU that is named
    config = load_config(path, overrides)
    if gpu is not None and config.precision.dtype == "fp8" and not gpu.fp8:
        raise ConfigError(
            "precision.dtype", f"found fp8, but {device} has no fp8 matrix units; use auto, bf16 or fp16"
        )
    layout = planned_layout(config, world)
    if rank is not None and not 0 <= rank < layout.world:
        raise HexadError(f"--rank: found {rank}, expected 0 to {layout.world - 1}")
    resolved = resolve(config, layout, bf16=None if gpu is None else gpu.bf16)
    return Planned(resolved, *plans_of(resolved, rank), found)


def device_of(text: str) -> Device:
    """A GPU by name, or a size such as ``80GB``.

    Raises:
        HexadError: it is neither.
    """
    from hexad.checkpoint.hugging_face.files import parse_size

    known = named_gpus()
    word = "-".join(text.lower().replace("_", " ").replace("-", " ").split())
    if word in known:
        gpu, usable = known[word]
        return Device(word, usable, gpu)
    if text[:1].isdigit() and not text.isdigit():
        return Device(text, parse_size(text, "--device"))
    hint = did_you_mean(word, known) or f"; known: {', '.join(known)}"
    raise HexadError(f"--device: found '{text}', expected a GPU or a size such as 80GB{hint}")


def plans_of(resolved: Resolved, rank: int | None = None) -> tuple[MemoryPlan, list[MemoryPlan]]:
    """(plan of a global ``rank``, by default of one that needs the most; plans by pipeline coordinate)."""
    ranks = per_pipeline_rank(resolved)
    if rank is not None:
        return predict(resolved, rank), ranks
    return max(ranks, key=lambda other: other.total), ranks
