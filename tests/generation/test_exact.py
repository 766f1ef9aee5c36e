"""Exact arithmetic: log-probabilities of the generator in any layout, with any cache and whatever is computed
beside, are bit for bit those of the training forward pass, in any layout and any division into microbatches.

Every layout of training and every layout of generation is compared with one: so are all pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import gcd
from typing import Any

import pytest
import torch

from hexad.engine.scoring import Scorer
from hexad.generation.requests import Request
from hexad.planning.layouts import planned_layout
from hexad.planning.resolve import resolve
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..pool import Pool
from ..small import config_of
from .replicas import CPU, Degrees, Result, Room, written
from .test_parity import in_order, requests_of

COMMON = {
    "heads": 6,
    "head_dim": 6,
    "hidden": 30,
    "ffn_hidden": 42,
    "layers": 3,
    "vocab": 53,
    "init_std": 0.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "family": "llama", "kv_heads": 6},
    "gpt2": {**COMMON, "family": "gpt2", "max_positions": 128},
    "mistral": {**COMMON, "family": "mistral", "kv_heads": 6, "sliding_window": 5},
    "qwen3": {**COMMON, "family": "qwen3", "kv_heads": 1},
    "granite": {
        **COMMON,
        "family": "granite",
        "kv_heads": 1,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 3.0,
        "logits_scaling": 1.7,
    },
    "experts": {
        **COMMON,
        "family": "llama",
        "kv_heads": 6,
        "moe": {"experts": 6, "top_k": 3, "ffn_hidden": 12, "first_dense": 1, "shared_experts": 1},
    },
    "no gate": {
        **COMMON,
        "family": "gpt2",
        "max_positions": 128,
        "mlp_bias": False,
        "moe": {"experts": 6, "top_k": 2, "ffn_hidden": 12, "score": "topk_softmax"},
    },
    "groups": {
        **COMMON,
        "family": "llama",
        "kv_heads": 6,
        "moe": {
            "experts": 6,
            "top_k": 2,
            "ffn_hidden": 12,
            "score": "sigmoid",
            "groups": 3,
            "top_groups": 2,
            "scale": 1.7,
            "shared_experts": 1,
            "shared_gate": True,
        },
    },
    "deepseek_v3": {
        **{key: value for key, value in COMMON.items() if key != "head_dim"},
        "family": "deepseek_v3",
        "mla": {"q_rank": 12, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5},
    },
    "lora": {**COMMON, "family": "llama", "kv_heads": 6, "lora": {"rank": 2, "alpha": 3}},
}
Parallel = Mapping[str, Any]
TRAINING: list[Parallel] = [
    {},
    {"data": 2},
    {"data": 3, "zero": 3},
    {"tensor": 2},
    {"tensor": 3, "sequence": False},
    {"tensor": 6, "zero": 1},
    {"context": 2},
    {"context": 3, "context_method": "all_gather"},
    {"context": 2, "context_method": "ulysses", "zero": 2},
    {"pipeline": 3},
    {"pipeline": 2, "virtual_stages": 1, "data": 2, "zero": 1},
    {"tensor": 3, "pipeline": 2},
    {"tensor": 2, "context": 2, "data": 2, "zero": 3},
    {"context": 2, "pipeline": 2, "data": 2},
]
GENERATION = [
    Degrees(),
    Degrees(tensor=2),
    Degrees(tensor=3),
    Degrees(tensor=6),
    Degrees(pipeline=2),
    Degrees(pipeline=3),
    Degrees(context=2),
    Degrees(context=3),
    Degrees(tensor=2, pipeline=2),
    Degrees(tensor=3, context=2),
    Degrees(tensor=2, context=2, pipeline=2),
]
ROOMS = [
    Room(),
    Room(batch_tokens=7, block=3),
    Room(tokens=56, block=3, batch_tokens=16),
    Room(block=5, sequences=3),
]
SIZE = 20, 30, 12
"""Requests, the longest prompt, new tokens."""


def asked() -> tuple[list[Request], dict[int, list[int]]]:
    """Requests in the order of their arrival, all of whose log-probabilities are wanted."""
    requests, arrivals = requests_of(5, *SIZE)
    order, numbered = in_order(arrivals)
    scored = []
    for number in order:
        sampling = replace(requests[number - 1].sampling, logprobs=0, prompt_logprobs=0)
        scored.append(replace(requests[number - 1], sampling=sampling))
    return scored, numbered


def generated(
    name: str, layout: Degrees, room: Room, dtype: str, device: torch.device = CPU
) -> dict[int, Result] | None:
    """What the requests bring on the leader of a replica."""
    outcome = written(MODELS[name], layout, room, *asked(), device, dtype=dtype, exact=True)
    return None if outcome is None else outcome[0]


def scored(
    name: str,
    parallel: Parallel,
    dtype: str,
    tokens: int,
    sequences: Sequence[Sequence[int]],
    exact: bool = True,
) -> list[list[float]]:
    """Log-probabilities of sequences by the training forward pass, ``tokens`` or more at a time."""
    layout = layout_of(parallel)
    config = config_of(
        model=MODELS[name],
        parallel=parallel,
        data={"sequence": tokens // 12 * 12 or 12},
        batch={"micro": 1, "global": layout.data},
        precision={"dtype": dtype, "exact": exact},
        run={"seed": 7},
    )
    mesh = Mesh.create(planned_layout(config, layout.world), CPU)
    return Scorer(resolve(config, mesh.layout), mesh).scores(sequences)


def layout_of(parallel: Parallel) -> Layout:
    """The layout of settings, with as few ranks as they need."""
    degrees = {name: parallel.get(name, 1) for name in ("tensor", "context", "pipeline", "data")}
    world = degrees["tensor"] * degrees["context"] * degrees["pipeline"] * degrees["data"]
    return Layout(**degrees, world=world)


@cache
def alone(name: str, dtype: str) -> tuple[list[list[int]], list[list[float]], dict[int, Result]]:
    """Sequences, their log-probabilities, each scored by itself in one process, and what a generator in one
    process brings."""
    results = generated(name, Degrees(), Room(), dtype)
    assert results is not None
    requests, _ = asked()
    sequences = [[*request.prompt, *results[n].tokens] for n, request in enumerate(requests, 1)]
    return sequences, [scored(name, {}, dtype, 12, [ids])[0] for ids in sequences], results


def check_generated(results: Mapping[int, Result], name: str, dtype: str) -> None:
    """Compare with the training forward pass, bit for bit."""
    sequences, scores, first = alone(name, dtype)
    values = 0
    for number, request in enumerate(asked()[0], 1):
        result, expected = results[number], scores[number - 1]
        assert result.tokens == first[number].tokens
        new = len(request.prompt) - 1
        assert [logprob.value for logprob in result.logprobs] == expected[new:]
        assert [logprob.value for logprob in result.scores or ()] == expected[:new]
        values += len(expected)
    assert values > 150 and len(sequences) == SIZE[0]


PAIRS = [
    ("llama", TRAINING[12], Degrees(tensor=3), "fp32"),
    ("gpt2", TRAINING[3], Degrees(context=2), "fp32"),
    ("granite", TRAINING[2], Degrees(), "bf16"),
    ("experts", {"data": 3, "expert": 3, "zero": 3}, Degrees(tensor=2, expert=2), "bf16"),
    ("groups", {"context": 2, "data": 2, "expert": 2}, Degrees(context=3, expert=3), "fp32"),
    ("deepseek_v3", TRAINING[8], Degrees(tensor=2), "fp32"),
]


@pytest.mark.parametrize(("name", "parallel", "layout", "dtype"), PAIRS, ids=str)
def test_training_and_generation_have_the_same_bits(
    name: str, parallel: Parallel, layout: Degrees, dtype: str, pool: Pool
) -> None:
    sequences, scores, _ = alone(name, dtype)
    world = layout_of(parallel).world
    assert pool.run(world, scored, name, parallel, dtype, 48, sequences)[-1] == scores
    room = ROOMS[PAIRS.index((name, parallel, layout, dtype)) % len(ROOMS)]
    check_generated(pool.run(layout.world, generated, name, layout, room, dtype)[0], name, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*product(MODELS, ("fp32", "bf16", "fp16"))], ids=str)
def test_every_pair_of_layouts_has_the_same_bits(name: str, dtype: str, pool: Pool) -> None:
    sequences, scores, _ = alone(name, dtype)
    for number, parallel in enumerate(TRAINING):
        if "moe" in MODELS[name]:
            parallel = {**parallel, "expert": _largest_expert(layout_of(parallel))}
        tokens = (12, 36, 120)[number % 3]
        world = layout_of(parallel).world
        assert pool.run(world, scored, name, parallel, dtype, tokens, sequences)[0] == scores, parallel
    for number, layout in enumerate(GENERATION):
        if "moe" in MODELS[name]:
            layout = replace(layout, expert=gcd(layout.tensor * layout.context, 6))
        room = ROOMS[number % len(ROOMS)]
        results = pool.run(layout.world, generated, name, layout, room, dtype)[0]
        check_generated(results, name, dtype)


def _largest_expert(layout: Layout) -> int:
    """The largest expert degree, of six experts."""
    return gcd(layout.world // layout.pipeline, 6)


def test_usual_arithmetic_differs(pool: Pool) -> None:
    """What the tests above would find: bits that depend on ranks, microbatches or the format's rounding."""
    sequences, exact, _ = alone("llama", "fp32")
    usual = scored("llama", {}, "fp32", 12, sequences, exact=False)
    divided = pool.run(2, scored, "llama", {"tensor": 2}, "fp32", 12, sequences, False)[0]
    assert usual != divided and usual != exact
    for one, other in zip(usual, exact):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
