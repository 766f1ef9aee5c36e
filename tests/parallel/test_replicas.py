"""Replicas: a weight that differs on one rank is named, and all ranks are clipped by one number."""

from functools import reduce
from typing import Any

import pytest
import torch

from hexad.config import AgreedError
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.engine import Engine
from hexad.optim import optimizer
from hexad.parallel.data import replicas
from hexad.parallel.rectangle import Rectangle

from ..pool import Pool
from ..small import Tree, config_of, engine_of

DEFAULTS: Tree = {
    "model": {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn_hidden": 24, "vocab": 40},
    "data": {"sequence": 8},
    "batch": {"micro": 1, "global": 12},
    "precision": {"dtype": "bf16"},
    "parallel": {"bucket_mb": 0.001},
    "optimizer": {"clip": 1e-3},
}


def step(engine: Engine) -> float:
    generator = torch.Generator().manual_seed(engine.mesh.data.rank)
    count = 12 // engine.mesh.data.size
    tokens = [torch.randint(0, 40, (1, 8), generator=generator) for _ in range(count)]
    return engine.train_step([Microbatch(token, token.roll(-1)) for token in tokens]).grad_norm


def altered(parallel: dict[str, Any], model: dict[str, Any], rank: int, name: str) -> tuple[str, str]:
    """What the comparison reports before and after one bit of a weight changes on one rank."""
    engine = engine_of(config_of(DEFAULTS, parallel=parallel, model=model))
    step(engine)
    # Agreements go by the tree: no collective is over all ranks.
    engine.mesh.world.group = object()  # type: ignore[assignment]
    messages = []
    for bad in (False, True):
        if bad and engine.mesh.rank == rank:
            for bucket in engine.buckets:
                for rectangle, _, values in bucket.weights(*bucket.held):
                    if rectangle.name == name:
                        flat = values.view(-1).view(torch.int16 if values.itemsize == 2 else torch.int32)
                        flat[-1] ^= 1
                        break
        try:
            engine.check_replicas()
            messages.append("")
        except AgreedError as error:
            messages.append(str(error))
    return messages[0], messages[1]


GPT2 = {"family": "gpt2", "kv_heads": 4, "max_positions": 8}


@pytest.mark.parametrize(
    ("parallel", "model", "rank", "name", "other"),
    [
        ({"data": 2}, {}, 1, "layers.1.attention.q.weight", 0),
        ({"data": 3, "zero": 1}, {}, 0, "layers.0.ffn.down.weight", 1),
        ({"data": 2, "zero": 2}, {}, 1, "embedding.weight", 0),
        ({"data": 2, "zero": 3}, {}, 1, "layers.0.attention_norm.weight", 0),
        ({"data": 4, "zero": 3, "replicas": 2}, {}, 3, "layers.1.attention.k.weight", 1),
        ({"tensor": 2}, {}, 1, "layers.0.attention_norm.weight", 0),
        ({"tensor": 2, "data": 2}, {}, 3, "layers.1.attention.q.weight", 1),
        ({"tensor": 4}, {}, 3, "layers.1.attention.k.weight", 2),
        ({"tensor": 2, "data": 2, "zero": 1}, {"kv_heads": 1}, 1, "layers.0.attention.v.weight", 0),
        ({"pipeline": 2, "data": 2}, {**GPT2, "tied_embeddings": True}, 3, "embedding.weight", 0),
    ],
)
def test_a_weight_that_differs_is_named(
    pool: Pool, parallel: dict[str, Any], model: dict[str, Any], rank: int, name: str, other: int
) -> None:
    world = parallel.get("data", 1) * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    messages = pool.run(world, altered, parallel, model, rank, name)
    assert messages == [messages[0]] * world  # alike on all ranks
    before, after = messages[0]
    if parallel.get("data") == 3 or "pipeline" in parallel:  # most replicas have the other value
        expected = f"{name} on rank {rank} differs from that on rank {other}"
    else:
        expected = f"{name} on rank {max(rank, other)} differs from that on rank {min(rank, other)}"
    assert before == "" and after.startswith(f"replicas differ: {expected} (log.check_replicas)")


def _found(ranks: range, names: int) -> replicas.Differences:
    """What ranks have found: weights of which rank 5 holds another value, and one of which all do."""
    found: replicas.Differences = {}
    for rank in ranks:
        own = {Rectangle.whole(f"w{name:03}", (2,)): {int(rank == 5): (1, (rank,))} for name in range(names)}
        own[Rectangle.whole("x", (2,))] = {rank: (1, (rank,))}
        found = replicas._merge(found, own)
    return found


@pytest.mark.parametrize("names", [1, 150])
def test_a_report_does_not_grow_with_the_world(names: int) -> None:
    """Merged in any grouping of neighbouring ranks, to a bounded size."""
    parts = [_found(range(first, first + 7), names) for first in range(0, 140, 7)]
    left, right = reduce(replicas._merge, parts), parts[-1]
    for part in reversed(parts[:-1]):
        right = replicas._merge(part, right)
    assert left == right == _found(range(140), names)
    assert len(left) == min(names + 1, 100) and all(len(values) <= 64 for values in left.values())
    report = replicas._report(left)
    assert "w000 on rank 5 differs from that on rank 0" in report
    if names == 1:
        assert "x on ranks 1, 2, 3, 4, 5, 6, 7, 8 differs from that on rank 0 (log" in report
    else:
        assert ", and at least 97 more (log" in report


def test_one_rank_has_no_replicas() -> None:
    assert altered({}, {}, 0, "embedding.weight") == ("", "")


def clipped_apart() -> tuple[list[float], str]:
    """Two steps whose norms come out different on the second data rank, as sums in another order would."""
    engine = engine_of(config_of(DEFAULTS, parallel={"data": 2, "tensor": 2}))
    reduce = optimizer.all_reduce

    def disturbed(tensor: torch.Tensor, axis: Any, *rest: Any) -> torch.Tensor:
        result = reduce(tensor, axis, *rest)
        return result * (1 + 0.01 * engine.mesh.data.rank) if axis is engine.mesh.pipeline else result

    optimizer.all_reduce = disturbed  # type: ignore[assignment]
    try:
        norms = [step(engine) for _ in range(2)]
    finally:
        optimizer.all_reduce = reduce
    try:
        engine.check_replicas()
    except AgreedError as error:
        return norms, str(error)
    return norms, ""


def test_all_ranks_are_clipped_by_one_number(pool: Pool) -> None:
    norms = pool.run(4, clipped_apart)
    assert norms == [norms[0]] * 4 and norms[0][1] == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_hash_changes_no_value(dtype: torch.dtype) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = values.clone()
    one = replicas._hash(values)
    assert torch.equal(values, before) and torch.equal(one, replicas._hash(values))
    values[4, 6] += 1
    assert not torch.equal(one, replicas._hash(values))
