"""Collectives against their definitions, the ledger against its formulas, and refusals."""

from typing import Any
from unittest import mock

import pytest
import torch

from hexad import comm
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..pool import Pool, RankError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _mesh(world: int) -> Mesh:
    return Mesh.create(Layout(world=world, tensor=world), torch.device("cpu"))


def _values(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, exact in every dtype."""
    return (torch.arange(rows * 3).view(rows, 3) % 5 + rank).to(dtype)


def _collectives(world: int) -> dict[str, int]:
    axis = _mesh(world).tensor
    for dtype in DTYPES:
        rows = 2 * world
        mine = _values(axis.rank, rows, dtype)
        everyone = [_values(rank, rows, dtype) for rank in range(world)]
        total = torch.stack(everyone).sum(0)
        assert torch.equal(comm.all_reduce(mine.clone(), axis), total)
        assert torch.equal(comm.all_reduce(mine.clone(), axis, "max"), torch.stack(everyone).amax(0))
        assert torch.equal(comm.all_gather(mine, axis), torch.cat(everyone))
        assert torch.equal(comm.reduce_scatter(mine.clone(), axis), total.chunk(world)[axis.rank])
        assert torch.equal(comm.broadcast(mine.clone(), axis, world - 1), everyone[-1])
    return dict(axis.sent)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_collectives_and_the_bytes_they_are_charged(pool: Pool, world: int) -> None:
    rows = 2 * world
    nbytes = sum(rows * 3 * dtype.itemsize for dtype in DTYPES)
    for sent in pool.run(world, _collectives, world):
        if world == 1:
            assert sent == {}
            continue
        share = nbytes * (world - 1) // world
        assert sent["all_reduce"] == 2 * 2 * share  # sum and max; reduce-scatter and all-gather of a ring
        assert sent["all_gather"] == (world - 1) * nbytes
        assert sent["reduce_scatter"] == share
        assert sent["broadcast"] == share


def _labels(world: int) -> tuple[list[str], list[str]]:
    """Labels of a collective while no profile is made, and while one is."""
    axis, made = _mesh(world).tensor, []
    original = torch.profiler.record_function

    def label(name: str) -> Any:
        made.append(name)
        return original(name)

    with mock.patch.object(torch.profiler, "record_function", label):
        comm.all_reduce(torch.ones(3), axis)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        comm.all_reduce(torch.ones(3), axis)
    return made, [event.name for event in profile.events() if event.name.startswith("hexad")]


def test_calls_are_labelled_only_while_a_profile_is_made(pool: Pool) -> None:
    """A label takes longer than all else that the host does for a call."""
    expected = [], ["hexad.tensor.all_reduce", "hexad.tensor.all_reduce.wait"]
    assert pool.run(2, _labels, 2) == [expected, expected]


def _sums_over_places() -> list[float]:
    """Sums over some places of an axis, as stages have that share one weight and another."""
    mesh = Mesh.create(Layout(world=3, pipeline=3), torch.device("cpu"), timeout=30.0)
    parts = [mesh.some(mesh.pipeline, *places) for places in ((0, 2), (1,), (1, 2))]
    return [comm.all_reduce(torch.tensor(10.0**mesh.rank), part).item() for part in parts]


def test_ranks_that_share_nothing_are_apart(pool: Pool) -> None:
    """torch names groups after how many a process has made: all ranks must have made as many."""
    assert pool.run(3, _sums_over_places) == [[101.0, 1.0, 1.0], [10.0, 10.0, 110.0], [101.0, 100.0, 110.0]]


def _exchanged(counts: list[list[int]]) -> int:
    """Rank r sends ``counts[r][s]`` rows to rank s, even where that is none."""
    axis = _mesh(len(counts)).tensor
    rank, everyone = axis.rank, range(axis.size)
    for dtype in DTYPES:
        mine = torch.cat([torch.full((n, 2), 10.0 * rank + to) for to, n in enumerate(counts[rank])]).to(
            dtype
        )
        receive = [counts[source][rank] for source in everyone]
        wanted = [torch.full((n, 2), 10.0 * source + rank) for source, n in enumerate(receive)]
        assert torch.equal(comm.all_to_all(mine, axis, counts[rank], receive), torch.cat(wanted).to(dtype))
    with pytest.raises(ValueError, match="rows"):
        comm.all_to_all(torch.zeros(3, 2), axis, [1] * axis.size + [1])
    return axis.sent["all_to_all"]


@pytest.mark.parametrize("counts", [[[2, 2], [2, 2]], [[1, 0, 4], [3, 2, 0], [0, 0, 0]]])
def test_uneven_exchanges(pool: Pool, counts: list[list[int]]) -> None:
    element = sum(dtype.itemsize for dtype in DTYPES)
    for rank, sent in enumerate(pool.run(len(counts), _exchanged, counts)):
        assert sent == sum(2 * n * element for to, n in enumerate(counts[rank]) if to != rank)


def _ring() -> float:
    axis = _mesh(3).tensor
    sending = comm.send_async(torch.full((4,), float(axis.rank)), axis, (axis.rank + 1) % 3, tag=7)
    inbox = torch.empty(4)
    comm.receive_async(inbox, axis, (axis.rank - 1) % 3, tag=7).wait()
    sending.wait()
    assert axis.sent["send"] == 16
    return float(inbox[0])


def test_point_to_point(pool: Pool) -> None:
    assert pool.run(3, _ring) == [2.0, 0.0, 1.0]


def _strided() -> list[str]:
    axis = _mesh(2).tensor
    messages = []
    view = torch.zeros(4, 4)[:, ::2]
    for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.broadcast):
        with pytest.raises(ValueError, match="not contiguous") as caught:
            call(view, axis)
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="do not divide"):
        comm.reduce_scatter(torch.zeros(3, 2), axis)
    comm.all_reduce(
        torch.zeros(1), axis
    )  # a rank that left now might close connections that another one makes
    return messages


def test_strided_views_are_refused(pool: Pool) -> None:
    """torch would reduce the wrong elements in silence."""
    assert len(pool.run(2, _strided)[0]) == 4


def _lost_peer() -> None:
    axis = _mesh(2).tensor
    if axis.rank == 1:
        raise KeyboardInterrupt("gone")
    comm.all_reduce(torch.zeros(8), axis)


def test_a_lost_peer_is_named_by_axis_and_ranks(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"all_reduce over axis tensor \(ranks 0,1\) failed"):
        pool.run(2, _lost_peer)


def _groups(layout: Layout) -> dict[str, Any]:
    mesh = Mesh.create(layout, torch.device("cpu"))
    return {name: (axis.ranks, axis.rank, axis.group is None) for name, axis in mesh.axes.items()}


def test_a_mesh_has_the_groups_in_use_and_only_those(pool: Pool) -> None:
    layout = Layout(world=6, tensor=3, data=2)
    for rank, axes in enumerate(pool.run(6, _groups, layout)):
        for name in ("tensor", "data", "pipeline", "context", "expert"):
            ranks = tuple(layout.group(rank, name))
            assert axes[name] == (ranks, ranks.index(rank), len(ranks) == 1)
