"""Which rank holds which tokens, what it computes with whose keys, and how blocks are put together."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.dataset.load.microbatch import Microbatch
from hexad.parallel.context.attention import Merged
from hexad.parallel.context.balance import (
    BalancePieces,
    _by_dealing,
    _Change,
    by_work,
    levelled,
    received,
    work_of,
)
from hexad.parallel.context.exchange import heads_for_tokens, tokens_for_heads
from hexad.parallel.context.kernels import (
    CpuFlash,
    CudaFlash,
    Kernel,
    Operands,
    Output,
    Plain,
    Results,
)
from hexad.parallel.context.rounds import Round, Tile, rounds
from hexad.parallel.context.slice import Slice, divide, divides_heads, largest_group
from hexad.topology.mesh import Axis

from ..pool import Pool
from ..small import config_of, engine_of
from .tiles import TILES


def _bounds(generator: random.Random, sequences: int, length: int) -> tuple[int, ...] | None:
    """Documents of any lengths inside the sequences; sometimes none."""
    total = sequences * length
    if generator.random() < 0.3:
        return None
    cuts = (generator.randint(1, total) for _ in range(generator.randint(0, 8)))
    return tuple(sorted({0, *range(0, total + 1, length), *cuts}))


def _numbers(runs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.arange(*run) for run in runs] + [np.empty(0, int)]).astype(int)


def _mask(tile: Tile, rows: int, columns: int) -> np.ndarray:
    row, column = np.arange(rows)[:, None], np.arange(columns)
    seen = (column <= row) | (not tile.causal)
    return seen if tile.low is None else seen & (column >= row + tile.low)


def _seen(slice_: Slice, rank: int, all_rounds: Sequence[Round], whole: np.ndarray) -> None:
    """Count in ``whole [tokens, tokens]`` which query sees which key by a rank's rounds."""
    mine = _numbers(slice_.runs[rank])
    for round_ in all_rounds:
        source = _numbers(slice_.runs[round_.source])
        at_hand = (
            source
            if round_.distance == 0
            else np.concatenate([source[a:b] for a, b in round_.receive] or [source[:0]])
        )
        used = np.zeros(len(at_hand), bool)
        for tile in round_.tiles:
            for (q0, q1), (k0, k1) in zip(pairwise(tile.queries), pairwise(tile.keys)):
                mask = _mask(tile, q1 - q0, k1 - k0)
                assert mask.any(axis=1).all(), "a query that sees no key"
                whole[np.ix_(mine[q0:q1], at_hand[k0:k1])] += mask
                used[k0:k1] |= mask.any(axis=0)
        assert round_.distance == 0 or used.all(), "keys are sent that nothing sees"


@pytest.mark.parametrize("seed", range(40))
def test_rounds_cover_what_each_query_sees_exactly_once(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(10):
        groups, ulysses = generator.randint(1, 4), generator.randint(1, 2)
        sequences, length = generator.randint(1, 3), groups * ulysses * generator.randint(1, 9)
        documents = _bounds(generator, sequences, length)
        window = generator.choice([None, None, 1, 2, 5, 50])
        balance: Any = generator.choice(["none", "zigzag", "work"])
        divided = divide(sequences, length, documents, groups * ulysses, balance, ulysses, window)
        assert {len(_numbers(runs)) for runs in divided.runs} == {divided.share}
        ring, apart = divided.grouped(ulysses), generator.random() < 0.3
        together = [_numbers(runs) for runs in divided.runs]
        for rank, runs in enumerate(ring.runs):
            part = np.concatenate(together[rank * ulysses : (rank + 1) * ulysses])
            assert (part == _numbers(runs)).all(), "a group's tokens, rank after rank, are not in order"
        total = sequences * length
        number, token = np.searchsorted(ring.bounds, np.arange(total), side="right"), np.arange(total)
        wanted = (number[:, None] == number) & (token <= token[:, None])
        if window is not None:
            wanted &= token > token[:, None] - window
        counts = np.zeros((total, total), int)
        every = [rounds(ring, rank, window, apart) for rank in range(groups)]
        for rank, mine in enumerate(every):
            _seen(ring, rank, mine, counts)
            for round_ in mine[1:]:
                other = next(other for other in every[round_.target] if other.source == rank)
                assert round_.send == other.receive, "one rank sends what the other does not expect"
            sent = sum(round_.received for round_ in mine)
            assert apart or window or sent == received(ring.bounds, ring.runs[rank])
        assert (counts == wanted).all()


def test_zigzag_gives_a_block_from_the_front_and_one_from_the_back() -> None:
    assert divide(1, 16, None, 2, "zigzag").runs == (((0, 4), (12, 16)), ((4, 12),))
    # An odd share: blocks of one and two tokens.
    assert divide(1, 9, None, 3, "zigzag").runs == (((0, 1), (7, 9)), ((1, 2), (5, 7)), ((2, 5),))


_LENGTHS = st.lists(st.integers(1, 4096), min_size=1, max_size=60)


@settings(max_examples=60)
@given(lengths=_LENGTHS, ranks=st.sampled_from([2, 3, 4, 7, 8]), window=st.sampled_from([None, 128]))
def test_work_is_even_for_documents_of_any_lengths(
    lengths: list[int], ranks: int, window: int | None
) -> None:
    total = -(-sum(lengths) // ranks) * ranks
    total = max(total, 256 * ranks)  # of fewer tokens, one may be a part of the work that counts
    ends = np.cumsum(lengths).tolist()
    bounds = (0, *ends, total) if ends[-1] < total else (0, *ends)
    divided = divide(1, total, bounds, ranks, "work", window=window)
    assert {len(_numbers(runs)) for runs in divided.runs} == {total // ranks}
    work = [work_of(bounds, runs, window) for runs in divided.runs]
    mean = sum(work) / ranks
    assert 0.95 * mean <= min(work) and max(work) <= 1.05 * mean


def test_short_documents_need_few_keys_of_other_ranks() -> None:
    generator = random.Random(7)
    bounds = [0]
    while bounds[-1] < 32768:
        bounds.append(min(bounds[-1] + generator.randint(20, 300), 32768))
    divided = divide(1, 32768, tuple(bounds), 8, "work")
    for runs in divided.runs:
        assert received(bounds, runs) < 0.02 * 32768  # of an all-gather's 7/8


def test_swaps_leave_documents_to_fewer_ranks() -> None:
    generator = random.Random(3)
    before = after = 0
    for _ in range(10):
        bounds = [0]
        while bounds[-1] < 32768:
            bounds.append(min(bounds[-1] + int(generator.lognormvariate(7.5, 1.2)) + 1, 32768))
        dealt = _by_dealing(bounds, 8, None)
        division = by_work(bounds, 8)
        assert {len(_numbers(tuple(runs))) for runs in division} == {4096}
        before += sum(received(bounds, runs) for runs in dealt)
        after += sum(received(bounds, runs) for runs in division)
    assert after < 0.8 * before


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(2, 6), length=st.integers(1, 6))
def test_swaps_are_counted_as_the_ends_of_last_pieces(seed: int, ranks: int, length: int) -> None:
    generator = np.random.default_rng(seed)
    count = ranks * length
    bounds = np.unique([0, 4 * count, *generator.integers(1, 4 * count, 5)])
    pieces = BalancePieces.of(bounds, np.arange(0, 4 * count + 1, 4), generator.uniform(1, 9, count))
    owner = generator.permutation(np.repeat(np.arange(ranks), length))

    def ends(owner: Any) -> int:
        last: dict[tuple[int, int], int] = {}
        for place in zip(owner.tolist(), pieces.document.tolist(), pieces.end.tolist()):
            last[place[:2]] = place[2]
        return sum(last.values())

    first, second = generator.permutation(count)[:2]
    if owner[first] != owner[second]:
        change = _Change(owner, pieces, ranks)
        changed = owner.copy()
        changed[first], changed[second] = owner[second], owner[first]
        assert change(first, second) + change(second, first) == ends(changed) - ends(owner)
    levels = levelled(owner, pieces, ranks, 0.3, 50)
    if levels is not None:
        loads = np.bincount(levels, pieces.work)
        assert loads.max() <= 1.3 * loads.mean() + 1e-9
        assert (np.bincount(levels) == length).all()


# Blocks put together


def _direct(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> Any:
    """Softmax over all keys at once, in float64; zero where nothing is seen."""
    group = q.shape[1] // k.shape[1]
    keys, values = (tensor.double().repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("qhw,khw->hqk", q.double(), keys) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khw->qhw", weights, values), scores.logsumexp(-1).transpose(0, 1)


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(0.1, 1e4), blocks=st.integers(1, 7))
def test_blocks_merge_to_the_softmax_of_all_keys(seed: int, size: float, blocks: int) -> None:
    """In any order, with queries that see nothing of a block, or of all; logits up to tens of thousands."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns, heads, width = 7, 23, 2, 5
    q, k, v = (
        torch.randn(n, heads, width, generator=generator, dtype=torch.float64)
        for n in (rows, columns, columns)
    )
    q *= size
    seen = torch.rand(rows, columns, generator=generator) < 0.3
    seen[0] = False
    cuts = [
        0,
        *sorted(torch.randperm(columns - 1, generator=generator)[: blocks - 1].add(1).tolist()),
        columns,
    ]
    merged = Merged(q)
    for number in torch.randperm(blocks, generator=generator).tolist():
        part = slice(cuts[number], cuts[number + 1])
        out, lse = _direct(q, k[part], v[part], seen[:, part], 0.7)
        cut = int(torch.randint(0, rows, (1,), generator=generator))
        for some in (slice(0, cut), slice(cut, rows)):
            merged.add((0, rows), Output(some, out[some], lse[some]))
    wanted, lse = _direct(q, k, v, seen, 0.7)
    rounding = 1e-14 * size  # of logits, whose products are added up in another order
    torch.testing.assert_close(merged.out, wanted, rtol=1e-11, atol=max(1e-12, rounding))
    torch.testing.assert_close(merged.lse, lse, rtol=1e-13, atol=max(1e-13, rounding))
    assert merged.out[0].eq(0).all() and merged.lse[0].eq(-torch.inf).all()


def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    q = torch.zeros(2, 1, 1)
    merged = Merged(q)
    merged.add((0, 2), Output(slice(None), q + torch.nan, torch.full((2, 1), torch.nan)))
    assert merged.out.isnan().all()


# Kernels

_DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def _operands(tile: Tile, dtype: torch.dtype, heads: int = 6, kv_heads: int = 2) -> tuple[Operands, Any]:
    generator = torch.Generator().manual_seed(1)
    rows, columns = tile.rows[1] - tile.rows[0], tile.columns[1] - tile.columns[0]
    q, gradient = (torch.randn(rows, heads, 10, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(columns, kv_heads, 10, generator=generator).to(dtype) for _ in range(2))
    return Operands(q, k, v), gradient


def _visible(tile: Tile) -> torch.Tensor:
    seen = np.zeros((tile.rows[1] - tile.rows[0], tile.columns[1] - tile.columns[0]), bool)
    for (q0, q1), (k0, k1) in zip(pairwise(tile.queries), pairwise(tile.keys)):
        rows = slice(q0 - tile.queries[0], q1 - tile.queries[0])
        columns = slice(k0 - tile.keys[0], k1 - tile.keys[0])
        seen[rows, columns] = _mask(tile, q1 - q0, k1 - k0)
    return torch.from_numpy(seen)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("make", [CpuFlash, lambda scale: Plain(scale, None)], ids=["flash", "plain"])
def test_kernels_compute_a_tile(make: Any, name: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    """And their gradients, where these queries have seen other keys too."""
    monkeypatch.setattr("hexad.parallel.context.kernels.SCORES", 300)  # a few rows at a time
    monkeypatch.setattr("hexad.parallel.context.kernels._BAND", 16)
    kernel: Kernel = make(0.3)
    tile, tolerance = TILES[name], _DTYPES[dtype]
    given, gradient = _operands(tile, dtype)
    q, k, v = (tensor.double().requires_grad_() for tensor in given)
    others = Operands(given.q, *(torch.randn(4, 2, 10).to(dtype) for _ in range(2)))
    seen = torch.cat((_visible(tile), torch.ones(len(q), 4, dtype=torch.bool)), 1)
    keys, values = torch.cat((k, others.k.double())), torch.cat((v, others.v.double()))
    out, lse = _direct(q, keys, values, seen, 0.3)
    out.backward(gradient.double())
    merged = Merged(given.q)
    for part in kernel.forward(given, tile):
        merged.add((0, len(q)), part)
    own, own_lse = _direct(q, k, v, _visible(tile), 0.3)
    torch.testing.assert_close(merged.out.double(), own, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(merged.lse.double(), own_lse, rtol=tolerance, atol=tolerance)
    results = Results(out.detach().to(dtype), lse.detach().to(merged.lse.dtype), gradient)
    sums = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in given]
    for piece in kernel.backward(given, results, tile):
        sums[0][piece.rows] += piece.q
        sums[1][piece.columns] += piece.k
        sums[2][piece.columns] += piece.v
    for piece in kernel.backward(others, results, Tile((0, len(q)), (0, 4), False)):
        sums[0][piece.rows] += piece.q
    for total, wanted in zip(sums, (q.grad, k.grad, v.grad)):
        assert wanted is not None
        torch.testing.assert_close(total, wanted, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("name", TILES)
def test_the_kernel_for_gpus_is_called_with_what_it_expects(name: str) -> None:
    """Shapes by its own rules for tensors without values; limits by what its documentation says of them."""
    tile, kernel, meta = TILES[name], CudaFlash(0.3), torch.device("meta")
    given, gradient = _operands(tile, torch.bfloat16)
    given, gradient = Operands(*(tensor.to(meta) for tensor in given)), gradient.to(meta)
    (part,) = kernel.forward(given, tile)
    assert (part.out.shape, part.lse.shape) == (given.q.shape, given.q.shape[:2])
    (gradients,) = kernel.backward(given, Results(part.out, part.lse, gradient), tile)
    assert [tensor.shape for tensor in (gradients.q, gradients.k, gradients.v)] == [
        tensor.shape for tensor in given
    ]
    limits = kernel._options(tile)
    if len(tile.queries) == 2:
        rows, columns = tile.rows[1] - tile.rows[0], tile.columns[1] - tile.columns[0]
        place, key = np.arange(rows)[:, None] + columns - rows, np.arange(columns)  # seen from the end
        left, right = limits.get("window_size_left", -1), limits.get("window_size_right", -1)
        right = 0 if tile.causal else right
        seen = (key >= place - left) | (left < 0)
        seen &= (key <= place + right) | (right < 0)
        assert (seen == _visible(tile).numpy()).all()


# Heads for tokens


def _exchanged(heads: int, kv_heads: int) -> list[Any]:
    """On 4 ranks: what each has inside, and the gradients outside."""
    import torch.distributed as dist

    axis = Axis("context", (0, 1, 2, 3), dist.get_rank(), dist.group.WORLD)
    tokens, width, rank = 3, 2, axis.rank
    whole = [
        torch.arange(4 * tokens * n * width, dtype=torch.float64).view(4 * tokens, n, width) + 1000 * number
        for number, n in enumerate((heads, kv_heads, kv_heads))
    ]
    mine = [tensor[rank * tokens : (rank + 1) * tokens].clone().requires_grad_() for tensor in whole]
    inside = heads_for_tokens(*mine, axis)
    out = tokens_for_heads(inside[0].flatten(1), heads, axis)
    sum((tensor * (rank + 1)).sum() for tensor in inside).backward(retain_graph=True)  # type: ignore[union-attr]
    gradients = [tensor.grad.numpy().copy() for tensor in mine if tensor.grad is not None]
    return [[tensor.detach().numpy() for tensor in inside], out.detach().numpy(), gradients]


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 8), (4, 1), (8, 2)])
def test_heads_are_exchanged_for_tokens_and_back(heads: int, kv_heads: int, pool: Pool) -> None:
    tokens, width = 3, 2
    whole = [
        np.arange(4 * tokens * n * width, dtype=float).reshape(4 * tokens, n, width) + 1000 * number
        for number, n in enumerate((heads, kv_heads, kv_heads))
    ]
    own = [heads // 4, max(1, kv_heads // 4), max(1, kv_heads // 4)]
    for rank, (inside, out, gradients) in enumerate(pool.run(4, _exchanged, heads, kv_heads)):
        for tensor, part, size in zip(whole, inside, own):
            first = rank * size if tensor.shape[1] >= 4 else rank * tensor.shape[1] // 4
            np.testing.assert_array_equal(part, tensor[:, first : first + size])
        mine = slice(rank * tokens, (rank + 1) * tokens)
        np.testing.assert_array_equal(out, whole[0][mine].reshape(tokens, -1))
        for tensor, gradient in zip(whole, gradients):
            ranks = np.array_split(np.arange(1, 5), tensor.shape[1]) if tensor.shape[1] < 4 else None
            count = tensor.shape[1]
            wanted = (
                [sum(part) for part in ranks]
                if ranks is not None
                else [1 + h * 4 // count for h in range(count)]
            )
            np.testing.assert_array_equal(
                gradient, np.broadcast_to(np.array(wanted)[:, None], gradient.shape)
            )


def test_how_many_ranks_can_share_heads() -> None:
    assert [n for n in range(1, 33) if divides_heads(n, 32, 8)] == [1, 2, 4, 8, 16, 32]
    assert [n for n in range(1, 13) if divides_heads(n, 12, 4)] == [1, 2, 4, 12]
    assert largest_group(6, 8, 2) == 2 and largest_group(8, 8, 8) == 8 and largest_group(5, 8, 8) == 1


# In a model


def _calls(method: str, recompute: str) -> tuple[int, int]:
    """How often this rank's kernel computes a tile, forward and backward, in a step of two layers."""
    config = config_of(
        run={"steps": 2},
        data={"sequence": 16},
        batch={"micro": 1, "global": 1},
        parallel={"context": 2, "context_method": method, "context_balance": "none"},
        precision={"dtype": "fp32"},
        memory={"recompute": recompute},
    )
    engine, calls = engine_of(config), [0, 0]
    tokens = torch.arange(16)[None]
    with pytest.MonkeyPatch.context() as patch:
        for number, name in enumerate(("forward", "backward")):
            original = getattr(CpuFlash, name)

            def counted(self: Any, *rest: Any, number: int = number, original: Any = original) -> Any:
                calls[number] += 1
                return original(self, *rest)

            patch.setattr(CpuFlash, name, counted)
        engine.train_step([Microbatch(tokens, tokens)])
    return calls[0], calls[1]


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_attention_is_not_run_twice_where_its_output_is_kept(method: str, pool: Pool) -> None:
    """The second rank has a tile of its own keys and one of the first's in each of two layers."""
    for recompute, times in (("none", 1), ("selective", 1), ("full", 2)):
        assert pool.run(2, _calls, method, recompute) == [(times * 2, 2), (times * 4, 4)]
