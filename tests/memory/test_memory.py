"""The memory model against what ranks really hold."""

import subprocess
import sys
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
import torch

from hexad.config.schema import MemorySettings
from hexad.model.attention_kernels import AttentionKernel
from hexad.model.inventory import ModelInventory
from hexad.model.recompute_inventory import NOTHING, Recompute
from hexad.model.transformer import build_stages
from hexad.parallel.data.bucket_plan import HeldParameter
from hexad.parallel.inventory import Execution
from hexad.parallel.sharding import Shard, declared_parameters, initialise
from hexad.planning import resolve
from hexad.planning.memory import rank_parameters, rank_stages
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh

from ..layers import shard_of, whole_model
from ..pool import Pool
from .layouts import LAYOUTS, Groups
from .live import Live
from .measure import Found, compare_dry_runs, measure, measured_config

CPU = torch.device("cpu")
GPT2 = {"family": "gpt2", "kv_heads": 8}
LATENT = {
    "family": "deepseek_v3",
    "kv_heads": 8,
    "mla": {"q_rank": 64, "kv_rank": 48, "nope_dim": 32, "rope_dim": 16, "value_dim": 32},
}


# What a layer keeps


def _layer(recompute: str, sequence: bool, dtype: torch.dtype, **model_settings: Any) -> int:
    """Bytes that one llama layer adds on this rank, its output counted and its input not; ``recompute``: a
    kind, and parts after blanks."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    axis = Mesh.create(Layout(world=world, tensor=world), CPU).tensor
    model = measured_config(model=model_settings).model
    kind, *parts = recompute.split()
    settings = MemorySettings(recompute=kind, recompute_parts=parts)  # type: ignore[arg-type]
    whole = whole_model(model, shard_of(axis, sequence, dtype), Recompute.from_settings(settings))
    initialise(declared_parameters(whole), 1)
    tokens = torch.arange(256).view(2, 128) % 100
    where = whole._geometry(tokens, None, None, None)
    rows = 256 // (world if sequence else 1)
    x = torch.randn(rows, model.hidden).to(dtype).requires_grad_()
    layers = list(whole.layers.values())
    with Live() as live:
        for parameter in whole.parameters():
            live.see(parameter)
        x = layers[0](x, where)
        _settle(world)
        before = live.bytes
        x = layers[1](x, where)
        _settle(world)
    return live.bytes - before


def _settle(world: int) -> None:
    """A collective's thread lets go of its tensor a little later."""
    if world > 1:
        sleep(0.2)


def closed_form(recompute: str, world: int, sequence: bool, byte: int) -> int:
    """Of docs/memory.md."""
    model = measured_config().model
    tokens, wide = 256, max(byte, 4)
    rows = tokens // world if sequence else tokens
    q, k = model.heads * int(model.head_dim) // world, int(model.kv_heads) * int(model.head_dim) // world
    f = int(model.ffn_hidden) // world
    statistics = wide * (2 * rows + tokens * model.heads // world)
    return {
        "none": byte * (4 * rows * model.hidden + 3 * tokens * (q + k + f)) + statistics,
        "selective": byte * (2 * rows * model.hidden + 2 * tokens * (q + k + f)) + statistics,
        "full": byte * rows * model.hidden,
    }[recompute]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "sequence"), [(1, False), (2, True), (2, False)])
def test_a_layer_keeps_what_the_closed_form_says(
    recompute: str, dtype: torch.dtype, world: int, sequence: bool, pool: Pool
) -> None:
    for measured in pool.run(world, _layer, recompute, sequence, dtype):
        assert measured == closed_form(recompute, world, sequence, dtype.itemsize)


def closed_form_of_latent_attention(recompute: str, world: int, sequence: bool, byte: int) -> int:
    """Of docs/memory.md."""
    model = measured_config(model=LATENT).model
    assert model.mla is not None and model.mla.q_rank is not None
    tokens, wide, mla = 256, max(byte, 4), model.mla
    rows, heads = tokens // world if sequence else tokens, model.heads // world
    c, rope, f = model.mla.q_rank + mla.kv_rank, mla.rope_dim, int(model.ffn_hidden) // world
    p, u, v = heads * mla.head_dim, heads * (mla.nope_dim + mla.value_dim), heads * mla.value_dim
    statistics = wide * (4 * rows + tokens * heads)
    none = 4 * tokens * p + tokens * v + rows * (2 * c + rope) + 4 * rows * model.hidden + 3 * tokens * f
    kept = 2 * tokens * p + tokens * (u + v + rope) + rows * (c + rope)
    key = tokens * rope if sequence else 0  # gathered
    selective, norms = kept + 2 * rows * model.hidden + 2 * tokens * f, 2 * rows * model.hidden
    return {
        "none": byte * none + statistics,
        "none mla_up": byte * (none - 3 * tokens * p + key) + statistics,
        "none norms": byte * (none - norms) + statistics,
        "none mla_up norms": byte * (none - 3 * tokens * p + key - norms) + statistics,
        "selective": byte * selective + statistics,
        "selective mla_up": byte * (selective - tokens * (p + u + rope) + key) + statistics,
        "full": byte * rows * model.hidden,
    }[recompute]


_RECOMPUTED = (
    "none",
    "selective",
    "full",
    "none mla_up",
    "selective mla_up",
    "none norms",
    "none mla_up norms",
)


@pytest.mark.parametrize(
    ("recompute", "world", "sequence"),
    [
        pytest.param(what, *ranks, marks=pytest.mark.slow if number != n % 3 else ())
        for n, what in enumerate(_RECOMPUTED)
        for number, ranks in enumerate(((1, False), (2, True), (2, False)))
    ],
)
def test_so_does_one_with_latent_attention(recompute: str, world: int, sequence: bool, pool: Pool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for measured in pool.run(world, _latent_layer, recompute, sequence, dtype):
            assert measured == closed_form_of_latent_attention(recompute, world, sequence, dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_layer_with_experts(dtype: torch.dtype) -> None:
    """``moe_act`` are the activated rows of all tokens' experts, without those of shared ones."""
    experts: Any = {"experts": 8, "top_k": 2, "ffn_hidden": 176, "shared_experts": 1, "forced": True}
    kept = {
        what: _layer(what, False, dtype, moe=experts)
        for what in ("none", "none moe_act", "none norms", "none mla_up", "none moe_act norms")
    }
    activated, normed = (dtype.itemsize * numbers for numbers in (256 * 2 * 176, 2 * 256 * 128))
    assert kept["none"] - kept["none moe_act"] == activated
    assert kept["none"] - kept["none norms"] == normed
    assert kept["none"] - kept["none moe_act norms"] == activated + normed
    assert kept["none mla_up"] == kept["none"]


def _latent_layer(recompute: str, sequence: bool, dtype: torch.dtype) -> int:
    return _layer(recompute, sequence, dtype, **LATENT)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_feed_forward_layer_keeps_the_same_on_every_device(family: str, dtype: torch.dtype) -> None:
    """Other devices take other functions than a CPU where nothing is compiled; ``meta`` stands for them."""
    model, kept = measured_config(model={"family": family, "kv_heads": 8}).model, {}
    for device in (CPU, torch.device("meta")):
        whole = whole_model(model, replace(shard_of(dtype=dtype), device=device))
        branch = next(iter(whole.layers.values())).branches[1]
        where = whole._geometry(torch.zeros(2, 96, dtype=torch.int64, device=device), None, None, None)
        x = torch.empty(192, model.hidden, dtype=dtype, device=device, requires_grad=True)
        with Live() as live:
            live.see(x)
            for parameter in whole.parameters():
                live.see(parameter)
            before = live.bytes
            result = branch(x, where)
        kept[device.type] = live.bytes - before - result.untyped_storage().nbytes()
    values = {"llama": 3, "gpt2": 2}[family]  # the first product's one or two, and the activated one
    assert kept["meta"] == kept["cpu"] == values * 192 * int(model.ffn_hidden) * dtype.itemsize


@pytest.mark.parametrize("kind", ["none", "selective"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_repeated_keys_and_values_are_counted(
    monkeypatch: pytest.MonkeyPatch, kind: Any, family: str
) -> None:
    """As GPUs need them in float32; here by force."""
    settings = {"family": family, "kv_heads": 2}
    plain = _layer(kind, False, torch.float32, **settings)
    dense = AttentionKernel.dense

    def repeated(self: AttentionKernel, q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
        return dense(self, q, k, v, causal)

    monkeypatch.setattr(AttentionKernel, "dense", repeated)
    measured = _layer(kind, False, torch.float32, **settings)
    attention = ModelInventory(measured_config(model=settings).model).attention
    run = Execution(2, 128)
    parts = Recompute(kind).of(0)
    there, here = (attention.kept(replace(run, cpu=cpu), parts) for cpu in (False, True))
    assert measured - plain == there - here > 0
    dropped = replace(attention, dropout=0.1)  # in ordinary operations, with groups on any device
    assert dropped.kept(replace(run, cpu=False), NOTHING) == dropped.kept(run, NOTHING)


# The state


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({}, {"data": 2}),
        ({"tied_embeddings": True}, {"tensor": 2, "data": 3}),
        (GPT2, {"tensor": 2, "sequence": False, "pipeline": 2, "data": 2}),
        ({"kv_heads": 2}, {"tensor": 4}),
        ({"kv_heads": 1, "family": "qwen2"}, {"tensor": 4, "data": 2, "zero": 3}),
        (GPT2, {"pipeline": 2, "schedule": "zb_v", "tensor": 2}),
        ({"family": "qwen3"}, {"pipeline": 3, "data": 4}),
        ({"family": "qwen2", "layers": 7}, {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}),
        (LATENT, {"tensor": 2, "data": 2, "zero": 1}),
    ],
)
def test_the_plan_has_the_parameters_of_the_modules(model: Any, parallel: Any) -> None:
    """:func:`plan_buckets` makes the buckets of both."""
    config = measured_config(model=model, parallel=parallel, batch={"micro": 1, "global": 48})
    world = 1
    for axis in ("tensor", "pipeline", "data"):
        world *= parallel.get(axis, 1)
    layout = Layout.from_settings(config.parallel, world)
    resolved = resolve(config, layout)
    copies = max(1, layout.tensor // int(config.model.kv_heads))
    parts = Axis("kv", tuple(range(layout.tensor // copies))), Axis("kv_copies", tuple(range(copies)))
    axes = {"tensor": Axis("tensor", tuple(range(layout.tensor)), parts=parts)}
    sequence = config.parallel.sequence and layout.tensor > 1
    shard = Shard(axes, sequence, torch.float32, torch.device("meta"))
    plan = resolved.plan
    for rank in range(layout.pipeline):
        stages = build_stages(resolved.config.model, shard, plan.layers, plan.schedule.placement, rank)
        number = {p: n for n, stage in reversed(list(stages.items())) for p in stage.parameters()}
        real = [
            HeldParameter.of(
                number[declared.parameter], declared.declaration, declared.positions, declared.uses
            )
            for declared in declared_parameters(*stages.values())
        ]
        assert rank_parameters(rank_stages(resolved, rank), layout) == real
        assert [product.elements for product in real] == [
            declared.parameter.numel() for declared in declared_parameters(*stages.values())
        ]


# The whole run


def _case(world: int, **groups: dict[str, Any]) -> tuple[int, Groups]:
    return world, groups


BF16, FP8 = {"dtype": "bf16"}, {"dtype": "fp8"}
ALL_IN_FP8 = FP8 | {"fp8_weight_gradients": True}
# Few tokens, so that copies of weights make the peak.
LARGE_WEIGHTS: Groups = {
    "model": {"layers": 2, "hidden": 128, "ffn_hidden": 512, "vocab": 112},
    "data": {"sequence": 16},
    "batch": {"micro": 1, "global": 2},
}
FEW = [
    _case(1, precision=BF16),
    _case(1, model=GPT2, memory={"recompute": "full"}),
    _case(2, parallel={"tensor": 2}, memory={"recompute": "selective"}),
    _case(2, parallel={"pipeline": 2, "schedule": "zb_h1"}),
    _case(2, model={"kv_heads": 1}, parallel={"tensor": 2}),
    _case(2, parallel={"tensor": 2, "tensor_chunks": 3}),
    _case(2, parallel={"data": 2, "zero": 2}, precision=BF16),
    _case(2, parallel={"data": 2, "zero": 3}, precision=BF16),
    _case(1, precision=FP8, **LARGE_WEIGHTS),
    _case(2, precision=FP8, parallel={"data": 2, "zero": 3}, **LARGE_WEIGHTS),
    _case(2, precision=FP8, parallel={"tensor": 2}, **LARGE_WEIGHTS),
    _case(1, precision=ALL_IN_FP8, **LARGE_WEIGHTS),
    _case(2, precision=ALL_IN_FP8, parallel={"pipeline": 2, "schedule": "zb_h1"}, **LARGE_WEIGHTS),
    _case(2, parallel={"context": 2}),
    _case(2, parallel={"tensor": 2}, model=LATENT),
    _case(
        2,
        parallel={"context": 2},
        model={"family": "mistral", "sliding_window": 100, "layers": 2},
        data={"sequence": 4096},
        batch={"micro": 1, "global": 1},
    ),
]


# Narrow feed-forward layers, so that attention and the stream make the peak.
NARROW: Groups = {
    "model": {"layers": 1, "hidden": 256, "ffn_hidden": 256, "vocab": 112},
    "data": {"sequence": 512},
    "batch": {"micro": 8, "global": 8},
}
EXACT = [
    _case(1),
    _case(2, parallel={"tensor": 2}, precision=BF16),
    _case(1, model=LARGE_WEIGHTS["model"], data={"sequence": 1024}, batch={"micro": 1, "global": 2}),
    _case(1, model={"vocab": 112}, data={"sequence": 1024}, memory={"recompute": "full"}),
    _case(2, model={"family": "qwen3"}, parallel={"context": 2}, memory={"recompute": "selective"}),
    _case(2, parallel={"tensor": 2}, **NARROW),
    _case(2, parallel={"tensor": 2, "sequence": False}, **NARROW),
    _case(2, parallel={"tensor": 2}, precision=BF16, **NARROW),
    _case(2, parallel={"context": 2, "context_method": "ulysses"}, **NARROW),
    _case(1, run={"compile": "pointwise"}, model={"vocab": 4000}, precision=BF16),
    _case(1, model={"lora": {"rank": 8, "targets": ["q", "v"]}}, data={"sequence": 512}),
    _case(1, model=NARROW["model"] | {"attention_dropout": 0.1}, data=NARROW["data"]),
    _case(2, parallel={"tensor": 2}, **{**NARROW, "model": NARROW["model"] | LATENT}),
]
"""Layouts that are measured in exact arithmetic."""


def _check(
    world: int, groups: Groups, pool: Pool, bounds: tuple[float, float] = (-0.01, 0.05)
) -> list[Found]:
    """The plan against the ranks, which are returned; the host's memory is a CPU's only one."""
    ranks: list[Found] = pool.run(world, measure, measured_config(**groups), world)
    for rank, measured in enumerate(ranks):
        plan = measured.plan
        assert plan.state + plan.host == pytest.approx(measured.state, rel=0.01), f"state of rank {rank}"
        error = (plan.total + plan.host) / measured.peak - 1
        assert bounds[0] <= error <= bounds[1], f"peak of rank {rank}: {error:.1%}, {plan.action}"
    return ranks


@pytest.mark.parametrize(
    ("world", "groups"),
    # A CPU is slow in bf16; many more such layouts are in the slow sweep.
    [
        pytest.param(*case, marks=pytest.mark.slow) if n in (0, 1, 2, 4, 5, 6, 14, 15) else case
        for n, case in enumerate(FEW)
    ],
    ids=str,
)
def test_the_peak_is_predicted(world: int, groups: Groups, pool: Pool) -> None:
    _check(world, groups, pool)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_rank_with_most_scores_is_predicted(ranks: int, pool: Pool) -> None:
    """Of dropped attention in a ring: the last rank has both blocks of zigzag in one run."""
    config = measured_config(
        model={"attention_dropout": 0.1},
        parallel={"context": ranks},
        data={"sequence": 512},
        batch={"micro": 2, "global": 2},
    )
    measured = pool.run(ranks, measure, config, ranks)
    most = max(of_rank.peak for of_rank in measured)
    assert most == measured[-1].peak
    assert -0.01 <= (measured[-1].plan.total + measured[-1].plan.host) / most - 1 <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_peak_is_predicted_in_many_layouts(layout: str, pool: Pool) -> None:
    """And counted by dry runs."""
    world, groups = LAYOUTS[layout]
    compare_dry_runs(measured_config(**groups), _check(world, groups, pool))


WITH_PARTS = [name for name, (_, groups) in LAYOUTS.items() if groups["memory"]["recompute_parts"]]


@pytest.mark.parametrize(
    "layout",
    # One with latent attention, one with experts.
    [
        name if n in (0, 11) else pytest.param(name, marks=pytest.mark.slow)
        for n, name in enumerate(WITH_PARTS)
    ],
)
def test_the_peak_with_recomputed_parts_is_predicted(layout: str, pool: Pool) -> None:
    _check(*LAYOUTS[layout], pool, (-0.01, 0.03))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [["mla_up"], ["mla_up", "norms"]], ids=str)
@pytest.mark.parametrize("value", [32, 64])
@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {"tensor": 2, "sequence": False})])
def test_so_it_is_where_attention_makes_the_peak(
    world: int, parallel: dict[str, Any], value: int, parts: list[str], pool: Pool
) -> None:
    """Queries, keys and values exist a second time while attention's backward pass runs."""
    mla: dict[str, Any] = LATENT["mla"] | {"value_dim": value, "q_rank": None if value == 64 else 64}  # type: ignore[operator]
    groups = NARROW | {"model": NARROW["model"] | LATENT | {"mla": mla}}
    groups |= {"parallel": parallel, "memory": {"recompute_parts": parts}}
    _check(world, groups, pool, (-0.01, 0.03))


def _check_exactly(world: int, groups: Groups, pool: Pool) -> None:
    """:func:`_check` in exact arithmetic, with its bounds."""
    groups = groups | {"precision": groups.get("precision", {}) | {"exact": True}}
    _check(world, groups, pool, (-0.02, 0.08))


@pytest.mark.parametrize(
    ("world", "groups"),
    [pytest.param(*case, marks=pytest.mark.slow) if n else case for n, case in enumerate(EXACT)],
    ids=str,
)
def test_the_peak_of_exact_arithmetic_is_predicted(world: int, groups: Groups, pool: Pool) -> None:
    _check_exactly(world, groups, pool)


def _exact_is_refused(groups: Groups) -> bool:
    return groups["parallel"].get("expert_tensor", 1) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [name for name, (_, groups) in [*LAYOUTS.items()][::3] if not _exact_is_refused(groups)]
)
def test_so_it_is_in_many_layouts(layout: str, pool: Pool) -> None:
    _check_exactly(*LAYOUTS[layout], pool)


@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_is_so_many_bytes_per_parameter(zero: int, shards: int, pool: Pool) -> None:
    """With bf16 gradients; in stage 3, whose 16-bit copies exist while they are gathered only, with fp32."""
    expected = {0: 16.0, 1: 4 + 12 / shards, 2: 2 + 14 / shards, 3: 16 / shards}[zero]
    config = measured_config(
        model={"hidden": 256, "ffn_hidden": 704, "layers": 2},
        data={"sequence": 16},
        batch={"micro": 1, "global": shards},
        precision={"dtype": "bf16"} | ({} if zero == 3 else {"reduce": "bf16", "accumulate": "bf16"}),
        parallel={"data": shards, "zero": zero},
    )
    model = config.model
    width, vocab = model.hidden // model.heads, 1024  # 1000, padded
    attention = model.hidden * width * (2 * model.heads + 2 * int(model.kv_heads))
    parameters = model.layers * (attention + 3 * model.hidden * int(model.ffn_hidden) + 2 * model.hidden)
    parameters += 2 * vocab * model.hidden + model.hidden
    for measured in pool.run(shards, measure, config, shards):
        assert measured.state / parameters == pytest.approx(expected, rel=0.02)


def test_planning_does_not_import_torch() -> None:
    code = "import sys, hexad.planning.memory; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
