"""The layout of so many ranks: for training, the smallest, and what generation needs of it. No torch."""

from math import lcm

from hexad.config import Config, ConfigError, divisors
from hexad.config.schema import ParallelSettings
from hexad.topology.layout import Layout


def working_layout(config: Config, world: int) -> Layout:
    """The layout of a world of ``world`` ranks, or with ``faults.idle_ranks`` of as many of them as fit.

    The first ranks work; those from ``layout.world`` on are idle.

    Raises:
        ConfigError: degrees that do not fit the world.
    """
    parallel = config.parallel
    model = parallel.tensor * parallel.context * parallel.pipeline
    if not config.faults.idle_ranks or world < model:
        return Layout.from_settings(parallel, world)
    if parallel.data != "auto":
        return Layout.from_settings(parallel, min(world, model * parallel.data))
    for data in range(world // model, 0, -1):
        experts = data * model % (parallel.expert_tensor * parallel.expert * parallel.pipeline)
        batch, state = config.batch.micro * data, data * parallel.context
        if not (any(size % batch for size in config.batch.sizes) or state % parallel.replicas or experts):
            return Layout.from_settings(parallel, data * model)
    return Layout.from_settings(parallel, world // model * model)


def planned_layout(config: Config, world: int | None = None) -> Layout:
    """The layout of a world of ``world`` ranks; by default of as few as the degrees allow.

    Raises:
        ConfigError: degrees that do not fit the world.
    """
    return Layout.from_settings(config.parallel, smallest_world(config) if world is None else world)


def smallest_world(config: Config) -> int:
    """Ranks of the smallest world this configuration can run in: as many as both grids need."""
    parallel = config.parallel
    dense = parallel.tensor * parallel.context * parallel.pipeline
    if parallel.data != "auto":
        return dense * parallel.data
    return lcm(dense, parallel.expert_tensor * parallel.expert * parallel.pipeline)


def check_stages(parallel: ParallelSettings) -> None:
    """Refuse schedules that have other stages than generation: one per rank.

    Raises:
        ConfigError: such a schedule.
    """
    if parallel.schedule != "1f1b" or parallel.virtual_stages > 1:
        actual = f"found {parallel.schedule} with parallel.virtual_stages {parallel.virtual_stages}"
        raise ConfigError(
            "parallel.schedule", f"{actual}, but generation has one stage per rank; remove both"
        )


def check_replica(layout: Layout) -> None:
    """Refuse experts that are divided among replicas of generation, which compute at different times.

    Raises:
        ConfigError: such a degree.
    """
    if layout.contains(("tensor", "context"), ("expert", "expert_tensor")):
        return
    ranks = layout.tensor * layout.context
    raise ConfigError(
        "parallel.expert",
        f"found expert {layout.expert} x expert_tensor {layout.expert_tensor}, but generation divides "
        f"experts among the tensor {layout.tensor} x context {layout.context} ranks of a replica; "
        f"use {divisors(ranks)}",
    )
