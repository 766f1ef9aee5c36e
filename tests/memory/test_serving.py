"""What is said of generation before it starts, against what is allocated and computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hexad.generation.batch import TokenBatch, TokenSpan
from hexad.generation.cache import BatchCache
from hexad.generation.loading import make_memory
from hexad.generation.weights import StageWeights
from hexad.parallel.inventory import Execution
from hexad.planning.layouts import planned_layout
from hexad.planning.memory import rank_stages
from hexad.planning.resolve import resolve
from hexad.planning.serving import cache_tokens, serving_plans
from hexad.topology.mesh import Axis, Mesh

from ..generation.replicas import CPU, MODELS, Degrees, Room, settings, stage_of
from ..pool import Pool
from ..training.command import call


def allocated(name: str, layout: Degrees, **precision: Any) -> tuple[int, int, int]:
    """The pipeline coordinate of this rank, bytes of its weights, and of its cache per token."""
    config = settings(name, layout, Room(), **precision)
    mesh = Mesh.create(planned_layout(config, layout.world), CPU)
    stage = stage_of(config, mesh)
    memory, blocks, block = make_memory(stage, config, mesh, 128)
    if config.precision.exact:
        StageWeights(stage).pack()
    tensors = (value for part in memory.values() for value in vars(part).values())
    kept = {value.data_ptr(): value.nbytes for value in tensors if isinstance(value, torch.Tensor)}
    cache = sum(kept.values())
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in stage.parameters()}
    return mesh.pipeline.rank, sum(weights.values()), cache // (blocks * block)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", Degrees()),
        ("gpt2", Degrees(pipeline=2)),
        ("mistral", Degrees(tensor=2)),
        ("qwen3", Degrees(tensor=4)),  # two ranks have the same key/value head
        ("phi3", Degrees(tensor=2, pipeline=2)),
    ],
    ids=str,
)
def test_weights_and_cache_are_as_large_as_predicted(name: str, layout: Degrees, pool: Pool) -> None:
    config = settings(name, layout, Room())
    plans = serving_plans(resolve(config, planned_layout(config, layout.world)), None)
    for pipeline, weights, token in pool.run(layout.world, allocated, name, layout):
        assert (weights, token) == (plans[pipeline].parameters, plans[pipeline].token_bytes)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", Degrees()), ("gpt2", Degrees()), ("gpt2", Degrees(pipeline=2)), ("qwen3", Degrees(tensor=4))],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_so_they_are_in_exact_arithmetic(name: str, layout: Degrees, dtype: str, pool: Pool) -> None:
    config = settings(name, layout, Room(), dtype=dtype, exact=True)
    plans = serving_plans(resolve(config, planned_layout(config, layout.world)), None)
    for pipeline, weights, token in pool.run(layout.world, allocated_exactly, name, layout, dtype):
        assert (weights, token) == (plans[pipeline].parameters, plans[pipeline].token_bytes)


def allocated_exactly(name: str, layout: Degrees, dtype: str) -> tuple[int, int, int]:
    """As :func:`allocated`."""
    return allocated(name, layout, dtype=dtype, exact=True)


@pytest.mark.parametrize("name", MODELS)
def test_products_are_counted_as_pytorch_counts_them(name: str) -> None:
    """Of a prompt, and of a token after it; attention, which PyTorch does not count on CPUs, by its
    formula."""
    config = settings(name, Degrees(), Room())
    resolved = resolve(config, planned_layout(config, 1))
    (plan,) = serving_plans(resolved, None)
    model = stage_of(config, Mesh.create(resolved.layout, CPU))
    memory, _, _ = make_memory(model, config, Mesh.create(resolved.layout, CPU), 128)
    (stage,) = rank_stages(resolved, 0).values()
    span = TokenSpan(1, (3,), plan.length - 1, plan.length, ((0, plan.length),))  # type: ignore[arg-type]
    cache = BatchCache(memory, TokenBatch((span,)), Axis("context"), CPU)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.logits(model(cache.tokens, cache=cache))
    attention = stage.cached_flops(plan.length, 1)
    window = config.model.sliding_window or plan.length
    mla, width = config.model.mla, int(config.model.head_dim)
    both = 2 * width if mla is None else width + mla.value_dim  # of a pair's score, and its weighted value
    cached = both if mla is None else 2 * mla.kv_rank + mla.rope_dim
    assert attention == 2 * config.model.heads * cached * min(window, plan.length) * config.model.layers
    assert stage.head is not None
    padding = 2 * config.model.hidden * (stage.head.columns(Execution(1, 1)) - stage.head.vocab)
    counted = attention if mla is None else 0  # of latent vectors they are products
    assert _products(counter) - padding == plan.decode_flops - counted
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, plan.length, dtype=torch.int64))
    pairs = plan.prefill_flops * plan.length - _products(counter)
    seen = [min(window, place) for place in range(1, plan.length + 1)]
    assert pairs == pytest.approx(sum(2 * config.model.heads * both * n for n in seen) * 2, rel=0.2)


def _products(counter: FlopCounterMode) -> int:
    return sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(name))


def test_the_command(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "model": {"preset": "llama3.2-1b"},
        "data": {"train": "x", "sequence": 4096, "tokenizer": "byte"},
        "precision": {"dtype": "bf16"},
        "parallel": {"tensor": 2, "pipeline": 2},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(tree))

    def shown(*options: str) -> dict[str, Any]:
        result = call("show", "memory", str(tmp_path / "run.yaml"), "--serve", "--json", *options)
        assert result.status == 0, result.err
        return json.loads(result.out)

    plans = shown()
    assert plans["cache_tokens"] is None and len(plans["pipeline"]) == 2
    # 8 key/value heads of 64 in two formats of 2 bytes, in 16 layers over two ranks and two stages.
    assert sum(plan["token_bytes"] for plan in plans["pipeline"]) == 2 * 8 * 64 * 2 * 16 / 2
    fitting = shown("--device", "80GB")
    for plan in fitting["pipeline"]:
        room = 80_000_000_000 - plan["parameters"] - plan["step"] - plan["logits"]
        assert plan["tokens"] == int(room * 0.8) // plan["token_bytes"]
    assert fitting["cache_tokens"] == min(plan["tokens"] for plan in fitting["pipeline"])
    assert shown("--device", "1GB")["cache_tokens"] == 0
    text = call("show", "memory", str(tmp_path / "run.yaml"), "--serve", "--device", "h100").out
    assert "tokens of cache fit h100" in text and "stage 1" in text
    text = call("show", "memory", str(tmp_path / "run.yaml"), "--serve", "--device", "1GB").out
    assert "does not fit 1GB" in text
    wrong = call(
        "show",
        "memory",
        str(tmp_path / "run.yaml"),
        "--serve",
        "parallel.schedule=zb_v",
        "parallel.virtual_stages=2",
    )
    assert wrong.error.startswith(
        "parallel.schedule: found zb_v with parallel.virtual_stages 2, but generation"
    )
    assert cache_tokens([]) is None
