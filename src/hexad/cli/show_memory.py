"""Which run ``hexad show memory`` is to answer for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hexad.config import Config, HexadError, blaming, load_config
from hexad.plan.memory import MemoryPlan, per_pipeline_rank, predict

if TYPE_CHECKING:
    from hexad.topology.layout import Layout
    from hexad.train.pipeline import PipelinePlan


def planned(
    settings: tuple[str, ...], world: int | None, rank: int | None
) -> tuple[MemoryPlan, list[MemoryPlan]]:
    """(the plan of ``rank``, by default of one that needs the most; one plan per pipeline coordinate).

    Args:
        settings: a configuration file and overrides.
        world: ranks in all; by default the fewest that the configuration can run on.
        rank: global.

    Raises:
        HexadError: something is wrong with the settings, or there is no such rank.
    """
    from hexad.topology.layout import Layout
    from hexad.train.checks import check_config, smallest_world

    files = [text for text in settings if "=" not in text]
    if len(files) != 1:
        raise HexadError(f"show memory: found {' '.join(files) or 'no file'}; give one configuration file")
    config = load_config(files[0], [text for text in settings if "=" in text])
    layout = Layout.from_settings(config.parallel, smallest_world(config) if world is None else world)
    if rank is not None and not 0 <= rank < layout.world:
        raise HexadError(f"--rank: found {rank}, expected 0 to {layout.world - 1}")
    config = _with_vocab(config)
    return plans_of(config, layout, check_config(config, layout), rank)


def plans_of(
    config: Config, layout: Layout, plan: PipelinePlan, rank: int | None = None
) -> tuple[MemoryPlan, list[MemoryPlan]]:
    """The same of a checked configuration whose vocabulary is known."""
    ranks = per_pipeline_rank(config, layout, plan.schedule, plan.layers)
    if rank is not None:
        return predict(config, layout, plan.schedule, plan.layers, rank), ranks
    return max(ranks, key=lambda other: other.total), ranks


def _with_vocab(config: Config) -> Config:
    """The tokenizer's vocabulary where the configuration has ``auto``."""
    if config.model.vocab != "auto":
        return config
    from hexad.dataset.tokenizer import load_tokenizer

    with blaming("data.tokenizer"):
        size = load_tokenizer(config.data.tokenizer).vocab_size
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab": size})})
