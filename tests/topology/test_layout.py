"""Layouts against fixed facts, a NumPy oracle that shares no code with them, and their own laws."""

import subprocess
import sys
import tracemalloc
from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexad.config import ConfigError
from hexad.config.schema import ParallelSettings
from hexad.topology.layout import AXES, DENSE_AXES, EXPERT_AXES, ORDER_NAMES, Layout

PIPELINE_LAST = [order for order in permutations(ORDER_NAMES) if order[-1] == "pipeline"]


def oracle(layout: Layout, axes: set[str]) -> list[list[int]]:
    """Groups by reshaping ``arange(world)`` and moving the wanted axes last."""
    expert = not axes <= set(DENSE_AXES)
    rename = {"tensor": "expert_tensor", "data": "expert_data"} if expert else {}
    members = EXPERT_AXES if expert else DENSE_AXES
    names = [rename.get(name, name) for name in layout.order.split("-")]
    slowest_first = [name for name in reversed(names) if name in members]
    grid = np.arange(layout.world).reshape([layout.degree(name) for name in slowest_first])
    kept = [index for index, name in enumerate(slowest_first) if name not in axes]
    moved = [index for index, name in enumerate(slowest_first) if name in axes]
    size = prod(layout.degree(axis) for axis in axes)
    return grid.transpose(kept + moved).reshape(-1, size).tolist()


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any legal layout of up to a few hundred ranks, odd and prime degrees included."""
    degree = st.sampled_from([1, 1, 2, 3, 4, 5, 7])
    tensor, context, pipeline, data = (draw(degree) for _ in range(4))
    stage = tensor * context * data
    assume(stage * pipeline <= 600)
    expert = draw(st.sampled_from([d for d in range(1, stage + 1) if stage % d == 0]))
    expert_tensor = draw(st.sampled_from([d for d in range(1, 8) if stage // expert % d == 0]))
    plain = pipeline == 1 or expert * expert_tensor == 1
    order = draw(st.permutations(ORDER_NAMES) if plain else st.sampled_from(PIPELINE_LAST))
    return Layout(
        world=stage * pipeline,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
        data=draw(st.sampled_from([data, "auto"])),
        order="-".join(order),
    )


def axis_sets() -> st.SearchStrategy[set[str]]:
    return st.sampled_from([DENSE_AXES, EXPERT_AXES]).flatmap(
        lambda grid: st.sets(st.sampled_from(grid), min_size=1)
    )


def test_four_ranks() -> None:
    layout = Layout(world=4, tensor=2, pipeline=2)
    assert layout.groups("tensor") == [[0, 1], [2, 3]]
    assert layout.groups("pipeline") == [[0, 2], [1, 3]]
    assert layout.groups("data") == [[0], [1], [2], [3]]


def test_sixteen_ranks_as_in_megatrons_documentation() -> None:
    layout = Layout(world=16, tensor=2, pipeline=4)
    pairs = [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert layout.groups("data") == pairs
    assert layout.groups("pipeline") == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert layout.groups("tensor", "pipeline") == [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
    ]


def test_an_order_may_name_only_the_axes_in_use() -> None:
    layout = Layout(world=8, tensor=2, pipeline=2, data=2, order="tensor-data-pipeline")
    assert layout.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    other = Layout(world=8, tensor=2, pipeline=2, order="tensor-pipeline-data")
    assert other.groups("pipeline") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert other.groups("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_expert_grid_is_folded_over_the_dense_one() -> None:
    layout = Layout(world=16, tensor=2, context=2, pipeline=2, expert=4, expert_tensor=2)
    assert layout.degrees == {
        "tensor": 2,
        "context": 2,
        "pipeline": 2,
        "data": 2,
        "expert": 4,
        "expert_tensor": 2,
        "expert_data": 1,
    }
    assert layout.groups("expert_tensor")[0] == [0, 1]
    assert layout.groups("expert")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("context")[0] == [0, 2]


def test_without_experts_the_expert_data_axis_is_the_whole_stage() -> None:
    layout = Layout(world=8, tensor=2, pipeline=2, order="tensor-pipeline-data")
    assert layout.groups("expert_data") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.groups("expert") == [[rank] for rank in range(8)]


@given(layouts(), axis_sets())
def test_groups_equal_the_oracle(layout: Layout, axes: set[str]) -> None:
    # Without expert axes the expert grid does not exist and is defined by the stage alone (test above).
    assume(axes <= set(DENSE_AXES) or layout.expert * layout.expert_tensor > 1)
    assert layout.groups(*axes) == oracle(layout, axes)


@given(layouts(), axis_sets())
def test_groups_partition_the_ranks(layout: Layout, axes: set[str]) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert {len(group) for group in groups} == {prod(layout.degree(axis) for axis in axes)}
    assert all(layout.group(rank, *axes) == group for group in groups for rank in group)


@given(layouts(), axis_sets())
def test_members_of_a_group_differ_along_its_axes_alone(layout: Layout, axes: set[str]) -> None:
    grid = DENSE_AXES if axes <= set(DENSE_AXES) else EXPERT_AXES
    for group in layout.groups(*axes)[:20]:
        coordinates = [layout.coordinates(rank) for rank in group]
        for axis in set(grid) - axes:
            assert len({c[axis] for c in coordinates}) == 1
        product = {tuple(c[axis] for axis in sorted(axes)) for c in coordinates}
        assert len(product) == len(group) == prod(layout.degree(axis) for axis in axes)


@given(layouts())
def test_coordinates_and_ranks_are_inverse(layout: Layout) -> None:
    for rank in range(layout.world):
        coordinates = layout.coordinates(rank)
        assert tuple(coordinates) == AXES
        assert layout.rank_of(**coordinates) == rank
        for grid in (DENSE_AXES, EXPERT_AXES):
            assert layout.rank_of(**{axis: coordinates[axis] for axis in grid}) == rank


@given(layouts())
def test_both_grids_share_their_stages(layout: Layout) -> None:
    assert layout.groups("expert_tensor", "expert", "expert_data") == layout.groups(
        "tensor", "context", "data"
    )


@given(st.permutations(ORDER_NAMES), st.sampled_from([2, 3]), st.sampled_from([2, 4]))
def test_orders_that_split_the_stages_are_refused(order: list[str], tensor: int, expert: int) -> None:
    degrees = {"tensor": tensor, "pipeline": 3, "expert": expert, "world": tensor * 3 * 4}
    below = order[: order.index("pipeline")]
    dense = prod({"tensor": tensor, "data": 4}.get(name, 1) for name in below)
    folded = prod({"expert": expert, "data": tensor * 4 // expert}.get(name, 1) for name in below)
    if dense == folded:
        Layout(**degrees, order="-".join(order))
    else:
        with pytest.raises(ConfigError, match=r"parallel\.order: .*put pipeline last: .*-pipeline$"):
            Layout(**degrees, order="-".join(order))


def test_a_million_ranks_in_little_memory() -> None:
    """Groups are computed, not listed."""
    tracemalloc.start()
    fresh = Layout(world=1_000_000, tensor=8, context=5, pipeline=25, expert=40)
    assert len(fresh.group(123_456, "tensor", "context")) == 40
    first = next(iter(fresh.iter_groups("tensor")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first == list(range(8))
    assert peak < 100_000


@pytest.mark.parametrize(
    ("degrees", "field", "words"),
    [
        (
            {"world": 6, "tensor": 4},
            "parallel.tensor",
            ["found 4", "world 6", "4 or 8 ranks", "use tensor 2"],
        ),
        ({"world": 8, "tensor": 2, "pipeline": 3}, "parallel.pipeline", ["6 or 12 ranks", "use pipeline 1"]),
        ({"world": 2, "context": 4}, "parallel.context", ["start 4 ranks", "context 2"]),
        ({"world": 8, "data": 3}, "parallel.data", ["found 3", "use 8 or auto", "start 3 ranks"]),
        ({"world": 8, "tensor": 4, "data": 1}, "parallel.data", ["use 2 or auto", "start 4 ranks"]),
        ({"world": 8, "expert": 3}, "parallel.expert", ["found 3", "use expert 1"]),
        ({"world": 8, "expert_tensor": 16}, "parallel.expert_tensor", ["16 ranks", "expert_tensor 8"]),
        ({"world": 0}, "world", ["found 0", "at least 1"]),
        ({"world": 2.0}, "world", ["found 2.0"]),
        ({"world": 8, "tensor": 0}, "parallel.tensor", ["found 0", "at least 1"]),
        ({"world": 8, "data": "all"}, "parallel.data", ["found 'all'", "auto"]),
        ({"world": 8, "order": "tensor-dta"}, "parallel.order", ["'dta'", "did you mean 'data'"]),
        ({"world": 8, "order": "tp-cp-ep-dp-pp"}, "parallel.order", ["'tp'", "did you mean 'tensor'"]),
        ({"world": 8, "order": "data-data"}, "parallel.order", ["'data' twice"]),
        ({"world": 8, "order": "tensor-pipeline"}, "parallel.order", ["without 'data' (degree 8)"]),
        (
            {"world": 8, "tensor": 8, "expert": 4, "order": "tensor-expert"},
            "parallel.order",
            ["'data' (degree 2)"],
        ),
        ({"world": 1, "order": ""}, "parallel.order", ["unknown axis ''"]),
        ({"world": 1, "order": 7}, "parallel.order", ["unknown axis '7'"]),
    ],
)
def test_mistakes_name_field_value_and_fix(degrees: dict, field: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout(**degrees)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 12))
def test_the_fixes_in_messages_work(world: int, tensor: int, pipeline: int) -> None:
    try:
        Layout(world=world, tensor=tensor, pipeline=pipeline)
    except ConfigError as error:
        fixes = str(error).rsplit("; ", 1)[1]
        for size in fixes.removeprefix("start ").partition(" ranks")[0].split(" or "):
            Layout(world=int(size), tensor=tensor, pipeline=pipeline)
        axis = error.field.removeprefix("parallel.")
        _, _, degrees = fixes.partition(f"use {axis} ")
        for degree in filter(None, degrees.split(" or ")):
            Layout(**{"world": world, "tensor": tensor, "pipeline": pipeline, axis: int(degree)})


def test_wrong_questions_are_programming_errors() -> None:
    layout = Layout(world=8, tensor=2, expert=2)
    for wrong in [
        lambda: layout.groups(),
        lambda: layout.groups("tensors"),
        lambda: layout.groups("tensor", "expert"),
        lambda: layout.group(8, "tensor"),
        lambda: layout.coordinates(-1),
        lambda: layout.rank_of(tensor=2),
        lambda: layout.rank_of(tensor=1),
        lambda: layout.rank_of(tensor=1, data=0, expert=0, expert_data=0),
        lambda: layout.degree("ring"),
    ]:
        with pytest.raises(ValueError):
            wrong()


def test_from_settings() -> None:
    settings = ParallelSettings(tensor=2, pipeline=2, order="tensor-data-context-expert-pipeline")
    layout = Layout.from_settings(settings, world=8)
    assert layout.degree("data") == layout.data == 2
    assert layout == Layout(world=8, tensor=2, pipeline=2, data=2, order=settings.order)


def test_layout_does_not_import_torch() -> None:
    code = "import sys, hexad; hexad.Layout(world=8).groups('data'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
