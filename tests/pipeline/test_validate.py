"""Broken schedules are refused, each with a reason that names what is wrong."""

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hexad.parallel.pipeline.schedule import (
    Action,
    Schedule,
    ScheduleError,
    forward_schedule,
    looped,
    v_shaped,
)
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.validate import validate

Ranks = list[list[Action]]

names = st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"])


def changed(schedule: Schedule, change: Callable[[Ranks], object]) -> Schedule:
    ranks = [list(actions) for actions in schedule.ranks]
    change(ranks)
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, tuple(map(tuple, ranks)))


def refusal(schedule: Schedule, **options: int) -> str:
    with pytest.raises(ScheduleError) as refused:
        validate(schedule, **options)
    return str(refused.value)


@st.composite
def generated(draw: st.DrawFn) -> Schedule:
    name = draw(names)
    virtual = 2 if name == "interleaved" else 1
    return build_schedule(name, draw(st.integers(1, 6)), draw(st.integers(1, 12)), virtual)


@st.composite
def places(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A schedule, a rank and the position of an action there."""
    schedule = draw(generated())
    rank = draw(st.integers(0, schedule.pipeline - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.ranks[rank]) - 1))


@given(place=places())
@settings(max_examples=200)
def test_dropped(place: tuple[Schedule, int, int]) -> None:
    schedule, rank, position = place
    action = schedule.ranks[rank][position]
    reason = refusal(changed(schedule, lambda ranks: ranks[rank].pop(position)))
    assert "is missing" in reason and f"rank {rank}" in reason
    if action.kind != "BW":
        assert str(action) in reason
    else:
        assert f"stage {action.stage}, microbatch {action.microbatch} is missing" in reason


@given(place=places(), where=st.integers(0, 1000))
@settings(max_examples=200)
def test_doubled(place: tuple[Schedule, int, int], where: int) -> None:
    schedule, rank, position = place
    action = schedule.ranks[rank][position]
    later = position + 1 + where % (len(schedule.ranks[rank]) - position)
    reason = refusal(changed(schedule, lambda ranks: ranks[rank].insert(later, action)))
    assert reason == f"rank {rank} has {action} more than once"


@given(place=places(), kind=st.sampled_from(["B", "W", "BW"]))
@settings(max_examples=100)
def test_backward_twice_in_other_words(place: tuple[Schedule, int, int], kind: str) -> None:
    schedule, rank, _ = place
    _, stage, number = schedule.ranks[rank][0]
    extra = Action(kind, stage, number)
    assume(extra not in schedule.ranks[rank])
    reason = refusal(changed(schedule, lambda ranks: ranks[rank].append(extra)))
    assert f"rank {rank} has {extra}, but also B" in reason and "which does the same" in reason


@given(place=places(), other=st.integers(0, 5))
@settings(max_examples=100)
def test_wrong_rank(place: tuple[Schedule, int, int], other: int) -> None:
    schedule, rank, position = place
    assume(other < schedule.pipeline and other != rank)
    action = schedule.ranks[rank][position]
    reason = refusal(changed(schedule, lambda ranks: ranks[other].append(ranks[rank].pop(position))))
    # The rank that lost it may be seen to have an action that needs it before the one that has it is seen.
    assert f"but stage {action.stage} is on rank {rank}" in reason or str(action) in reason


@given(place=places())
@settings(max_examples=200)
def test_out_of_order_on_a_rank(place: tuple[Schedule, int, int]) -> None:
    schedule, rank, position = place
    action = schedule.ranks[rank][position]
    assume(action.kind != "F")
    needed = Action("B" if action.kind == "W" else "F", action.stage, action.microbatch)

    def swap(ranks: Ranks) -> None:
        first = ranks[rank].index(needed)
        ranks[rank][first], ranks[rank][position] = action, needed

    reason = refusal(changed(schedule, swap))
    if action.kind == "B" and Action("W", *action[1:]) not in schedule.ranks[rank][:position]:
        assert reason == f"rank {rank} has {action} before {needed}"
    assert f"rank {rank} has {action.kind}" in reason and "before" in reason


def test_out_of_range() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    for action in (
        Action("F", 2, 0),
        Action("F", -1, 0),
        Action("F", 0, 2),
        Action("F", 0, -1),
        Action("G", 0, 0),
    ):
        reason = refusal(changed(schedule, lambda ranks, action=action: ranks[0].append(action)))
        assert f"rank 0 has {action}, expected one of F, B, W, BW with stages below 2" in reason


def test_placement_outside() -> None:
    broken = Schedule("x", 1, (0, 2), ((Action("F", 0, 0),), ()))
    assert refusal(broken) == "stage 1 is placed on rank 2, but there are 2 ranks"
    assert "no ranks or no microbatches" in refusal(Schedule("x", 1, (), ()))


def test_deadlock_names_the_circle() -> None:
    """Rank 0 wants a gradient before it hands over what that gradient needs."""
    ranks = (
        (Action("F", 0, 0), Action("BW", 0, 0), Action("F", 0, 1), Action("BW", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("BW", 1, 0), Action("BW", 1, 1)),
    )
    assert refusal(Schedule("x", 2, (0, 1), ranks)) == (
        "deadlock: rank 0 waits at BW of stage 0, microbatch 0 for B of stage 1, microbatch 0 of rank 1; "
        "rank 1 waits at F of stage 1, microbatch 1 for F of stage 0, microbatch 1 of rank 0"
    )


def test_deadlock_with_itself() -> None:
    schedule = build_schedule("zb_v", 1, 1)
    ranks = tuple(sorted(schedule.ranks[0], key=lambda action: (action.kind != "F", -action.stage)))
    assert refusal(Schedule("x", 1, schedule.placement, (ranks,))) == (
        "deadlock: rank 0 waits at F of stage 1, microbatch 0 "
        "for F of stage 0, microbatch 0 of itself, later in its order"
    )


def test_long_circles_are_cut_short() -> None:
    """Twelve ranks in a ring, each of which wants the second round before it has finished the first."""
    p = 12
    schedule = changed(
        build_schedule("interleaved", p, 1, 2), lambda ranks: ranks[0].insert(0, ranks[0].pop(1))
    )
    reason = refusal(schedule)
    assert reason.startswith("deadlock: rank 0 waits at F of stage 12") and reason.endswith(
        "and 6 more ranks"
    )


def test_too_few_buffers() -> None:
    """In 1F1B a rank sends forwards while the next sends backwards: neither can do without a buffer."""
    schedule = build_schedule("1f1b", 2, 3)
    assert validate(schedule).buffers == 1
    validate(schedule, buffers=1)
    assert refusal(schedule, buffers=0) == (
        "deadlock with 0 buffers per link: "
        "rank 0 has done F of stage 0, microbatch 1, which rank 1 is not ready to receive; "
        "rank 1 has done BW of stage 1, microbatch 0, which rank 0 is not ready to receive"
    )


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_buffers_for_forwards_far_ahead(ahead: int) -> None:
    """A rank that wants all second stages last must be sent all first ones before: counted by hand."""
    first = tuple(Action("F", 0, number) for number in range(ahead + 1))
    second = (Action("F", 1, ahead), *(Action("F", 1, number) for number in range(ahead)))
    schedule = Schedule("x", ahead + 1, (0, 1), (first, second))
    assert validate(schedule, forward_only=True).buffers == ahead


def test_every_rank_needs_a_stage() -> None:
    (actions,) = build_schedule("1f1b", 1, 3).ranks
    assert "rank 1 of 2 has no stage" in refusal(Schedule("x", 3, (0,), (actions, ())))


@given(pipeline=st.integers(1, 8), virtual=st.integers(1, 3), microbatches=st.integers(1, 20))
@settings(max_examples=100)
def test_forwards_only(pipeline: int, virtual: int, microbatches: int) -> None:
    for placement in (looped(pipeline, virtual), v_shaped(pipeline)):
        schedule = forward_schedule(placement, microbatches)
        assert validate(schedule, forward_only=True).peak_activations == (0,) * pipeline
        assert "B of stage 0, microbatch 0 is missing on rank 0 (or a BW)" in refusal(schedule)
        dropped = changed(schedule, lambda ranks: ranks[-1].pop())
        assert "is missing" in refusal(dropped, forward_only=True)
    whole = build_schedule("1f1b", pipeline, microbatches)
    assert "expected forwards only" in refusal(whole, forward_only=True)


@given(schedule=generated(), where=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=4))
@settings(max_examples=300)
def test_deadlock_exactly_where_dependencies_are_circular(
    schedule: Schedule, where: list[tuple[int, int]]
) -> None:
    """After random swaps of neighbours, against a sort of the whole graph."""

    def swap(ranks: Ranks) -> None:
        for rank, position in where:
            actions = ranks[rank % len(ranks)]
            position %= max(len(actions) - 1, 1)
            actions[position : position + 2] = reversed(actions[position : position + 2])

    swapped = changed(schedule, swap)
    try:
        validate(swapped)
        reason = ""
    except ScheduleError as error:
        reason = str(error)
    assume(not reason or reason.startswith("deadlock"))
    assert bool(reason) == circular(swapped)


def circular(schedule: Schedule) -> bool:
    """Whether the actions, each after its rank's former one and after what it needs, have no common order."""
    needs: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}
    for actions in schedule.ranks:
        before = None
        for kind, stage, number in actions:
            own = (kind[0], stage, number)
            wanted = {before} if before else set()
            if kind == "F" and stage:
                wanted.add(("F", stage - 1, number))
            if kind in ("B", "BW") and stage + 1 < schedule.stages:
                wanted.add(("B", stage + 1, number))
            needs[own] = wanted
            before = own
    while needs:
        ready = [own for own, wanted in needs.items() if not wanted & needs.keys()]
        if not ready:
            return True
        for own in ready:
            del needs[own]
    return False
