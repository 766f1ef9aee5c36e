"""The best schedule that a search finds for given costs within a given memory.

Candidates are the named schedules, and orders found greedily (Qi et al., arXiv 2401.10241, section 3) with
several heuristics; each is simulated. The search is deterministic and does not depend on time, so that all
ranks find the same schedule.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from ..schedule import Schedule, ScheduleError, looped, v_shaped
from ..simulate import Costs, peak_memory, simulate
from .greedy import Preference, greedy
from .published import ONE_STAGE, V_SHAPED, gpipe, interleaved

StageRanks = tuple[int, ...]

_SLACK = 1e-9


def placements(pipeline: int, virtual_stages: int) -> tuple[StageRanks, ...]:
    """The placements of stages that ``auto`` considers.

    With one stage per rank requested, also two of half the size: V-shaped, or round-robin.
    """
    if pipeline == 1 or virtual_stages > 2:
        return (looped(pipeline, virtual_stages),)
    two = (v_shaped(pipeline), looped(pipeline, 2))
    return two if virtual_stages == 2 else (looped(pipeline, 1), *two)


def search(
    pipeline: int,
    microbatches: int,
    virtual_stages: int = 1,
    costs: Costs | Callable[[StageRanks], Costs | None] | None = None,
    memory: float | None = None,
    *,
    among: Sequence[StageRanks] | None = None,
    effort: int = 200_000,
) -> Schedule:
    """The schedule with the shortest simulated makespan found; of equal ones that with less memory.

    It is never slower than a named schedule that has one of the placements and fits the memory.

    Args:
        pipeline: number of pipeline ranks.
        microbatches: of one step.
        virtual_stages: stages per rank; 1 allows two as well (see :func:`placements`).
        costs: of a placement, None for one that is not possible; or of the one number of stages to consider;
            by default a rank's F, B and W take equally long.
        memory: the most activation memory of a rank, in the unit of :attr:`Costs.activation`. By default as
            much as 1F1B needs: as many microbatches as there are ranks, through all stages of a rank.
        among: the placements to consider instead of :func:`placements`.
        effort: limit of actions simulated greedily, beyond one attempt; the default takes about a second.

    Raises:
        ScheduleError: the memory is less than one microbatch needs, or there is no placement to consider.
    """
    options = [
        (placement, predicted)
        for placement in (placements(pipeline, virtual_stages) if among is None else among)
        if (predicted := _costs(costs, placement, pipeline)) is not None
    ]
    if not options:
        raise ScheduleError(f"auto: no placement of {virtual_stages} stages per rank has costs")
    if memory is None:
        memory = pipeline * max(_shares(*options[0]))
    least = min(max(_shares(*option)) for option in options)
    if memory < least * (1 - _SLACK):
        raise ScheduleError(
            f"auto: found activation memory for {memory:g} per rank, expected at least {least:g}: what one "
            "microbatch needs in all stages of a rank"
        )
    best: Schedule | None = None
    best_key = (float("inf"), float("inf"))
    for schedule, predicted in _candidates(pipeline, microbatches, options, memory, effort):
        peak = max(peak_memory(schedule, predicted))
        if peak > memory * (1 + 2 * _SLACK) + _SLACK:
            continue
        # Rounded, so that the order of summation does not decide.
        key = (float(f"{simulate(schedule, predicted).makespan:.9e}"), peak)
        if key < best_key:
            best, best_key = schedule, key
    assert best is not None
    return Schedule("auto", microbatches, best.placement, best.ranks)


def named(pipeline: int, microbatches: int, placement: StageRanks) -> Iterator[Schedule]:
    """The named schedules, in their default form, for a placement."""
    per_rank = len(placement) // pipeline
    if placement == looped(pipeline, per_rank):
        if per_rank == 1:
            yield from (build(pipeline, microbatches) for build in ONE_STAGE.values())
        else:
            yield interleaved(pipeline, microbatches, per_rank)
        yield gpipe(pipeline, microbatches, per_rank)
    if placement == v_shaped(pipeline):
        yield from (build(pipeline, microbatches) for build in V_SHAPED.values())


def _costs(
    costs: Costs | Callable[[StageRanks], Costs | None] | None, placement: StageRanks, pipeline: int
) -> Costs | None:
    if costs is None:
        return Costs.uniform(len(placement), len(placement) // pipeline)
    if isinstance(costs, Costs):
        return costs if costs.stages == len(placement) else None
    return costs(placement)


def _shares(placement: StageRanks, costs: Costs) -> list[float]:
    """The activation memory of one microbatch in all stages of a rank, for each rank."""
    shares = [0.0] * (max(placement) + 1)
    for rank, activation in zip(placement, costs.activation):
        shares[rank] += activation
    return shares


def _candidates(
    pipeline: int, microbatches: int, options: Sequence[tuple[StageRanks, Costs]], memory: float, effort: int
) -> Iterator[tuple[Schedule, Costs]]:
    known: dict[tuple[StageRanks, str], Schedule] = {}
    for placement, costs in options:
        for schedule in named(pipeline, microbatches, placement):
            known[placement, schedule.name] = schedule
            yield schedule, costs
    fitting = [option for option in options if max(_shares(*option)) <= memory * (1 + _SLACK)]
    left = effort
    for turn in zip(*(_recipes(*option, pipeline, memory) for option in fitting)):
        for (placement, costs), (preference, name) in zip(fitting, turn):
            size = 3 * len(placement) * microbatches
            # One is always tried: with little memory, possibly no named schedule fits.
            if left < effort and left < size:
                return
            left -= size
            follow = known[placement, name] if name else None
            candidate = greedy(placement, microbatches, costs, memory, preference, follow)
            if candidate is not None:
                yield candidate, costs


def _recipes(
    placement: StageRanks, costs: Costs, pipeline: int, memory: float
) -> Iterator[tuple[Preference, str | None]]:
    """Heuristics, some with a schedule to follow, in order of their usual gain."""
    most = int(memory / max(_shares(placement, costs)) * len(placement) / pipeline * (1 + _SLACK))
    slope = (most - 1) / max(pipeline - 1, 1)
    ahead = tuple(1 + int(slope * (pipeline - 1 - rank)) for rank in range(pipeline))
    debt = tuple(most - count for count in ahead)
    if len(placement) == pipeline:
        yield Preference("FB", debt=debt), None
        yield Preference("F", fill=1, ahead=ahead, debt=debt), None
        yield Preference(), "1f1b"
        yield Preference("F", ahead=ahead, debt=debt), None
        yield Preference(), "zb_h2"
        yield Preference("FB", fill=0, debt=debt), None
        yield Preference("B", ahead=tuple(range(pipeline, 0, -1))), None
        yield Preference("FB", fill=1, debt=debt), None
        follow = "zb_h1"
    elif placement == v_shaped(pipeline):
        yield Preference("FB", fill=0), None
        yield Preference(fill=0), "zb_v"
        yield Preference("B"), None
        yield Preference("FB"), None
        yield Preference(), "zb_v"
        yield Preference("F", deep=False, fill=0), None
        yield Preference("F", fill=1), None
        yield Preference(fill=1), "zb_v"
        follow = "dualpipe_v"
    else:
        yield Preference("FB", fill=0, debt=debt), None
        yield Preference("B"), None
        yield Preference("FB", debt=debt), None
        yield Preference("F", deep=False), None
        yield Preference(fill=0), "interleaved"
        yield Preference("FB", fill=0), None
        yield Preference("F", deep=False, fill=1, debt=debt), None
        yield Preference("F", fill=0, debt=debt), None
        follow = "interleaved"
    yield Preference(fill=0), follow
    yield Preference(), follow
    for first, deep, fill in product(("B", "F", "FB"), (True, False), (0, 0.5, 1)):
        yield Preference(first, deep, fill), None
        yield Preference(first, deep, fill, debt=debt), None
