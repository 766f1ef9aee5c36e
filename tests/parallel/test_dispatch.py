"""How rows reach experts, and come back: every dispatcher against one process."""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hexad.model import ops
from hexad.model.auxiliary import Auxiliary
from hexad.model.experts import MixtureOfExperts
from hexad.model.inventory import ModelInventory
from hexad.model.positions import Geometry
from hexad.parallel.context.spans import Spans
from hexad.parallel.expert import dispatch as dispatch_module
from hexad.parallel.expert import grouped
from hexad.parallel.expert import nvshmem as nvshmem_module
from hexad.parallel.expert.dispatch import Dispatcher, combine, dispatch
from hexad.parallel.expert.permutation import Permutation
from hexad.parallel.sharding import Shard
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, ExpertRanks, Mesh

from ..pool import Pool
from ..small import config_of

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
    elif routing in ("all dropped", "last expert"):
        chosen.fill_(EXPERTS)
    if routing == "last expert":
        chosen[:, 0] = EXPERTS - 1
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


def _exchanged(
    kind: str, allowance: float | None, routing: str, slices: int, bounded: bool = True
) -> tuple[Any, ...]:
    world = torch.distributed.get_world_size()
    layout = Layout(world=world, expert=world // slices, expert_tensor=slices)
    mesh = Mesh.create(layout, torch.device("cpu"))
    ranks = mesh.expert_ranks()
    dispatcher, chosen = Dispatcher(kind, EXPERTS, ranks, allowance), _chosen(routing, mesh.rank)
    with torch.device("meta"):  # where whatever is made without naming a device would be
        route = dispatcher.route(chosen, bounded=bounded)
    results = _through_experts(mesh.rank, route, ranks, slices)
    return *results, 0 if route.missed is None else int(route.missed)


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


@pytest.mark.parametrize("kind", ["alltoall", "all_gather"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_all_rows_have_a_place_where_nobody_would_look_at_those_without(
    kind: str, routing: str, pool: Pool
) -> None:
    """In evaluation and generation, whatever the allowance."""
    results = pool.run(2, _exchanged, kind, 1.0, routing, 1, False, keep="experts 1")
    for rank, (*parts, missed) in enumerate(results):
        assert missed == 0
        for result, expected in zip(parts, _expected(rank, routing, 1), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def _sent(kind: str, routing: str) -> tuple[int, int, list[int]]:
    """(bytes sent in a forward and a backward pass, this rank, rows for each rank)."""
    world = torch.distributed.get_world_size()
    mesh = Mesh.create(Layout(world=world, expert=world), torch.device("cpu"))
    ranks, chosen = mesh.expert_ranks(), _chosen(routing, mesh.rank)
    before = ranks.axis.sent.total()
    route = Dispatcher(kind, EXPERTS, ranks).route(chosen)
    _through_experts(mesh.rank, route, ranks, 1)
    local = EXPERTS // world
    rows = [int(((chosen >= r * local) & (chosen < (r + 1) * local)).sum()) for r in range(world)]
    return ranks.axis.sent.total() - before, mesh.rank, rows


@pytest.mark.parametrize("routing", ["random", "one expert"])
@pytest.mark.parametrize("kind", ["alltoall", "all_gather"])
def test_bytes_sent_are_those_of_the_routing(kind: str, routing: str, pool: Pool) -> None:
    """Rows and their weights there and back, twice, and counts or experts' numbers; all of float64."""
    world = 4
    results = pool.run(world, _sent, kind, routing, keep="experts 1")
    for sent, rank, rows in results:
        away = sum(rows) - rows[rank]
        back = sum(other[2][rank] for other in results) - rows[rank]
        row = 8 * HIDDEN
        if kind == "alltoall":
            counts = 4 * (EXPERTS - EXPERTS // world)
            # Forward: rows and weights away, results back. Backward: gradients of results away, the rest
            expected = counts + away * (row + 8) + back * row + away * row + back * (row + 8)
        else:
            gathered = (world - 1) * TOKENS
            expected = gathered * 8 * TOP_K + gathered * (4 * row + 2 * 8 * TOP_K)
        assert sent == expected


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


# On a device, counted on meta tensors


class Launches(TorchDispatchMode):
    """Counts operators that launch a kernel, and the bytes that some read and write. What is compiled counts
    once."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.bytes, self.inside = 0, Counter[str](), False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
        }
        views = made and all(leaf.untyped_storage()._cdata in given for leaf in made) and name[-1] != "_"
        if (
            not views
            and name not in ("promote_types", "empty", "new_empty", "empty_like")
            and not self.inside
        ):
            self.count += 1
        self.bytes[name] += sum(leaf.nbytes for leaf in made)
        return result

    def compiled(self, function: Any, compiled: bool) -> Any:
        """In place of ``maybe_compiled``."""

        def call(*arguments: Any) -> Any:
            self.count, self.inside = self.count + 1, True
            try:
                return function(*arguments)
            finally:
                self.inside = False

        return call


def _layer_on_meta(
    kind: str, ranks: int, tokens: int, counted: bool
) -> tuple[MixtureOfExperts, torch.Tensor, Geometry]:
    """A layer of bf16 on a device that has no values, on the first of so many ranks."""
    meta = torch.device("meta")
    moe = {"experts": 8, "top_k": TOP_K, "ffn_hidden": 32, "dispatcher": kind}
    model = config_of(model={"hidden": 64, "layers": 1, "moe": moe, "vocab": 100}).model
    spec = ModelInventory(model.model_copy(update={"max_positions": 64})).layer(0).parts[1]
    axis = Axis("expert", tuple(range(ranks)), 0, dist.group.WORLD if ranks > 1 else None, meta)
    experts = ExpertRanks(axis, tuple(range(ranks)), (0,) * ranks) if ranks > 1 else None
    axes = {"expert": axis} if ranks > 1 else {}
    shard = Shard(axes, dtype=torch.bfloat16, device=meta, compiled=True, expert_ranks=experts)
    x = torch.empty(tokens, 64, dtype=torch.bfloat16, device=meta, requires_grad=True)
    positions = torch.zeros(tokens, dtype=torch.int64, device=meta)
    layer: Any = MixtureOfExperts(spec, shard, 0)  # type: ignore[arg-type]
    counts = torch.empty(1, 8 + 3, dtype=torch.float64, device=meta)
    auxiliary = (
        Auxiliary((), torch.empty(0, dtype=torch.float64, device=meta), 1.0, counts) if counted else None
    )
    return layer, x, Geometry(Spans(tokens, 2), positions, auxiliary=auxiliary)


def _passes_on_meta(
    kind: str, ranks: int, host_reads: bool, counted: bool = False
) -> tuple[int, Counter[str]]:
    """(launches of a forward pass, bytes written by operator). A forward and a backward pass, in which
    reading a count on the host would be an error: a device without values has none. Of training, where loads
    are ``counted``, or what training does besides."""
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    launches = Launches()
    patches = [
        mock.patch.object(place, "maybe_compiled", launches.compiled)
        for place in (dispatch_module, nvshmem_module, ops)
    ]
    # The kernel that adds weight gradients is compiled for a device.
    added = mock.patch.object(grouped, "add_gradients", lambda total, *rest, **_: total.zero_())
    route = Dispatcher.route
    bounded = mock.patch.object(Dispatcher, "route", lambda *given, bounded: route(*given))
    try:
        with ExitStack() as stack:
            for patch in (*patches, added, *([] if counted else [bounded])):
                stack.enter_context(patch)
            layer, x, where = _layer_on_meta(kind, ranks, 96, counted)
            if host_reads:
                object.__setattr__(layer.experts.dispatcher, "allowance", None)
            with launches:
                y = layer(x, where)
            y.backward(torch.empty_like(y))
    finally:
        if ranks > 1:
            dist.destroy_process_group()
    return launches.count, launches.bytes


LAYERS = [("alltoall", 1), ("alltoall", 4), ("all_gather", 4)]


@pytest.mark.parametrize(("kind", "ranks"), LAYERS)
def test_the_host_waits_for_no_count_on_a_device(kind: str, ranks: int) -> None:
    """And launches 40 kernels or less in a forward pass, besides counting loads."""
    launches, _ = _passes_on_meta(kind, ranks, host_reads=False)
    assert 10 < launches <= 40
    launches, _ = _passes_on_meta(kind, ranks, host_reads=False, counted=True)
    assert launches <= 60


@pytest.mark.parametrize("kind", ["alltoall", "all_gather"])
def test_a_count_that_the_host_reads_is_noticed(kind: str) -> None:
    with pytest.raises(RuntimeError, match="meta"):
        _passes_on_meta(kind, 4, host_reads=True)


def test_permutation_reads_and_writes_rows_twice_at_most() -> None:
    """Bytes of the gather before the experts, and of the sum behind them, which writes one row a token."""
    _, written = _passes_on_meta("alltoall", 1, host_reads=False)
    row, tokens = 64 * 2, 96
    gathered = written["index"] - tokens * TOP_K * 4  # without the pairs' weights
    assert gathered == TOP_K * tokens * row
    assert written["_embedding_bag"] - written["_embedding_bag"] % (tokens * row) == tokens * row
