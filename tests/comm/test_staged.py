"""The backend ``staged``: what gloo computes, with NCCL's semantics."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hexad import comm
from hexad.comm import collectives
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh

from ..parity.context_cases import CONTEXT_PAIRS
from ..parity.expert_cases import MIXTRAL
from ..parity.harness import (
    PIPELINE_GRID,
    TOLERANCE,
    VARIANTS,
    Case,
    References,
    Trace,
    assemble,
    errors,
    name_of,
    run,
    run_rank,
)
from ..pool import Pool, RankError

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8)


@pytest.fixture(scope="module")
def staged() -> Iterator[Pool]:
    pool = Pool("staged", timeout=20.0)
    yield pool
    pool.close()


def _values(rank: int, rows: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    return (torch.arange(rows * 3).view(rows, 3) * (rank + 2) + turn).remainder(23).to(dtype)


def _everything() -> list[np.ndarray]:
    """All calls of :mod:`hexad.comm` over several groups: started together, waited for in another order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = Mesh.create(Layout(world=world, tensor=2, data="auto"), torch.device("cpu"))
    results, waiting = [], []
    for turn, dtype in enumerate(DTYPES):
        for axis in (mesh.tensor, mesh.data, mesh.combined("data", "context"), mesh.world):
            if axis.size == 1:
                continue
            waiting += _started(axis, dtype, turn)
            results.append(comm.broadcast(_values(rank, 2, dtype, turn), axis, axis.size - 1))
            results.append(comm.all_to_all(_values(rank, 2 * axis.size, dtype, turn), axis))
    results += [pending.wait() for pending in reversed(waiting)]
    objects: list[Any] = comm.gather_objects({"rank": rank}, mesh.world)
    dist.barrier()
    return [result.double().numpy().copy() for result in results] + [np.array([o["rank"] for o in objects])]


def _started(axis: Axis, dtype: torch.dtype, turn: int) -> list[collectives.Pending]:
    """Calls of every kind that do not wait."""
    rank, size = axis.ranks[axis.rank], axis.size
    started = [
        comm.all_reduce_async(_values(rank, 2, dtype, turn), axis, operator)
        for operator in ("sum", "max", "min")
    ]
    started.append(comm.all_gather_async(_values(rank, 2, dtype, turn), axis))
    whole = torch.zeros(2 * size, 3, dtype=dtype)
    part = whole[2 * axis.rank : 2 * axis.rank + 2].copy_(_values(rank, 2, dtype, turn))
    started.append(comm.all_gather_async(part, axis, whole))
    started.append(comm.reduce_scatter_async(_values(rank, 2 * size, dtype, turn), axis))
    send = [(axis.rank + other) % 3 for other in range(size)]  # also none
    receive = [(other + axis.rank) % 3 for other in range(size)]
    started.append(comm.all_to_all_async(_values(rank, sum(send), dtype, turn), axis, send, receive))
    after, before = (axis.rank + 1) % size, (axis.rank - 1) % size
    for tag in (turn, turn + 7):
        started.append(comm.send_async(_values(rank, 4, dtype, turn + tag), axis, after, tag))
        started.append(comm.receive_async(torch.empty(4, 3, dtype=dtype), axis, before, tag))
    message, out = _values(rank, 2, dtype, turn + 1), torch.empty(2, 3, dtype=dtype)
    started.append(comm.exchange_async(message, before, out, after, axis, turn + 20))
    return started


def test_every_call_gives_gloos_results(pool: Pool, staged: Pool) -> None:
    """Over groups of two ranks and of four; reduce-scatters too, which Hexad makes of others on a CPU."""
    for function in (_everything, _with_own_reduce_scatter):
        wanted, results = (group.run(4, function) for group in (pool, staged))
        for mine, theirs in zip(results, wanted, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(one, other)


def _with_own_reduce_scatter() -> list[np.ndarray]:
    def scatter(tensor: torch.Tensor, axis: Axis, out: Any) -> collectives.Pending:
        out = tensor.new_empty((tensor.shape[0] // axis.size, *tensor.shape[1:]))
        call = lambda: collectives._reduce_scatter_tensor(out, tensor, group=axis.group, async_op=True)  # noqa: E731
        return collectives._start("reduce_scatter", axis, tensor.nbytes, out, call, tensor)

    with mock.patch.object(collectives, "_reduce_scatter_by_exchange", scatter):
        return _everything()


def _stale() -> tuple[float, float]:
    """A result that is used too early, and an input that is overwritten too early."""
    axis = Mesh.create(Layout(world=2, data="auto"), torch.device("cpu")).data
    early, late = torch.full((1000,), 1.0), torch.full((1000,), 1.0)
    over = threading.Event()  # the backend's delays
    with mock.patch.object(time, "sleep", lambda _: over.wait()):
        pending = [comm.all_reduce_async(tensor, axis) for tensor in (late, early)]
        used = early.clone()
        early.fill_(5.0)
        over.set()
        pending[1].wait()
    return used.max().item(), early.max().item()


def test_who_does_not_wait_gets_other_numbers(staged: Pool) -> None:
    for used, reduced in staged.run(2, _stale):
        assert used == 1.0  # of 2
        assert reduced == 10.0


def _failing() -> None:
    axis = Mesh.create(Layout(world=2, data="auto"), torch.device("cpu")).data
    comm.all_reduce(torch.ones(2 + dist.get_rank()), axis)


def test_a_failure_is_raised_where_it_is_waited_for(staged: Pool) -> None:
    with pytest.raises(RankError, match="all_reduce over axis data"):
        staged.run(2, _failing)


class _Unwaited:
    """Torch's ``Work``, for which nobody waits."""

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


def _forgetful(case: Case, operation: str) -> tuple[Any, ...]:
    """The case without waiting for calls of one kind."""
    start = collectives._start

    def started(kind: str, *arguments: Any, **named: Any) -> collectives.Pending:
        pending = start(kind, *arguments, **named)
        if kind == operation and pending._work is not None:
            pending._work = _Unwaited()
        return pending

    with mock.patch.object(collectives, "_start", started):
        return run_rank(case)


@pytest.mark.parametrize(
    ("operation", "case"),
    [
        ("all_reduce", Case(VARIANTS[0], data=2)),
        ("reduce_scatter", Case(VARIANTS[0], data=2, zero=1)),
        ("all_gather", Case(VARIANTS[0], data=2, zero=3)),
        ("all_to_all", Case(VARIANTS[0], context=2, method="ulysses")),
        ("exchange", Case(VARIANTS[0], context=2)),
        ("receive", Case(VARIANTS[0], pipeline=2)),
    ],
)
def test_a_forgotten_wait_is_noticed(operation: str, case: Case, pool: Pool, staged: Pool) -> None:
    try:
        results = staged.run(case.world, _forgetful, case, operation)
        gradients, weights = (assemble([result[place] for result in results]) for place in (2, 3))
    except (RankError, AssertionError):
        return  # numbers that are not finite, or ranks that disagree
    trace = Trace(results[0][0], results[0][1], gradients, weights)
    assert not max(errors(trace, References(pool).of(case)).values()) < 1e3 * TOLERANCE


CASES = (
    Case(VARIANTS[3], data=2, tensor=2, zero=3, recompute="full"),
    replace(PIPELINE_GRID[1], data=1),
    CONTEXT_PAIRS[0],
    replace(CONTEXT_PAIRS[2], tensor=1),
    Case(MIXTRAL, 2, expert=2, zero=1, samples=6),
)
"""Of four ranks at most; :mod:`benchmarks.gpu.layouts` has all."""


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_layouts_give_the_numbers_of_one_process(case: Case, pool: Pool, staged: Pool) -> None:
    differences = errors(run(staged, case), References(pool).of(case))
    assert max(differences.values()) < TOLERANCE, differences
