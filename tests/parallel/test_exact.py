"""Exact arithmetic: the order of sums and what is computed beside a row change no bit, and results are as
accurate as the usual ones."""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hexad.config import ConfigError
from hexad.model import exact_attention, exact_ops, ops
from hexad.model.exact_attention import TokenRange, attend_run, on_grid
from hexad.model.positions import Rotary, _powers
from hexad.parallel import exact, exact_inventory
from hexad.parallel.exact_inventory import Blocks
from hexad.parallel.tensor.loss import token_losses_
from hexad.topology.mesh import Axis

from ..pool import Pool
from ..small import config_of, engine_of

FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values of which a few are far larger than others, as in a transformer."""
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers, which all processors draw alike.
    x = torch.randint(-(2**23), 2**23, shape, generator=generator).float() / 2**22
    large = torch.randint(100, shape, generator=generator) == 0
    return torch.where(large, x * 100, x).to(dtype)


def whole(x: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in x.double().flatten().tolist()]


@pytest.mark.parametrize("terms", [1, 2, 3, 576, 1000, 4097])
def test_partial_sums_are_not_rounded(terms: int) -> None:
    """Any order gives the sum of the rounded terms as rational arithmetic does."""
    x = values(1, terms).double()
    unit = exact.top(x) * 2.0 ** (exact.digits_of(terms) + 2 - exact.DIGITS)
    rounded = exact.rounded(x, unit)
    expected = sum(whole(rounded), Fraction(0))
    assert Fraction(float(exact.row_sum(x, unit))) == expected
    assert Fraction(sum(reversed(rounded.flatten().tolist()))) == expected
    assert ((rounded - x).abs() <= unit / 2).all()
    assert abs(expected - sum(whole(x), Fraction(0))) <= Fraction(float(unit)) * terms / 2


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("features", [1, 7, 64, 577, 3000])
def test_products_are_those_of_whole_numbers(dtype: torch.dtype, features: int) -> None:
    """The parts' products are the same in rational arithmetic, and so do not depend on any order."""
    x, weight = values(3, features, dtype=dtype), values(2, features, dtype=dtype, seed=1)
    digits = exact.Digits.of(dtype, features)
    pieces = exact.split(x.float(), exact.top(x) * 2.0 ** (1 - digits.part), 2.0**-digits.part, digits.parts)
    grid = exact.weight_on_grid(weight, dtype)
    for row in range(3):
        for column in range(2):
            sums = [
                sum((a * b for a, b in zip(whole(piece[row]), whole(grid[column]))), Fraction(0))
                for piece in pieces
            ]
            assert [Fraction(float(piece[row].double() @ grid[column])) for piece in pieces] == sums
            total = float(sums[0]) + (float(sums[1]) if digits.parts == 2 else 0.0)
            assert torch.tensor(total).to(dtype) == exact.product(x, weight)[row, column]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_products_are_at_least_as_accurate_as_usual(dtype: torch.dtype) -> None:
    x, weight = values(65, 577, dtype=dtype), values(130, 577, dtype=dtype, seed=1) * 0.02
    bias = values(130, dtype=dtype, seed=2)
    true = x.double() @ weight.double().t() + bias.double()
    usual = torch.nn.functional.linear(x, weight, bias).double()
    error = (exact.product(x, weight, bias).double() - true).pow(2).mean()
    assert error <= 1.01 * (usual - true).pow(2).mean()


def divided(dtype: torch.dtype, axis: Axis) -> Tensor:
    """A product of which this rank has some columns."""
    x, weight = values(9, 12 * 7, dtype=dtype), values(5, 12 * 7, dtype=dtype, seed=1)
    x, weight = (part.chunk(axis.size, 1)[axis.rank].contiguous() for part in (x, weight))
    from hexad.comm import all_reduce

    return exact.product(x, weight, axis=axis, total=lambda part: all_reduce(part, axis))


def divided_on(dtype: torch.dtype, ranks: int) -> Tensor:
    from hexad.topology.layout import Layout
    from hexad.topology.mesh import Mesh

    return divided(dtype, Mesh.create(Layout(tensor=ranks, world=ranks), torch.device("cpu")).tensor)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_columns_on_several_ranks(dtype: torch.dtype, ranks: int, pool: Pool) -> None:
    expected = exact.product(values(9, 84, dtype=dtype), values(5, 84, dtype=dtype, seed=1))
    for made in pool.run(ranks, divided_on, dtype, ranks):
        assert torch.equal(made, expected)


def _norm(x: Tensor) -> Tensor:
    return exact_ops.rms_norm(x, values(x.shape[1], dtype=x.dtype, seed=3), 1e-6)


def _layer(x: Tensor) -> Tensor:
    weight, bias = (values(x.shape[1], dtype=x.dtype, seed=seed) for seed in (3, 4))
    return exact_ops.layer_norm(x, weight, bias, 1e-5)


def _product(x: Tensor) -> Tensor:
    return exact.product(x, values(37, x.shape[1], dtype=x.dtype, seed=1))


def _ready(x: Tensor) -> Tensor:
    return exact.product(x, exact.weight_on_grid(values(37, x.shape[1], dtype=x.dtype, seed=1), x.dtype))


def _losses(x: Tensor) -> Tensor:
    labels = torch.full((len(x),), 3)
    return token_losses_(x.float().clone(), labels, x.shape[1] - 1, Axis("tensor"), None, True)[:, None]


def _softmax(x: Tensor) -> Tensor:
    return exact.log_softmax(x.float())


def _rotary(x: Tensor) -> Tensor:
    rotary = Rotary(config_of(model={"head_dim": 34}).model, torch.device("cpu"), exactly=True)
    positions = x[:, 0].abs().mul(100).long()  # what a row's factors are of
    return torch.cat(rotary.factors(positions, lambda: positions, x.dtype), dim=2).flatten(1)


def _rotate(x: Tensor) -> Tensor:
    heads, angles = x[:, :44].reshape(-1, 2, 22), x[:, None, 35:].float()
    return exact_ops.rotate(heads, angles, 1 - angles)


def _keys(x: Tensor) -> Tensor:
    heads = x.view(-1, 2, 23)
    keys, kept, tops = on_grid(heads, heads * 3)
    return torch.cat((keys.flatten(1).float(), kept.flatten(1).float(), tops), dim=1)


ROW_WISE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: exact.exp(x.float()),
    "log": lambda x: exact.log(x.double().abs() + 1e-3),
    "mean": lambda x: exact.mean(x.double()),
    "rms": _norm,
    "layer": _layer,
    "swiglu": exact_ops.swiglu,
    "gelu": exact_ops.gelu,
    "product": _product,
    "ready": _ready,
    "losses": _losses,
    "log softmax": _softmax,
    "rotary": _rotary,
    "rotate": _rotate,
    "keys": _keys,
}


@pytest.mark.parametrize("name", ROW_WISE)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_row_does_not_depend_on_those_beside_it(name: str, dtype: torch.dtype) -> None:
    """Nor on where it stands: PyTorch's kernels treat what does not fill a register in another way."""
    function, x = ROW_WISE[name], values(301, 46, dtype=dtype)
    made = function(x)
    assert made.isfinite().all()
    for rows in (slice(0, 1), slice(7, 12), slice(100, 301), slice(0, 301, 3)):
        assert torch.equal(function(x[rows].contiguous()), made[rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(function(x), made)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ROW_WISE)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_blocks_of_any_size_give_the_same(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, x = ROW_WISE[name], values(301, 46, dtype=dtype)
    made = function(x)
    small = Blocks(7 * 46, 13, 5, 5 * 46, 99)
    for module in (exact, exact_inventory, exact_attention):
        monkeypatch.setattr(module, "blocks", lambda cpu: small)
    assert torch.equal(function(x), made)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_attention_does_not_depend_on_its_division(dtype: torch.dtype, window: int | None) -> None:
    q, k, v = (values(67, heads, 18, dtype=dtype, seed=heads) for heads in (4, 2, 1))
    kept = on_grid(k, v.expand(-1, 2, -1).contiguous())
    made = attend_run(q, kept, TokenRange(0, 0, window), 0.3)
    for begin, end in ((0, 1), (3, 20), (20, 67), (66, 67)):
        origin = 0 if window is None else max(0, begin + 1 - window)
        run = TokenRange(begin, origin, window)
        part = attend_run(q[begin:end], kept.part(slice(origin, end)), run, 0.3)
        assert torch.equal(part, made[begin:end])
    for head in range(4):
        one = kept.part(slice(None), slice(head // 2, head // 2 + 1))
        assert torch.equal(attend_run(q[:, [head]], one, TokenRange(0, 0, window), 0.3), made[:, [head]])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_attention_is_as_accurate_as_usual(dtype: torch.dtype) -> None:
    q, k, v = (values(90, 2, 24, dtype=dtype, seed=seed).clamp(-8, 8) for seed in range(3))
    v[5], v[7] = 0, v[7] * 2**-20
    made = attend_run(q, on_grid(k, v), TokenRange(0), 0.2)
    batch = [x.transpose(0, 1)[None] for x in (q, k, v)]

    def usual(*parts: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=0.2)
        return out[0].transpose(0, 1)

    true = usual(*(x.double() for x in batch))
    errors = [(x.double() - true).pow(2).mean().sqrt() for x in (made, usual(*batch))]
    assert errors[0] <= 2 * errors[1]


def test_functions_are_accurate() -> None:
    x = torch.linspace(-87, 88, 100_003)
    assert ((exact.exp(x).double() / x.double().exp() - 1).abs() < 2.0**-22).all()
    low = exact.exp(torch.tensor([-math.inf, -87.0]))
    assert low[0] == low[1] < 2e-38 and exact.exp(torch.tensor([0.0])) == 1
    assert exact.exp(torch.tensor([math.nan])).isnan().all()
    y = torch.linspace(1e-3, 1e6, 100_003, dtype=torch.float64)
    assert ((exact.log(y) - y.log()).abs() < 1e-14).all()
    assert exact.power(torch.tensor([0.0, 1.0, -3.9, 2.0**-40], dtype=torch.float64)).tolist() == [
        0.0,
        1.0,
        2.0,
        2.0**-40,
    ]
    for one, other, shape in (
        (exact_ops.swiglu, ops.swiglu, (5, 46)),
        (exact_ops.gelu, ops.gelu, (5, 46)),
    ):
        x = values(*shape)
        assert torch.allclose(one(x), other(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    x, weight = values(3, 40, dtype=dtype), values(5, 40, dtype=dtype, seed=1)
    x[1, 7] = torch.nan
    x[2, 3] = torch.inf
    made = exact.product(x, weight)
    assert made[0].isfinite().all() and made[1:].isnan().all()
    assert not exact.product(values(2, 40, dtype=dtype) * 0, weight).any()
    assert exact.product(x[:0], weight).shape == (0, 5)


def test_gradients_are_the_usual_ones() -> None:
    x = values(6, 46).requires_grad_()
    weight = values(46, seed=3).requires_grad_()
    gradient = values(6, 46, seed=4)
    made = torch.autograd.grad(exact_ops.rms_norm(x, weight, 1e-6), (x, weight), gradient)
    usual = torch.autograd.grad(ops.rms_norm(x, weight, 1e-6), (x, weight), gradient)
    assert all(torch.equal(one, other) for one, other in zip(made, usual))


def digest() -> str:
    """Of what all functions make of some values."""
    made = hashlib.sha256()
    for dtype in FORMATS:
        results = [function(values(301, 46, dtype=dtype)) for function in ROW_WISE.values()]
        q, k, v = (values(67, heads, 18, dtype=dtype, seed=heads) for heads in (4, 2, 2))
        results.append(attend_run(q, on_grid(k, v), TokenRange(0), 0.3))
        for result in results:
            made.update(result.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this processor has no other instructions"
)
def test_other_instructions_give_the_same_bits() -> None:
    """Those of an older processor, of PyTorch's functions and of the library that multiplies."""
    code = f"from {__name__} import digest; print(digest())"
    older = {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    }
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, **older})
    assert result.stdout.strip() == digest(), result.stderr


def test_sines_and_cosines_are_those_of_numbers_of_200_digits() -> None:
    """To 1.5 units in the last place, and as float32 the nearest; also close to multiples of pi / 2."""
    mpmath = pytest.importorskip("mpmath")
    generator = torch.Generator().manual_seed(0)
    angles = [
        torch.randn(200, generator=generator, dtype=torch.float64) * 10.0**power for power in range(-6, 8)
    ]
    x = torch.cat([*angles, torch.arange(-40, 40, dtype=torch.float64) * (math.pi / 4), torch.zeros(1)])
    with mpmath.workprec(200):
        for values, function in zip(exact.cos_sin(x), (mpmath.cos, mpmath.sin)):
            for angle, value in zip(x.tolist(), values.tolist()):
                true = function(mpmath.mpf(angle))
                assert abs(value - true) <= 1.5 * math.ulp(float(true))
            nearest = torch.tensor([float(function(mpmath.mpf(angle))) for angle in x.tolist()])
            assert torch.equal(values.float(), nearest)
    assert all(torch.equal(exact.cos_sin(x[n : n + 3])[0], exact.cos_sin(x)[0][n : n + 3]) for n in range(50))


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6, 10.5])
def test_periods_are_correctly_rounded(theta: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    places = torch.arange(0, 128, 2).float() / 128
    with mpmath.workprec(200):
        true = [float(mpmath.power(theta, place)) for place in places.tolist()]
    assert torch.equal(_powers(theta, places), torch.tensor(true, dtype=torch.float64).float())


def test_arithmetic_that_is_not_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    exact.check_arithmetic(device)
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(ConfigError, match=r"precision\.exact: found that float32 numbers near 0 are"):
            engine_of(config_of(precision={"dtype": "fp32", "exact": True}))
    finally:
        torch.set_flush_denormal(False)
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y: multiply(x.float(), y.float()).to(x.dtype))
    with pytest.raises(ConfigError, match=r"precision\.exact: found that products of float64 on this device"):
        exact.check_arithmetic(device)
