"""The memory plans that ``hexad show memory`` and ``hexad train --dry-run`` print."""

from __future__ import annotations

from hexad.config import Config, HexadError, blaming, load_config
from hexad.plan.memory import MemoryPlan, per_pipeline_rank, predict
from hexad.topology.layout import Layout
from hexad.train.checks import check_config, smallest_world
from hexad.train.pipeline import PipelinePlan

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
    config = _with_vocab(config)
    return plans_of(config, layout, check_config(config, layout), rank)


def plans_of(
    config: Config, layout: Layout, plan: PipelinePlan, rank: int | None = None
) -> tuple[MemoryPlan, list[MemoryPlan]]:
    """(plan of a global ``rank``, by default of one that needs the most; one plan per pipeline coordinate).

    The configuration is checked, and its vocabulary size a number.
    """
    ranks = per_pipeline_rank(config, layout, plan.schedule, plan.layers)
    if rank is not None:
        return predict(config, layout, plan.schedule, plan.layers, rank), ranks
    return max(ranks, key=lambda other: other.total), ranks


def _with_vocab(config: Config) -> Config:
    """The configuration with the tokenizer's vocabulary size in place of ``auto``."""
    if config.model.vocab != "auto":
        return config
    from hexad.dataset.tokenizer import load_tokenizer

    with blaming("data.tokenizer"):
        size = load_tokenizer(config.data.tokenizer).vocab_size
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab": size})})
