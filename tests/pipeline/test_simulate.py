"""Timelines against a longest path by brute force, and by hand."""

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.parallel.pipeline.schedule import Action, Schedule, ScheduleError, read_schedule, write_schedule
from hexad.parallel.pipeline.schedules import NAMES, build_schedule
from hexad.parallel.pipeline.simulate import Costs, peak_memory, simulate
from hexad.parallel.pipeline.validate import validate

seconds = st.floats(0, 5)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A generated schedule with some neighbours swapped, as long as it stays valid."""
    name = draw(st.sampled_from(NAMES[:-1]))
    virtual = draw(st.integers(1, 3)) if name in ("gpipe", "interleaved") else 1
    schedule = build_schedule(name, draw(st.integers(1, 5)), draw(st.integers(1, 7)), virtual)
    for rank, position in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), max_size=6)):
        ranks = [list(actions) for actions in schedule.ranks]
        actions = ranks[rank % len(ranks)]
        actions[position : position + 2] = reversed(actions[position : position + 2])
        swapped = Schedule(name, schedule.microbatches, schedule.placement, tuple(map(tuple, ranks)))
        try:
            validate(swapped)
        except ScheduleError:
            continue
        schedule = swapped
    return schedule


def random_costs(draw: st.DrawFn, stages: int) -> Costs:
    of_stages = st.tuples(*[seconds] * stages)
    activation = draw(st.tuples(*[st.floats(1, 5)] * stages))
    times = [draw(of_stages) for _ in range(3)]
    return Costs(times[0], times[1], times[2], draw(seconds), activation)


@given(data=st.data(), schedule=schedules(), measured=st.booleans())
@settings(max_examples=200)
def test_against_longest_paths(data: st.DataObject, schedule: Schedule, measured: bool) -> None:
    costs = random_costs(data.draw, schedule.stages)
    if measured:  # each action takes its own time
        random = data.draw(st.randoms(use_true_random=False))
        durations = [[random.uniform(0, 5) for _ in actions] for actions in schedule.ranks]
        taken = {a: s for own, times in zip(schedule.ranks, durations) for a, s in zip(own, times)}
        timeline = simulate(schedule, costs, durations)
    else:
        taken = {a: seconds_of(costs, a) for own in schedule.ranks for a in own}
        timeline = simulate(schedule, costs)
    expected = longest_paths(schedule, taken, costs)
    for actions, times in zip(schedule.ranks, timeline.times):
        assert len(actions) == len(times)
        for action, (start, end) in zip(actions, times):
            assert start == pytest.approx(expected[action] - taken[action], abs=1e-6)
            assert end == pytest.approx(expected[action], abs=1e-6)
    firsts = [times[0][0] for times in timeline.times]
    lasts = [times[-1][1] for times in timeline.times]
    assert timeline.makespan == max(lasts) - min(firsts)
    assert timeline.span == max(last - first for first, last in zip(firsts, lasts))
    busy = sum(taken.values())
    assert (1 - timeline.bubble) * timeline.span * schedule.pipeline == pytest.approx(
        busy if timeline.span else 0, abs=1e-6
    )


def seconds_of(costs: Costs, action: Action) -> float:
    of = {"F": costs.forward, "B": costs.backward, "W": costs.weight}
    return sum(of[letter][action.stage] for letter in action.kind)


def longest_paths(schedule: Schedule, taken: dict[Action, float], costs: Costs) -> dict[Action, float]:
    """When each action ends: by recursion over all that must be done before, without any clock."""
    owner = {action: rank for rank, actions in enumerate(schedule.ranks) for action in actions}
    done_by = {(letter, *action[1:]): action for action in owner for letter in action.kind}

    @cache
    def end(action: Action) -> float:
        actions = schedule.ranks[owner[action]]
        position = actions.index(action)
        before = end(actions[position - 1]) if position else 0.0
        return max(before, arrival(action)) + taken[action]

    def arrival(action: Action) -> float:
        message = schedule.received(action)
        if message is not None:
            return sent(done_by[tuple(message)], owner[action])
        return 0.0

    @cache
    def sent(action: Action, target: int) -> float:
        """When the message of an action has left its link, behind those that were sent there before."""
        actions = schedule.ranks[owner[action]]
        earlier = [
            other
            for other in actions[: actions.index(action)]
            if (message := schedule.sent(other)) and schedule.placement[message.target] == target
        ]
        begin = max(end(action), sent(earlier[-1], target) if earlier else 0.0)
        return begin + costs.transfer

    return {action: end(action) for action in owner}


@given(data=st.data(), schedule=schedules())
@settings(max_examples=100)
def test_memory_against_a_sum_at_every_moment(data: st.DataObject, schedule: Schedule) -> None:
    costs = random_costs(data.draw, schedule.stages)
    for actions, peak in zip(schedule.ranks, peak_memory(schedule, costs)):
        most = 0.0
        for count in range(1, len(actions) + 1):
            held = 0.0
            for stage in range(schedule.stages):
                done = "".join(kind for kind, own, _ in actions[: count - 1] if own == stage)
                begun = done + (actions[count - 1].kind if actions[count - 1].stage == stage else "")
                held += (begun.count("F") - done.count("W")) * costs.activation[stage]
            most = max(most, held)
        assert peak == pytest.approx(most, abs=1e-6)


def test_by_hand() -> None:
    """Two ranks, one microbatch: F 2, message 4, F 2, BW 3 + 4, message, BW."""
    schedule = build_schedule("1f1b", 2, 1)
    costs = replace(Costs.uniform(2, 1, 2, 3, 4), transfer=4)
    timeline = simulate(schedule, costs)
    assert timeline.times == (((0, 2), (19, 26)), ((6, 8), (8, 15)))
    assert (timeline.makespan, timeline.span) == (26, 26)
    assert timeline.bubble == pytest.approx(1 - 18 / 52)
    assert peak_memory(schedule, costs) == (1, 1)


def test_messages_queue_on_their_link() -> None:
    """Three forwards of a second each, messages of two: the link is behind by one more each time."""
    schedule = build_schedule("gpipe", 2, 3)
    costs = replace(Costs.uniform(2), transfer=2)
    assert [start for start, _ in simulate(schedule, costs).times[1][:3]] == [3, 5, 7]


def test_uniform_shares() -> None:
    assert Costs.uniform(4, 2, 1, 2, 3) == Costs((0.5,) * 4, (1.0,) * 4, (1.5,) * 4, activation=(0.5,) * 4)
    assert Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)).activation == (1.0, 1.0)


def test_costs_that_do_not_fit() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="found costs of 3 stages for a schedule of 2"):
        simulate(schedule, Costs.uniform(3))
    with pytest.raises(ScheduleError, match="durations need as many values"):
        simulate(schedule, Costs.uniform(2), [[1.0] * 4, [1.0] * 3])
    with pytest.raises(ScheduleError, match="as many values of each kind"):
        Costs((1.0,), (1.0, 1.0), (1.0,))
    with pytest.raises(ScheduleError, match="negative"):
        Costs((1.0,), (-1.0,), (1.0,))


def test_deadlock_is_refused_with_the_reason() -> None:
    late = build_schedule("zb_v", 1, 1)
    order = tuple(sorted(late.ranks[0], key=lambda action: (action.kind != "F", -action.stage)))
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits"):
        simulate(Schedule("x", 1, late.placement, (order,)), Costs.uniform(2))
    forwards = tuple(action for action in order if action.kind == "F")
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at F of stage 1"):
        simulate(Schedule("x", 1, late.placement, (forwards,)), Costs.uniform(2))


@pytest.mark.parametrize("name", NAMES[:-1])
def test_files_hold_all_of_a_schedule(name: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    schedule = build_schedule(name, 3, 5)
    write_schedule(schedule, path)
    assert read_schedule(path) == schedule
    assert json.loads(path.read_text())["name"] == name


def test_large_steps_take_little_time() -> None:
    """64 ranks, 1,024 microbatches, 196,608 actions; about a second, with room for a busy machine."""
    begin = time.process_time()
    schedule = build_schedule("zb_h1", 64, 1024)
    timeline = simulate(schedule, Costs.uniform(64))
    validate(schedule)
    assert time.process_time() - begin < 6
    assert timeline.makespan == 3 * 1024 + 63
