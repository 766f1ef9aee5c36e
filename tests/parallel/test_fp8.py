"""Linear layers that multiply in 8 bits, against the same products in float64.

``torch._scaled_mm`` runs on CPUs too, slowly: what follows needs no GPU, only the refusal is not asked for.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hexad.config import Config, ConfigError
from hexad.engine.language import training_shard
from hexad.launching.launch import check_device
from hexad.parallel.tensor import fp8
from hexad.parallel.tensor.embedding import VocabParallelHead
from hexad.parallel.tensor.embedding_inventory import HeadSpec
from hexad.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from hexad.parallel.tensor.linear_inventory import LinearSpec
from hexad.planning import check_config
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..layers import Sums, load_global, shard_of
from ..pool import Pool
from ..small import Tree, config_of, engine_of, microbatches

CPU = torch.device("cpu")
E4M3, E5M2, BF16 = 2.0**-4, 2.0**-3, 2.0**-8  # relative error of one rounding: half the last place
TOKENS, INPUTS, OUTPUTS = 48, 128, 64


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Values of bf16, in float64."""
    drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.bfloat16().double()


def off(values: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the whole tensor, relative."""
    return float((values.detach().double() - wanted).norm() / wanted.norm())


# Products


def test_every_element_is_within_the_formats_errors() -> None:
    x, weight, gradient = normal(48, 128, seed=1), normal(64, 128, seed=2), normal(48, 64, seed=3)
    forward = fp8.product(x.bfloat16(), weight.bfloat16())
    backward = fp8.input_gradient(gradient.bfloat16(), weight.bfloat16())
    for result, left, right, roundings in (
        (forward, x, weight.t(), 2 * E4M3 + E4M3**2),
        (backward, gradient, weight, E5M2 + E4M3 + E5M2 * E4M3),
    ):
        assert result.dtype == torch.bfloat16
        exact, most = left @ right, left.abs() @ right.abs()
        error = (result.double() - exact).abs()
        assert (error <= roundings * most + BF16 * exact.abs() + 1e-3).all()
        # Errors of a sum's terms have either sign: together they are a few times smaller than each could be.
        assert BF16 < off(result, exact) < roundings / 2


def test_the_bias_is_added_to_the_sum() -> None:
    x, weight, bias = normal(16, 32, seed=1), normal(48, 32, seed=2), 100 * normal(48, seed=3)
    without = fp8.product(x.bfloat16(), weight.bfloat16()).double()
    result = fp8.product(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).double()
    torch.testing.assert_close(result, without + bias, rtol=2 * BF16, atol=0.1)


@pytest.mark.parametrize("power", [-90, -20, -1, 3, 40, 80])
def test_results_scale_with_their_operands(power: int) -> None:
    x, weight = normal(16, 32, seed=1).bfloat16(), normal(48, 32, seed=2).bfloat16()
    gradient = normal(16, 48, seed=3).bfloat16()
    factor = 2.0**power
    assert torch.equal(fp8.product(x * factor, weight), fp8.product(x, weight) * factor)
    assert torch.equal(fp8.product(x, weight * factor), fp8.product(x, weight) * factor)
    assert torch.equal(
        fp8.input_gradient(gradient * factor, weight), fp8.input_gradient(gradient, weight) * factor
    )


def test_a_maximum_of_another_rank_changes_no_rounding() -> None:
    """Of numbers that the format's exponents reach: why shares may be scaled each by its own maximum."""
    x, weight = normal(16, 32, seed=1).bfloat16(), normal(32, 32, seed=2).bfloat16()
    larger = x.clone()
    larger[-1] *= 64
    assert torch.equal(fp8.product(larger, weight)[:-1], fp8.product(x, weight)[:-1])


def test_zeros_and_extreme_values() -> None:
    x, weight = normal(16, 32, seed=1).bfloat16(), normal(48, 32, seed=2).bfloat16()
    zero, largest = torch.zeros_like(x), torch.full_like(x, 2.0**127)
    assert not fp8.product(zero, weight).any()
    assert not fp8.product(x, torch.zeros_like(weight)).any()
    assert not fp8.input_gradient(zero, normal(32, 16, seed=4).bfloat16()).any()
    assert torch.isfinite(fp8.product(largest, weight / 2**10)).all()
    assert torch.isfinite(fp8.product(torch.full_like(x, 2.0**-133), weight)).all()
    one = zero.clone()
    one[3, 4] = 2.0**127
    assert torch.isfinite(fp8.product(one, weight / 2**10)).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """Casts alone would turn infinities into the largest number: a diverged run would go on."""
    x, weight = normal(16, 32, seed=1).bfloat16(), normal(32, 32, seed=2).bfloat16()
    x[3, 4] = bad
    assert torch.isnan(fp8.product(x, weight)[3]).all()
    assert torch.isnan(fp8.product(weight, x)[:, 3]).all()
    assert torch.isnan(fp8.input_gradient(x, weight)[3]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_in_the_format_of_the_sum(dtype: torch.dtype) -> None:
    gradient, x = normal(32, 48, seed=1).bfloat16(), normal(32, 16, seed=2).bfloat16()
    fresh = torch.full((48, 16), torch.nan, dtype=dtype)
    fp8.add_weight_gradient(fresh, gradient, x, True)
    assert BF16 < off(fresh, gradient.double().t() @ x.double()) < (E5M2 + E4M3) / 2
    total = torch.full((48, 16), 3.0, dtype=dtype)
    fp8.add_weight_gradient(total, gradient, x, False)
    assert torch.equal(total, fresh + 3)
    bad = x.clone()
    bad[3, 4] = torch.inf
    fp8.add_weight_gradient(total, gradient, bad, False)
    assert torch.isnan(total[:, 4]).all()


@pytest.mark.parametrize("narrow", [False, True])
def test_under_plain_autograd(narrow: bool) -> None:
    leaves = [normal(*shape, seed=i).bfloat16() for i, shape in enumerate([(16, 32), (48, 32), (48,)])]
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    upstream = normal(16, 48, seed=7).bfloat16()
    y = fp8.linear(x, weight, bias, narrow)
    y.backward(upstream)
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    assert torch.equal(y, fp8.product(x, weight, bias))
    assert torch.equal(x.grad, fp8.input_gradient(upstream, weight))
    wanted = upstream.t() @ x
    if narrow:
        fp8.add_weight_gradient(wanted, upstream, x, True)
    assert torch.equal(weight.grad, wanted)
    assert torch.equal(bias.grad, upstream.sum(0))


# Layers


def _linear(sequence: bool, row: bool) -> LinearSpec:
    return LinearSpec("layer", INPUTS, {"layer": OUTPUTS}, row, sequence, True, 0.1, "layer")


def share(kind: str, sequence: bool, deferred: bool, narrow: bool) -> dict[str, torch.Tensor]:
    """One rank's output and gradients of a layer, all in float64, whole where they are not divided."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    axis = Mesh.create(Layout(world=world, tensor=world), CPU).tensor
    sequence = sequence and world > 1
    shard = shard_of(axis, sequence, torch.bfloat16, fp8=True, fp8_weight_gradients=narrow)
    whole = {"weight": normal(OUTPUTS, INPUTS, seed=2), "bias": normal(OUTPUTS, seed=4)}
    x, upstream = normal(TOKENS, INPUTS, seed=1).bfloat16(), normal(TOKENS, OUTPUTS, seed=3).bfloat16()
    if kind == "column":
        layer: nn.Module = ColumnParallelLinear(_linear(sequence, row=False), shard)
        x = x.chunk(world)[axis.rank] if sequence else x
        upstream = upstream.chunk(world, 1)[axis.rank]
    else:
        layer = RowParallelLinear(_linear(sequence, row=True), shard)
        x = x.chunk(world, 1)[axis.rank]
        upstream = upstream.chunk(world)[axis.rank] if sequence else upstream
    load_global(layer, {f"layer.{name}": values for name, values in whole.items()})
    names = {parameter: name for name, parameter in layer.named_parameters()}
    sums = Sums({p: torch.empty(p.shape, dtype=torch.float32) for p in names})
    x = x.clone().requires_grad_()
    y = layer(x)
    if deferred:
        with sums.defer():
            y.backward(upstream)
    else:
        y.backward(upstream)
    assert x.grad is not None and y.dtype == x.grad.dtype == torch.bfloat16
    return {"y": y.detach().double(), "x": x.grad.double()} | {
        names[parameter]: total.double() for parameter, total in sums.totals.items()
    }


def emulated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What 8 bits and one scale hold of float64 values."""
    scale = 2.0 ** (torch.finfo(dtype).max / values.abs().max()).log2().floor()
    return (values * scale).float().to(dtype).double() / scale


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("world", "sequence"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_layer_is_near_float64(
    kind: str, world: int, sequence: bool, narrow: bool, deferred: bool, pool: Pool
) -> None:
    x, weight, upstream = (
        normal(TOKENS, INPUTS, seed=1),
        normal(OUTPUTS, INPUTS, seed=2),
        normal(TOKENS, OUTPUTS, seed=3),
    )
    parts = pool.run(world, share, kind, sequence, deferred, narrow)
    column = kind == "column"

    def joined(name: str, dim: int | None) -> torch.Tensor:
        tensors = [part[name] for part in parts]
        return tensors[0] if dim is None else torch.cat(tensors, dim)

    tokens = 0 if sequence else None  # where activations between the layers are divided over tokens
    y = joined("y", 1 if column else tokens)
    grad_x = joined("x", tokens if column else 1)
    grad_weight = joined("weight", 0 if column else 1)
    bias = (
        sum(part["bias"] for part in parts)
        if sequence and not column
        else joined("bias", 0 if column else None)
    )
    # Two roundings of e4m3, or one of e5m2 and one of e4m3, halved as their signs differ.
    assert BF16 < off(y, x @ weight.t() + normal(OUTPUTS, seed=4)) < E4M3
    assert BF16 < off(grad_x, upstream @ weight) < (E5M2 + E4M3) / 2
    if narrow:  # sums of 8-bit products are exact but for float32's rounding
        exact = emulated(upstream, torch.float8_e5m2).t() @ emulated(x, torch.float8_e4m3fn)
        assert off(grad_weight, exact) < 1e-6
        assert BF16 < off(grad_weight, upstream.t() @ x) < (E5M2 + E4M3) / 2
    else:
        assert off(grad_weight, upstream.t() @ x) < BF16
    # These are not multiplied.
    assert off(bias, upstream.sum(0)) < BF16


def test_the_head_is_not_multiplied_in_eight_bits() -> None:
    head = VocabParallelHead(HeadSpec(64, 32, False, 0.1), shard_of(dtype=torch.bfloat16, fp8=True))
    weight, x = normal(64, 32, seed=1), normal(16, 32, seed=2)
    head.weight.data.copy_(weight)
    assert off(head(x.bfloat16()), x @ weight.t()) < BF16


# Engines

# As small as two tensor ranks allow: CPUs emulate 8-bit products, much slower than those of 32 bits.
DEFAULTS: Tree = {
    "model": {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn_hidden": 32,
        "vocab": 101,
        "init_std": 0.1,
    },
    "data": {"sequence": 8},
    "batch": {"micro": 2, "global": 8},
    "parallel": {"bucket_mb": 0.02},
    "precision": {"dtype": "fp8"},
    "optimizer": {"lr": 0.001},
    "lr_schedule": {"kind": "constant", "warmup": 0},
}
_IN_BF16 = {"dtype": "bf16"}


def losses_of(config: Config, steps: int = 4) -> list[float]:
    engine = engine_of(config)
    batch = microbatches(config, engine.mesh.data.rank, engine.mesh.data.size, seed=3)
    return [engine.train_step(batch).loss for _ in range(steps)]


def test_training_stays_near_bf16(pool: Pool) -> None:
    """On a batch seen eight times the loss falls to less than half, and differences add up."""
    optimizer = {"lr": 0.006}
    (narrow,) = pool.run(1, losses_of, config_of(DEFAULTS, optimizer=optimizer), 8)
    (wide,) = pool.run(1, losses_of, config_of(DEFAULTS, precision=_IN_BF16, optimizer=optimizer), 8)
    assert narrow[-1] < narrow[0] / 2
    assert narrow == pytest.approx(wide, rel=0.05)
    assert narrow[:3] == pytest.approx(wide[:3], rel=0.01)
    assert narrow[0] != wide[0]


NARROW = {"fp8_weight_gradients": True}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> list[list[float]]:
    """The losses of one process, without and with weight gradients in 8 bits."""
    return [pool.run(1, losses_of, config_of(DEFAULTS, precision=how))[0] for how in ({}, NARROW)]


def test_weight_gradients_in_eight_bits_stay_near_the_others(alone: list[list[float]]) -> None:
    without, narrow = alone
    assert narrow == pytest.approx(without, rel=0.01)
    assert narrow[0] == without[0] and narrow[1] != without[1]


@pytest.mark.parametrize(
    ("groups", "tolerance"),
    [
        ({"memory": {"recompute": "selective"}}, 0.0),
        ({"memory": {"recompute": "full"}}, 0.0),
        ({"parallel": {"data": 2}}, 2 * BF16),
        ({"parallel": {"data": 2, "zero": 2}, "precision": {"reduce": "bf16"}}, 2 * BF16),
        ({"parallel": {"data": 2, "zero": 3}}, 2 * BF16),
        ({"parallel": {"pipeline": 2, "schedule": "zb_h1"}}, 2 * BF16),
        ({"parallel": {"tensor": 2}}, 2 * BF16),
        ({"parallel": {"tensor": 2, "pipeline": 2, "schedule": "zb_h1"}}, 2 * BF16),
        ({"parallel": {"tensor": 2, "sequence": False}, "memory": {"recompute": "full"}}, 2 * BF16),
    ],
)
@pytest.mark.parametrize("narrow", [False, True])
def test_layouts_stay_near_one_process(
    groups: dict[str, Any], tolerance: float, narrow: bool, pool: Pool, alone: list[list[float]]
) -> None:
    parallel = groups.get("parallel", {})
    world = parallel.get("data", 1) * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    if narrow:
        groups = groups | {"precision": groups.get("precision", {}) | NARROW}
    losses = pool.run(world, losses_of, config_of(DEFAULTS, **groups))[0]
    assert losses == pytest.approx(alone[narrow], rel=tolerance, abs=0)


def _rounded(config: Config, keep: bool) -> tuple[list[float], Counter[str]]:
    """The losses of four steps on this rank, and how often it rounded and transposed a weight; without
    ``keep`` for every product."""
    weights: Counter[str] = Counter()

    def again(weight: torch.Tensor, name: str, compute: Any) -> Any:
        weights[name] += 1
        return compute()

    def once(weight: torch.Tensor, name: str, compute: Any) -> Any:
        return kept(weight, name, lambda: again(weight, name, compute))

    kept = fp8.derived
    fp8.derived = once if keep else again  # type: ignore[assignment]
    try:
        losses = losses_of(config)
    finally:
        fp8.derived = kept
    return losses, weights


@pytest.mark.parametrize(
    ("groups", "rounded", "transposed"),
    [
        ({}, 1, 1),
        ({"memory": {"recompute": "full"}}, 1, 1),
        ({"parallel": {"data": 2, "zero": 2}}, 1, 1),
        ({"parallel": {"data": 2, "zero": 3}}, 4, 2),  # forward and backward of two microbatches
        ({"parallel": {"pipeline": 2, "schedule": "zb_h1"}, "memory": {"offload": "optimizer"}}, 1, 1),
    ],
)
def test_a_weight_is_rounded_and_transposed_once_per_step(
    groups: dict[str, Any], rounded: int, transposed: int, pool: Pool
) -> None:
    """And again after it has changed: the losses are those of rounding it for every product."""
    config = config_of(DEFAULTS, **groups)
    world = config.parallel.pipeline * (2 if "data" in groups.get("parallel", {}) else 1)
    matrices = 4 * config.model.layers // config.parallel.pipeline
    for (losses, times), (wanted, _) in zip(
        pool.run(world, _rounded, config, True), pool.run(world, _rounded, config, False)
    ):
        assert losses == wanted
        assert times == {"e4m3": 4 * matrices * rounded, "e4m3 transposed": 4 * matrices * transposed}


def test_gpt2_with_its_biases(pool: Pool) -> None:
    model = {"family": "gpt2", "kv_heads": 4, "max_positions": 8}
    (narrow,) = pool.run(1, losses_of, config_of(DEFAULTS, model=model))
    (wide,) = pool.run(1, losses_of, config_of(DEFAULTS, precision=_IN_BF16, model=model))
    assert narrow == pytest.approx(wide, rel=0.03) and narrow != wide


def test_only_fp8_runs_place_layers_so() -> None:
    for dtype in ("fp64", "fp32", "bf16", "fp16", "fp8"):
        mesh = Mesh.create(Layout(world=1), CPU)
        assert training_shard(config_of(DEFAULTS, precision={"dtype": dtype}), mesh).fp8 == (dtype == "fp8")


# Refusals


@pytest.mark.parametrize(
    ("groups", "tensor", "text"),
    [
        (
            {"model": {"hidden": 72}},
            1,
            "model.hidden: found 72, but precision.dtype fp8 multiplies multiples of 16",
        ),
        ({"model": {"head_dim": 10}}, 1, "model.head_dim: found 10 (model.heads 4 x it = 40)"),
        (
            {"model": {"head_dim": 4}},
            2,
            "model.head_dim: found 4 (model.heads 4 x it / parallel.tensor 2 = 8), but precision.dtype fp8 "
            "multiplies multiples of 16; change it, or parallel.tensor, or use bf16",
        ),
        (
            {"model": {"head_dim": 4, "kv_heads": 1}},
            1,
            "model.kv_heads: found 1 (2 x it x model.head_dim 4 = 8)",
        ),
        (
            {"model": {"heads": 8, "head_dim": 4, "kv_heads": 1}},
            2,
            "model.head_dim: found 4 (2 x it = 8), but precision.dtype fp8 multiplies multiples of 16; "
            "change it, or use bf16",
        ),
        ({"model": {"ffn_hidden": 48}}, 2, "model.ffn_hidden: found 48 (it / parallel.tensor 2 = 24)"),
        ({"data": {"sequence": 12}}, 1, "batch.micro: found 2 (it x data.sequence 12 = 24)"),
    ],
)
def test_sizes_that_the_units_do_not_take(groups: dict[str, Any], tensor: int, text: str) -> None:
    parallel = {"parallel": {"tensor": tensor, "sequence": False}}
    layout = Layout(world=tensor, tensor=tensor)
    with pytest.raises(ConfigError) as error:
        check_config(config_of(DEFAULTS, **groups, **parallel), layout)
    assert text in str(error.value)
    check_config(config_of(DEFAULTS, precision=_IN_BF16, **groups, **parallel), layout)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        check_device(config_of(DEFAULTS), CPU)
    wanted = "precision.dtype: found fp8, but this device (cpu) has no fp8 matrix units; use bf16"
    assert str(error.value) == wanted
    check_device(config_of(DEFAULTS, precision=_IN_BF16), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    for capability, good in (
        ((8, 0), False),
        ((8, 6), False),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 0), True),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, reported=capability: reported)
        if good:
            check_device(config_of(DEFAULTS), torch.device("cuda", 0))
            continue
        with pytest.raises(ConfigError, match=r"this device \(NVIDIA A100-SXM4-80GB\) has no fp8"):
            check_device(config_of(DEFAULTS), torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="has no fp8 matrix units"):
        check_device(config_of(DEFAULTS), torch.device("cuda", 0))
