"""Dispatchers that only GPUs have, by stand-ins for their libraries: every row against one process."""

import importlib.machinery
import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.comm import symmetric
from hexad.comm.symmetric import Symmetric
from hexad.config import Config, ConfigError
from hexad.config.model import DispatcherName
from hexad.parallel.expert import nvshmem
from hexad.parallel.expert.dispatch import Dispatcher, combine, dispatch
from hexad.parallel.expert.kinds import ANYWHERE, KINDS, check_kind
from hexad.parallel.expert.permutation import sorted_by
from hexad.parallel.pointwise import maybe_compiled
from hexad.planning import check_config
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..device_exchanges import deep_ep, symmetric_operators
from ..pool import Pool, RankError
from ..small import config_of, engine_of, microbatches
from .test_dispatch import (
    EXPERTS,
    HIDDEN,
    ROUTINGS,
    TOKENS,
    TOP_K,
    _chosen,
    _exchanged,
    _expected,
    _inputs,
    _passes_on_meta,
    _through_experts,
)

DEVICE_KINDS = [name for name, kind in KINDS.items() if kind.gpu]


def _on_cpu(kind: str, allowance: float, routing: str, bounded: bool, hosts: int) -> tuple[Any, ...]:
    """(as :func:`_exchanged`; how often the host waited for DeepEP)."""
    symmetric_operators()
    with deep_ep(hosts) as buffer:
        results = _exchanged(kind, allowance, routing, 1, bounded)
        return results, buffer.waits


@pytest.mark.parametrize(("kind", "hosts"), [("nvshmem", 1), ("deepep", 1), ("deepep", 2)])
@pytest.mark.parametrize(("world", "routing"), [(2, "random"), *((4, routing) for routing in ROUTINGS)])
def test_rows_pass_their_experts(world: int, kind: str, hosts: int, routing: str, pool: Pool) -> None:
    """The host waits for DeepEP only between hosts, where it has no buffers of a static size."""
    results = pool.run(world, _on_cpu, kind, 8.0, routing, True, hosts, keep="experts 1")
    for rank, ((*parts, missed), waits) in enumerate(results):
        assert missed == 0
        assert waits == (hosts > 1)
        for result, expected in zip(parts, _expected(rank, routing, 1), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_all_rows_have_a_place_where_none_is_counted(kind: str, pool: Pool) -> None:
    """In evaluation and generation, whatever the allowance."""
    results = pool.run(4, _on_cpu, kind, 1.0, "one expert", False, 1, keep="experts 1")
    for rank, ((*parts, missed), waits) in enumerate(results):
        assert missed == 0
        assert waits == (kind == "deepep")
        for result, expected in zip(parts, _expected(rank, "one expert", 1), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_rows_beyond_a_buffer_are_counted(kind: str, pool: Pool) -> None:
    """As many as the ranks' loads exceed the bound, which a rank's rows have in common; and the other rows'
    sums are finite."""
    world = 4
    loads = [0] * world
    for rank in range(world):
        for expert in _chosen("one expert", rank).flatten().tolist():
            loads[expert * world // EXPERTS] += 1
    excess = sum(max(0, load - TOKENS * TOP_K) for load in loads)
    assert excess > 0
    results = pool.run(world, _on_cpu, kind, 1.0, "one expert", True, 1, keep="experts 1")
    assert sum(missed for (*_, missed), _ in results) == excess
    assert all(torch.isfinite(part).all() for (*parts, _), _ in results for part in parts)


def test_a_full_buffer_has_room_for_the_row_of_an_expert_without_any(pool: Pool) -> None:
    """43 of 44 rows have a place, behind that of another expert, which PyTorch's operator gives one row."""
    results = pool.run(4, _on_cpu, "nvshmem", 1.3, "last expert", True, 1, keep="experts 1")
    assert sum(missed for (*_, missed), _ in results) == 1


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([2, 3]),
    local=st.integers(1, 3),
    tokens=st.integers(0, 6),
    top_k=st.integers(1, 3),
    rows=st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_all_ranks_agree_on_the_rows_that_have_a_place(
    size: int, local: int, tokens: int, top_k: int, rows: int, seed: int
) -> None:
    """Rows are given places one after the other: rank by rank, expert by expert, sender by sender."""
    count, generator = size * local, torch.Generator().manual_seed(seed)
    chosen = torch.randint(count + 1, (size, tokens, top_k), generator=generator)
    ordered = [sorted_by(one.flatten(), count) for one in chosen]
    every = torch.cat([bounds.diff().long() for _, bounds in ordered])
    # Of each sender and expert, the pairs that have a place
    placed: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(size)]
    for receiver in range(size):
        left = rows
        for expert in range(receiver * local, (receiver + 1) * local):
            for sender in range(size):
                pairs = (chosen[sender].flatten() == expert).nonzero()[:, 0].tolist()[:left]
                placed[sender][expert], left = pairs, left - len(pairs)
    for rank in range(size):
        order, bounds = ordered[rank]
        sent, received, offsets = nvshmem._plan(every, size, local, rank, rows)
        assert sent.tolist() == [len(pairs) for pairs in placed[rank]]
        mine = range(rank * local, (rank + 1) * local)
        runs = [len(placed[sender][expert]) for expert in mine for sender in range(size)]
        assert received.tolist() == [runs, [sum(runs[:place]) for place in range(len(runs))]]
        assert offsets.tolist() == [sum(runs[: size * (place + 1)]) for place in range(local)]
        pairs, places, present, missed = nvshmem._places(chosen[rank], order, bounds, order.argsort(), sent)
        flat = [pair for of_expert in placed[rank] for pair in of_expert]
        assert pairs[: len(flat)].tolist() == flat
        assert int(missed) == int((chosen[rank] < count).sum()) - len(flat)
        for pair, (place, there) in enumerate(zip(places.flatten().tolist(), present.flatten().tolist())):
            assert there == (pair in flat)
            assert place == (flat.index(pair) if there else tokens * top_k)


def _interleaved(kind: str, passes: list[tuple[int, int]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(outputs, gradients of the input) of microbatches of some tokens, which all are on the second rank, and
    experts: all forward passes come before the backward ones, as in layers and pipelines."""
    symmetric_operators()
    mesh = Mesh.create(Layout(world=2, expert=2), torch.device("cpu"))
    ranks, results = mesh.expert_ranks(), []
    with deep_ep():
        for number, (count, experts) in enumerate(passes):
            mine = count * mesh.rank
            x, weights, gradient = (part[:mine] for part in _inputs(number))
            x.requires_grad_()
            chosen = _chosen("dropped", number)[:mine]
            chosen = torch.where(chosen < EXPERTS, chosen, experts)
            dispatcher = Dispatcher(kind, experts, ranks, 8.0)  # type: ignore[arg-type]
            route = dispatcher.route(chosen, most=count)
            rows, of_rows = dispatch(x, weights, route)
            results.append((x, gradient, combine(rows * of_rows[:, None], route, x)))
        for _, gradient, total in reversed(results):
            total.backward(gradient)
    return [total.detach() for *_, total in results], [x.grad for x, *_ in results if x.grad is not None]


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_buffers_serve_layers_and_microbatches_of_any_size(kind: str, pool: Pool) -> None:
    """The first rank has no token; later microbatches need more room than the first ones, or more experts."""
    passes = [(3, EXPERTS), (TOKENS, EXPERTS), (5, 2 * EXPERTS), (5, EXPERTS)]
    for rank, (outputs, gradients) in enumerate(pool.run(2, _interleaved, kind, passes)):
        for number, (output, grad, (count, _)) in enumerate(zip(outputs, gradients, passes, strict=True)):
            x, weights, gradient = (part[: count * rank] for part in _inputs(number))
            present = _chosen("dropped", number)[: count * rank] < EXPERTS
            factor = (weights * present).sum(1, keepdim=True)
            torch.testing.assert_close(output, x * factor, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(grad, gradient * factor, rtol=1e-12, atol=1e-12)


def _memory_of_exchanges() -> list[tuple[int, int]]:
    """The memory that each exchange of a rank reads, and that the others write, as addresses."""
    used = []
    symmetric_operators()
    action = symmetric.on_stream

    def noting(operation: str, axis: Any, sent: int, call: Any) -> Any:
        memory = axis.buffers[Symmetric]
        here = memory._sets[-2:][memory._turn]
        used.append((here.sent.data_ptr(), here.arrived.data_ptr()))
        return action(operation, axis, sent, call)

    with mock.patch.object(symmetric, "on_stream", noting):
        _interleaved("nvshmem", [(TOKENS, EXPERTS)] * 2)
    return used


def test_two_sets_of_buffers_take_turns(pool: Pool) -> None:
    """Others may read one while a rank writes to the other."""
    for used in pool.run(2, _memory_of_exchanges):
        assert len(used) == 10  # rows and weights there, results back; gradients of rows there and back
        assert len(set(used)) == 2
        assert all(one != other for one, other in pairwise(used))


def _sent(kind: str) -> int:
    """Bytes sent in a forward and a backward pass."""
    symmetric_operators()
    mesh = Mesh.create(Layout(world=4, expert=4), torch.device("cpu"))
    ranks = mesh.expert_ranks()
    before = ranks.axis.sent.total()
    with deep_ep():
        route = Dispatcher(kind, EXPERTS, ranks, 8.0).route(_chosen("random", mesh.rank))  # type: ignore[arg-type]
        _through_experts(mesh.rank, route, ranks, 1)
    return ranks.axis.sent.total() - before


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_bytes_sent_are_those_of_an_even_load(kind: str, pool: Pool) -> None:
    """Rows and weights there and back, twice, all of float64, and what describes the way."""
    row, world = 8 * HIDDEN, 4
    if kind == "nvshmem":
        away = TOKENS * TOP_K * (world - 1) // world
        expected = (world - 1) * 8 * EXPERTS + away * (4 * row + 2 * 8)
    else:
        away = TOKENS * min(TOP_K, world) * (world - 1) // world
        expected = away * (4 * row + TOP_K * (2 * 8 + 8))
    assert pool.run(world, _sent, kind, keep="experts 1") == [expected] * world


def test_the_host_waits_for_no_count_on_a_device() -> None:
    """And launches 40 kernels or less in a forward pass, besides counting loads."""
    launches, _ = _passes_on_meta("nvshmem", 4, host_reads=False)
    assert 10 < launches <= 40
    launches, _ = _passes_on_meta("nvshmem", 4, host_reads=False, counted=True)
    assert launches <= 60
    with pytest.raises(RuntimeError, match="meta"):
        _passes_on_meta("nvshmem", 4, host_reads=True)


# In training


def _trained(kind: DispatcherName, ranks: int, allowance: float, parallel: dict[str, Any]) -> list[float]:
    """Losses and gradient norms of some steps in float64, with buffers of a static size as on a GPU."""
    symmetric_operators()
    anywhere = replace(KINDS[kind], needs=KINDS["alltoall"].needs, gpu=False, package=None, library=None)
    moe = {"experts": 8, "top_k": 3, "ffn_hidden": 12, "aux_loss": 0.1, "allowance": allowance}
    with (
        deep_ep(),
        mock.patch.dict(KINDS, {kind: anywhere}),
        mock.patch("hexad.model.experts.on_device", lambda *_: True),
    ):
        config = config_of(
            model={"moe": {**moe, "dispatcher": kind}},
            precision={"dtype": "fp64"},
            batch={"micro": 1, "global": 4},
            parallel={"expert": ranks, **parallel},
            memory={"recompute": "full"},
            lr_schedule={"warmup": 1},
        )
        engine, numbers = engine_of(config), []
        for step in range(2):
            data = engine.mesh.data
            result = engine.train_step(microbatches(config, data.rank, data.size, seed=step))
            numbers += [result.loss, result.grad_norm]
    return numbers


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_training_gives_the_losses_of_one_process(kind: DispatcherName, pool: Pool) -> None:
    """Two layers and several microbatches with recompute share the buffers; every number to 1e-9."""
    (expected,) = pool.run(1, _trained, "alltoall", 1, 8.0, {})
    for numbers in pool.run(4, _trained, kind, 4, 8.0, {"tensor": 2, "zero": 1}):
        assert numbers == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_a_step_with_rows_beyond_a_buffer_is_refused(kind: DispatcherName, pool: Pool) -> None:
    with pytest.raises(RankError, match=r"model.moe.allowance: found \d+ rows more than"):
        pool.run(2, _trained, kind, 2, 1.0, {})


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tokens", "rows"), [(2, 11, 33), (4, 11, 10), (4, 7, 1000), (2, 1, 3)])
def test_compiled_functions_of_indexes_give_the_same(size: int, tokens: int, rows: int) -> None:
    local = EXPERTS // size
    generator = torch.Generator().manual_seed(tokens)
    chosen = [torch.randint(EXPERTS + 1, (tokens, TOP_K), generator=generator) for _ in range(size)]
    every = torch.cat([sorted_by(one.flatten(), EXPERTS)[1].diff().long() for one in chosen])
    for rank in range(size):
        plan = nvshmem._plan(every, size, local, rank, rows)
        order, bounds = sorted_by(chosen[rank].flatten(), EXPERTS)
        arrived = plan[1] + torch.stack((torch.zeros(EXPERTS), torch.arange(EXPERTS))).long()
        for function, *arguments in (
            (nvshmem._plan, every, size, local, rank, rows),
            (nvshmem._places, chosen[rank], order, bounds, order.argsort(), plan[0]),
            (nvshmem._gapless, arrived, plan[1], rows, rows + local),
        ):
            expected, found = function(*arguments), maybe_compiled(function, True)(*arguments)  # type: ignore[operator]
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Refusals


def test_every_kind_is_a_choice() -> None:
    assert tuple(KINDS) == get_args(DispatcherName)
    assert ANYWHERE == ("auto", "alltoall", "all_gather")


def _refusal(tree: dict[str, Any], world: int) -> str | None:
    config: Config = config_of(**tree)
    try:
        check_config(config, Layout.from_settings(config.parallel, world))
    except ConfigError as error:
        return str(error)
    return None


FITTING: dict[str, dict[str, Any]] = {
    "model": {"hidden": 256, "moe": {"experts": 32, "top_k": 2, "ffn_hidden": 32}},
    "parallel": {"expert": 2},
    "precision": {"dtype": "bf16"},
    "run": {"device": "auto"},
    "batch": {"global": 64},
}
CASES: list[tuple[tuple[str, ...], dict[str, dict[str, Any]], int, str | None]] = [
    (("nvshmem", "deepep"), {}, 2, None),
    (("nvshmem", "deepep"), {"precision": {"dtype": "auto"}}, 2, None),
    (("nvshmem", "deepep"), {"precision": {"dtype": "fp16"}}, 2, "precision.dtype bf16 or fp8, not fp16"),
    (("nvshmem", "deepep"), {"precision": {"dtype": "fp64"}}, 2, "precision.dtype bf16 or fp8, not fp64"),
    (("nvshmem", "deepep"), {"run": {"device": "cpu"}}, 2, "a CUDA device, not run.device cpu"),
    (("nvshmem", "deepep"), {"parallel": {"expert_tensor": 2}}, 4, "parallel.expert_tensor 1, not 2"),
    (("nvshmem", "deepep"), {"parallel": {"expert": 1}, "run": {"device": "cpu"}}, 1, None),
    (("nvshmem",), {"parallel": {"pipeline": 2}}, 4, "parallel.pipeline 1, not 2"),
    (("deepep",), {"parallel": {"pipeline": 2}}, 4, None),
    (("nvshmem",), {"parallel": {"expert": 32}}, 32, "parallel.expert 16 or less, not 32"),
    (("nvshmem",), {"model": {"moe": {"experts": 64}}}, 2, "16 experts of a rank or fewer, not 32"),
    (("deepep",), {"model": {"hidden": 264}}, 2, "a multiple of 16 up to 8,176, not 264"),
    (("deepep",), {"model": {"hidden": 288}}, 2, None),
    (("deepep",), {"model": {"hidden": 288}, "parallel": {"expert": 16}}, 16, "of 256 up to 7,936, not 288"),
    (("deepep",), {"model": {"hidden": 8192}}, 2, "model.hidden of a multiple of 16 up to 8,176, not 8192"),
    (
        ("deepep",),
        {"model": {"moe": {"experts": 36}}, "parallel": {"expert": 3}, "batch": {"global": 66}},
        3,
        "parallel.expert 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144 or 160, not 3",
    ),
    (("deepep",), {"model": {"moe": {"experts": 64, "top_k": 33}}}, 2, "model.moe.top_k 32 or less, not 33"),
]


def _merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = [key for key, value in changes.items() if isinstance(value, dict) and key in tree]
    return {**tree, **changes, **{key: _merged(tree[key], changes[key]) for key in both}}


@pytest.mark.parametrize(
    ("kind", "changes", "world", "need"),
    [(kind, *case) for kinds, *case in CASES for kind in kinds],
)
def test_settings_that_a_kind_cannot_serve(
    kind: str, changes: dict[str, Any], world: int, need: str | None
) -> None:
    tree = _merged(_merged(FITTING, changes), {"model": {"moe": {"dispatcher": kind}}})
    found = _refusal(tree, world)
    if need is None:
        assert found is None
        return
    assert found is not None and found.startswith(f"model.moe.dispatcher: found {kind}, which needs ")
    assert found.endswith(f"{need}; use auto, alltoall or all_gather")
    for works in ANYWHERE:
        assert _refusal(_merged(tree, {"model": {"moe": {"dispatcher": works}}}), world) is None


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_what_a_machine_lacks(kind: DispatcherName) -> None:
    ending = "on this machine; use auto, alltoall or all_gather"
    with pytest.raises(ConfigError, match=f"found {kind}, which needs a CUDA device {ending}"):
        check_kind(kind, torch.device("cpu"))
    check_kind(kind, torch.device("meta"))
    gpu = torch.device("cuda", 0)
    installed: Any = ModuleType("deep_ep")
    installed.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None, origin="here")
    modules = mock.patch.dict(sys.modules, {"deep_ep": installed})
    nvshmem_built = "torch.distributed._symmetric_memory.is_nvshmem_available"
    with mock.patch(nvshmem_built, lambda: True), modules:
        check_kind(kind, gpu)
    missing = {"nvshmem": "a PyTorch with NVSHMEM", "deepep": "the package deep_ep"}[kind]
    with mock.patch(nvshmem_built, lambda: False), pytest.raises(ConfigError, match=f"{missing} {ending}"):
        check_kind(kind, gpu)
