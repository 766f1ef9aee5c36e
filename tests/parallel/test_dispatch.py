"""How rows reach experts, and come back: every dispatcher against one process."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.parallel.expert.dispatch import Dispatcher, combine, dispatch
from hexad.parallel.expert.permutation import Permutation
from hexad.topology.layout import Layout
from hexad.topology.mesh import ExpertRanks, Mesh

from ..pool import Pool

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 3, 5, 11
DROPPED = 0.2
KINDS = [(kind, allowance) for kind in ("alltoall", "all_gather") for allowance in (None, 8.0)]
ROUTINGS = ("random", "one expert", "dropped", "all dropped")


def _chosen(routing: str, seed: int) -> torch.Tensor:
    """int64 ``[tokens, top_k]``; :data:`EXPERTS` for pairs that are dropped."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand((TOKENS, EXPERTS), generator=generator).argsort(1)[:, :TOP_K]
    if routing == "one expert":
        chosen[:, 0] = 3
    elif routing == "dropped":
        chosen[torch.rand(chosen.shape, generator=generator) < DROPPED] = EXPERTS
    elif routing == "all dropped":
        chosen.fill_(EXPERTS)
    return chosen


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    shapes = (TOKENS, HIDDEN), (TOKENS, TOP_K), (TOKENS, HIDDEN)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def _matrices(slices: int) -> torch.Tensor:
    """``[experts, slices, hidden, hidden]``: an expert is the sum of its slices."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn((EXPERTS, slices, HIDDEN, HIDDEN), generator=generator, dtype=torch.float64)


def _through_experts(
    rank: int, route: Any, ranks: ExpertRanks, slices: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, gradient of the input, gradient of the weights) of one rank's tokens."""
    x, weights, gradient = _inputs(rank)
    x.requires_grad_()
    weights.requires_grad_()
    rows, of_rows = dispatch(x, weights, route)
    local = EXPERTS // ranks.experts
    mine = _matrices(slices)[ranks.place * local : (ranks.place + 1) * local, ranks.slice[ranks.axis.rank]]
    begin, parts = 0, []
    for matrix, end in zip(mine, route.offsets.tolist()):
        parts.append(rows[begin:end] @ matrix * of_rows[begin:end, None])
        begin = end
    parts.append(rows[begin:] * torch.nan)  # nothing may read them
    total = combine(torch.cat(parts), route, x)
    total.backward(gradient)
    assert x.grad is not None and weights.grad is not None
    return total.detach(), x.grad, weights.grad


def _exchanged(kind: str, allowance: float | None, routing: str, slices: int) -> tuple[Any, ...]:
    world = torch.distributed.get_world_size()
    layout = Layout(world=world, expert=world // slices, expert_tensor=slices)
    mesh = Mesh.create(layout, torch.device("cpu"))
    ranks = mesh.expert_ranks()
    route = Dispatcher(kind, EXPERTS, ranks, allowance).route(_chosen(routing, mesh.rank))
    missed = 0 if route.missed is None else int(route.missed)
    return *_through_experts(mesh.rank, route, ranks, slices), missed


def _expected(rank: int, routing: str, slices: int) -> tuple[torch.Tensor, ...]:
    x, weights, gradient = _inputs(rank)
    x.requires_grad_()
    weights.requires_grad_()
    matrices = torch.cat([_matrices(slices).sum(1), torch.zeros(1, HIDDEN, HIDDEN, dtype=torch.float64)])
    total = torch.einsum("th,tkhj,tk->tj", x, matrices[_chosen(routing, rank)], weights)
    total.backward(gradient)
    assert x.grad is not None and weights.grad is not None
    return total.detach(), x.grad, weights.grad


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("kind", "allowance"), KINDS)
@pytest.mark.parametrize(("world", "slices"), [(2, 1), (4, 1), (4, 2), (2, 2)])
def test_rows_pass_their_experts(
    world: int, slices: int, kind: str, allowance: float | None, routing: str, pool: Pool
) -> None:
    """Also in buffers of a static size, as on devices, and where an expert or a rank has no row."""
    for rank, (*results, missed) in enumerate(
        pool.run(world, _exchanged, kind, allowance, routing, slices, keep=f"experts {slices}")
    ):
        assert missed == 0
        for result, expected in zip(results, _expected(rank, routing, slices), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["alltoall", "all_gather"])
def test_rows_beyond_a_buffer_are_counted(kind: str, pool: Pool) -> None:
    """All ranks together miss what does not fit, and the other rows' sums are finite."""
    results = pool.run(2, _exchanged, kind, 1.0, "one expert", 1, keep="experts 1")
    assert sum(missed for *_, missed in results) > 0
    assert all(torch.isfinite(part).all() for *parts, _ in results for part in parts)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    pairs=st.integers(1, 4),
    count=st.integers(1, 5),
    most=st.none() | st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_a_permutation_sorts_pairs_and_finds_them_again(
    tokens: int, pairs: int, count: int, most: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(count + 1, (tokens, pairs), generator=generator)
    permutation = Permutation.of(experts, count, most)
    flat = experts.flatten().tolist()
    order = sorted((pair for pair in range(len(flat)) if flat[pair] < count), key=lambda pair: flat[pair])[
        :most
    ]
    assert permutation.order[: len(order)].tolist() == order
    ends = [sum(flat[pair] <= expert for pair in order) for expert in range(count)]
    assert permutation.offsets.tolist() == ends
    assert permutation.present is not None
    for pair, (place, present) in enumerate(
        zip(permutation.places.flatten().tolist(), permutation.present.flatten().tolist())
    ):
        assert present == (pair in order)
        assert place == (order.index(pair) if present else len(permutation.order) - 1)
