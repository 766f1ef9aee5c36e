"""Generated schedules: valid for every size, with the order, memory and bubble that their papers state."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.parallel.pipeline.schedule import Schedule, ScheduleError, looped, v_shaped
from hexad.parallel.pipeline.schedules import NAMES, build_schedule, stages_per_rank
from hexad.parallel.pipeline.simulate import Costs, peak_memory, simulate
from hexad.parallel.pipeline.validate import validate

NAMED = [name for name in NAMES if name != "auto"]
SEVERAL = ("gpipe", "interleaved")

sizes = st.tuples(st.integers(1, 9), st.integers(1, 33))
seconds = st.floats(0.1, 10)


def warm_up(schedule: Schedule) -> list[int]:
    """Forwards before the first one that a backward follows in turn, per rank."""
    begins = [[action.kind for action in actions].index("BW") for actions in schedule.ranks]
    return [
        count - 1 if schedule.ranks[rank][count + 1 :: 2][0].kind == "F" else count
        for rank, count in enumerate(begins)
    ]


def written(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{action.kind[0]}{action.microbatch}" for action in schedule.ranks[rank])


def waste(schedule: Schedule, costs: Costs, per_microbatch: float) -> float:
    """Seconds in which the busiest rank waits."""
    return simulate(schedule, costs).span - schedule.microbatches * per_microbatch


@given(name=st.sampled_from(NAMED), size=sizes, virtual=st.integers(1, 4), group=st.integers(1, 20))
@settings(max_examples=600)
def test_every_schedule_is_valid(name: str, size: tuple[int, int], virtual: int, group: int) -> None:
    pipeline, microbatches = size
    virtual = virtual if name in SEVERAL else 1
    group_ = group if name == "interleaved" and group <= 12 else None
    schedule = build_schedule(name, pipeline, microbatches, virtual, group=group_)
    report = validate(schedule)
    assert schedule.stages == pipeline * stages_per_rank(name, virtual)
    assert (schedule.pipeline, schedule.microbatches) == size
    validate(schedule, buffers=report.buffers)
    if report.buffers:
        with pytest.raises(ScheduleError, match=f"deadlock with {report.buffers - 1} buffers"):
            validate(schedule, buffers=report.buffers - 1)


def test_one_forward_one_backward_in_order() -> None:
    schedule = build_schedule("1f1b", 4, 4)
    assert written(schedule, 1) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert warm_up(build_schedule("1f1b", 4, 8)) == [3, 2, 1, 0]
    assert build_schedule("interleaved", 4, 8).ranks == build_schedule("1f1b", 4, 8).ranks


def test_interleaved_warm_up() -> None:
    assert warm_up(build_schedule("interleaved", 4, 8, 2)) == [10, 8, 6, 4]
    # Ranks 0 to 3 have 16 forwards, and would run ahead by 22, 20, 18 and 16.
    assert warm_up(build_schedule("interleaved", 8, 8, 2)) == [16, 16, 16, 16, 14, 12, 10, 8]


def test_interleaved_goes_in_groups() -> None:
    schedule = build_schedule("interleaved", 2, 4, 2)
    forwards = [(stage, number) for kind, stage, number in schedule.ranks[0] if kind == "F"]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    backwards = [(stage, number) for kind, stage, number in schedule.ranks[1] if kind == "BW"]
    assert backwards == [(3, 0), (3, 1), (1, 0), (1, 1), (3, 2), (3, 3), (1, 2), (1, 3)]


def test_gpipe_is_breadth_first() -> None:
    schedule = build_schedule("gpipe", 2, 2, 2)
    order = [(kind, stage, number) for kind, stage, number in schedule.ranks[1]]
    assert order[:4] == [("F", 1, 0), ("F", 1, 1), ("F", 3, 0), ("F", 3, 1)]
    assert order[4:] == [("BW", 3, 0), ("BW", 3, 1), ("BW", 1, 0), ("BW", 1, 1)]


def test_zero_bubble_puts_off_weight_gradients() -> None:
    h1, h2 = build_schedule("zb_h1", 3, 5), build_schedule("zb_h2", 3, 6)
    assert written(h1, 0) == "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4"
    assert written(h1, 2) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4"
    assert written(h2, 0) == "F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5"
    assert written(h2, 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5"


def test_dualpipe_v_on_two_ranks() -> None:
    """The phases of the original, counted by hand: rank 0 of 2 with 4 microbatches."""
    schedule = build_schedule("dualpipe_v", 2, 4)
    order = " ".join(f"{kind}{stage}.{number}" for kind, stage, number in schedule.ranks[0])
    assert order == (
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 F0.3 BW3.1 F3.2 BW0.0 BW3.2 F3.3 BW0.1 BW3.3 B0.2 W0.2 B0.3 W0.3"
    )


def test_placements() -> None:
    assert build_schedule("interleaved", 3, 3, 2).placement == looped(3, 2) == (0, 1, 2, 0, 1, 2)
    assert build_schedule("zb_v", 3, 3).placement == v_shaped(3) == (0, 1, 2, 2, 1, 0)
    assert build_schedule("dualpipe_v", 3, 3, 2).placement == v_shaped(3)


@given(size=sizes, virtual=st.integers(1, 3))
@settings(max_examples=150)
def test_peak_activations(size: tuple[int, int], virtual: int) -> None:
    p, m = size

    def peaks(name: str, per_rank: int = 1) -> tuple[int, ...]:
        return validate(build_schedule(name, p, m, per_rank)).peak_activations

    assert peaks("1f1b") == tuple(min(p - r, m) for r in range(p))
    assert peaks("gpipe", virtual) == (m * virtual,) * p
    assert peaks("zb_h1") == (min(p, m),) * p
    assert peaks("zb_h2") == (min(2 * p - 1, m),) * p
    assert max(peaks("zb_v")) <= 2 * p
    assert max(peaks("dualpipe_v")) <= 2 * p + 1
    if m >= 2 * p:
        assert peaks("zb_v") == (2 * p,) * p
        assert peaks("dualpipe_v") == (2 * p + 1,) * p
    if virtual > 1 and m % p == 0:
        total = m * virtual
        assert peaks("interleaved", virtual) == tuple(
            min(2 * (p - r - 1) + (virtual - 1) * p + 1, total) for r in range(p)
        )


@given(size=sizes, times=st.tuples(seconds, seconds, seconds), virtual=st.integers(1, 4))
@settings(max_examples=200)
def test_bubbles_of_whole_backwards(
    size: tuple[int, int], times: tuple[float, float, float], virtual: int
) -> None:
    """GPipe and 1F1B: for all costs, and all counts from those that fill the pipeline once."""
    p, m = size[0], size[1]
    total = sum(times)
    one = Costs.uniform(p, 1, *times)
    assert waste(build_schedule("gpipe", p, m), one, total) == pytest.approx((p - 1) * total, abs=1e-6)
    assert waste(build_schedule("1f1b", p, m), one, total) == pytest.approx((p - 1) * total, abs=1e-6)
    if m >= p:
        several = Costs.uniform(p * virtual, virtual, *times)
        for name in ("gpipe", "interleaved"):
            bubble = waste(build_schedule(name, p, m, virtual), several, total)
            assert bubble == pytest.approx((p - 1) * total / virtual, abs=1e-6)


@given(size=sizes, times=st.tuples(seconds, seconds, seconds))
@settings(max_examples=300)
def test_bubbles_of_split_backwards(size: tuple[int, int], times: tuple[float, float, float]) -> None:
    """ZB-H1 and ZB-H2, where W is short enough to fit into the gaps it is moved to.

    The papers' formulas count the gaps on the first rank. With W longer than F (for H2 also than B) the last
    rank, which runs one W after each F and B, hands gradients back later than they assume. The pipeline must
    also be full once: p microbatches, or as many as H2 runs ahead.
    """
    (p, m), (f, b, w) = size, times
    w = min(w, f)
    h1 = Costs.uniform(p, 1, f, b, w)
    if m >= p:
        bubble = waste(build_schedule("zb_h1", p, m), h1, f + b + w)
        assert bubble == pytest.approx((p - 1) * (f + b - w), abs=1e-6)
    w = min(w, b)
    h2 = Costs.uniform(p, 1, f, b, w)
    if m >= 2 * p - 1:
        bubble = waste(build_schedule("zb_h2", p, m), h2, f + b + w)
        assert bubble == pytest.approx((p - 1) * (f + b - 2 * w), abs=1e-6)


@pytest.mark.parametrize("pipeline", range(1, 10))
def test_zb_v_has_no_bubble(pipeline: int) -> None:
    """Where F, B and W take equally long, from as many microbatches as a rank has stages in flight."""
    costs = Costs.uniform(2 * pipeline, 2)
    for microbatches in (2 * pipeline, 2 * pipeline + 1, 5 * pipeline):
        schedule = build_schedule("zb_v", pipeline, microbatches)
        assert simulate(schedule, costs).bubble == pytest.approx(0, abs=1e-9)
        assert max(peak_memory(schedule, costs)) == pytest.approx(pipeline)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 4, 8, 2), "1f1b has one stage per rank, found 2; use interleaved"),
        (("zb_h1", 4, 8, 2), "zb_h1 has one stage per rank, found 2; use zb_v or auto"),
        (("zb_v", 4, 8, 3), "zb_v has two stages per rank, found 3; use interleaved or auto"),
        (("1f1c", 4, 8), "unknown schedule '1f1c' (did you mean '1f1b'?)"),
        (("gpipe", 4, 0), "found 0 microbatches"),
        (("gpipe", 0, 1), "found 0 pipeline ranks"),
        (("gpipe", 1, 1, 0), "found 0 stages per rank"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        build_schedule(*arguments)
    assert message in str(refused.value)


def test_groups_belong_to_interleaved() -> None:
    for name, group in (("1f1b", 4), ("interleaved", 0)):
        with pytest.raises(ScheduleError, match=f"found microbatch groups of {group}"):
            build_schedule(name, 4, 8, group=group)
