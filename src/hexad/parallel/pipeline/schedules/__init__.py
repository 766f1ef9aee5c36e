"""Generators of pipeline schedules, by name."""

from collections.abc import Callable
from functools import lru_cache

from hexad.config import counted, did_you_mean

from ..schedule import Schedule, ScheduleError
from ..simulate import Costs
from .auto import search
from .published import ONE_STAGE, V_SHAPED, gpipe, interleaved

NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "auto")

MOST_PASSES = 2**20
"""Microbatches x stages of a step: a schedule lists them all."""


def stages_per_rank(name: str, virtual_stages: int = 1) -> int:
    """Stages per rank of a schedule by name, given the setting.

    ``auto`` with 1 may choose two; see :func:`~hexad.parallel.pipeline.schedules.auto.placements`.

    Raises:
        ScheduleError: there is no such schedule, or none with that many stages per rank.
    """
    if name not in NAMES:
        raise ScheduleError(
            f"unknown schedule '{name}'{did_you_mean(name, NAMES)}; expected one of {', '.join(NAMES)}"
        )
    if virtual_stages < 1:
        raise ScheduleError(f"found {virtual_stages} stages per rank, expected at least 1")
    if name in ONE_STAGE and virtual_stages != 1:
        other = "interleaved" if name == "1f1b" else "zb_v or auto"
        raise ScheduleError(f"{name} has one stage per rank, found {virtual_stages}; use {other}")
    if name in V_SHAPED:
        if virtual_stages > 2:
            raise ScheduleError(
                f"{name} has two stages per rank, found {virtual_stages}; use interleaved or auto"
            )
        return 2
    return virtual_stages


def build_schedule(
    name: str,
    pipeline: int,
    microbatches: int,
    virtual_stages: int = 1,
    *,
    group: int | None = None,
    costs: Costs | Callable[[tuple[int, ...]], Costs | None] | None = None,
    memory: float | None = None,
) -> Schedule:
    """The schedule called ``name``.

    Args:
        name: one of :data:`NAMES`.
        pipeline: number of pipeline ranks.
        microbatches: of one step; every schedule takes any number from 1.
        virtual_stages: stages per rank. ``zb_v`` and ``dualpipe_v`` always have two.
        group: microbatches of one group of ``interleaved``, from 1; by default as many as there are ranks.
        costs: for ``auto``: of one placement, or as a function of the placement; by default uniform.
        memory: for ``auto``: see :func:`~hexad.parallel.pipeline.schedules.auto.search`.

    Raises:
        ScheduleError: the schedule cannot be made; the message says what would fit.
    """
    per_rank = stages_per_rank(name, virtual_stages)
    for count, what in ((pipeline, "pipeline ranks"), (microbatches, "microbatches")):
        if count < 1:
            raise ScheduleError(f"found {count} {what}, expected at least 1")
    if microbatches * pipeline * per_rank > MOST_PASSES:
        raise ScheduleError(
            f"found {microbatches} microbatches on {counted(pipeline * per_rank, 'stage')}, expected at most "
            f"{MOST_PASSES} pairs of them"
        )
    if group is not None and (name != "interleaved" or group < 1):
        raise ScheduleError(f"found microbatch groups of {group}; interleaved alone has groups, of 1 or more")
    if name == "auto":
        return search(pipeline, microbatches, virtual_stages, costs, memory)
    return _published(name, pipeline, microbatches, per_rank, group)


@lru_cache(maxsize=32)
def _published(name: str, pipeline: int, microbatches: int, per_rank: int, group: int | None) -> Schedule:
    """A schedule that depends on nothing else; those of many layouts are the same."""
    if name == "gpipe":
        return gpipe(pipeline, microbatches, per_rank)
    if name == "interleaved":
        return interleaved(pipeline, microbatches, per_rank, group)
    return (ONE_STAGE | V_SHAPED)[name](pipeline, microbatches)
