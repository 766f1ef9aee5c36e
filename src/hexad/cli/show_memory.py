"""The memory plans that ``hexad show memory`` and ``hexad train --dry-run`` print."""

from __future__ import annotations

from hexad.config import HexadError
from hexad.model.configuration import load_config
from hexad.plan.memory import MemoryPlan, per_pipeline_rank, predict
from hexad.resolve import Resolved, resolve, smallest_world
from hexad.topology.layout import Layout

from .options import split_settings


def planned(
    settings: tuple[str, ...], world: int | None, rank: int | None
) -> tuple[MemoryPlan, list[MemoryPlan]]:
    """:func:`plans_of` a configuration file with overrides, in the smallest world if none is given.

    Raises:
        HexadError: the settings are refused, or there is no such rank.
    """
    path, overrides = split_settings("show memory", settings)
    if path is None:
        raise HexadError("show memory: found no configuration file; give one")
    config = load_config(path, overrides)
    layout = Layout.from_settings(config.parallel, smallest_world(config) if world is None else world)
    if rank is not None and not 0 <= rank < layout.world:
        raise HexadError(f"--rank: found {rank}, expected 0 to {layout.world - 1}")
    return plans_of(resolve(config, layout), rank)


def plans_of(resolved: Resolved, rank: int | None = None) -> tuple[MemoryPlan, list[MemoryPlan]]:
    """(plan of a global ``rank``, by default of one that needs the most; plans by pipeline coordinate)."""
    ranks = per_pipeline_rank(resolved)
    if rank is not None:
        return predict(resolved, rank), ranks
    return max(ranks, key=lambda other: other.total), ranks
