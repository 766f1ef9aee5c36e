"""The kinds of arithmetic: which one settings choose, and that all compute the same products."""

from itertools import product
from typing import Any

import pytest
import torch

from hexad.parallel import arithmetic
from hexad.parallel.arithmetic import USUAL, Arithmetic, EightBits, arithmetic_of
from hexad.parallel.arithmetic_inventory import arithmetic_spec
from hexad.parallel.inventory import Execution
from hexad.parallel.tensor.packed import packable, packed
from hexad.topology.mesh import Axis

from ..layers import shard_of

EXACT = arithmetic_of(True, False, False, False)
KINDS: dict[str, tuple[Arithmetic, torch.dtype, float]] = {
    "usual": (USUAL, torch.float32, 1e-5),
    "exact": (EXACT, torch.float32, 1e-5),
    "eight bits": (EightBits(), torch.bfloat16, 0.2),
    "eight-bit gradients": (EightBits(weight_gradients=True), torch.bfloat16, 0.2),
}
"""Each with a format, and how far its results may be from those of float64."""


@pytest.mark.parametrize("flags", list(product((False, True), repeat=4)))
def test_settings_choose_one(flags: tuple[bool, ...]) -> None:
    """The inventory chooses alike. Exact arithmetic and 8 bits together are refused before."""
    exactly, eight, weight_gradients, compiled = flags
    how: dict[str, Any] = {"exact": exactly, "fp8": eight, "fp8_weight_gradients": weight_gradients}
    shard = shard_of(compiled=compiled, **how)
    chosen, declared = shard.arithmetic, arithmetic_spec(Execution(1, 8, compiled=compiled, **how))
    if exactly:
        assert chosen is EXACT
    elif eight:
        assert chosen == EightBits(weight_gradients, compiled)
    else:
        assert chosen is USUAL
    assert declared.batched == chosen.batched
    assert declared.eight == isinstance(chosen, EightBits)
    assert chosen.unrounded is (EXACT if exactly else USUAL)
    assert shard.arithmetic is chosen  # chosen once


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    sizes = (32, 16), (48, 16), (48,), (32, 48)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str) -> None:
    computed, dtype, tolerance = KINDS[kind]
    x, weight, bias, gradient = _operands(dtype)
    wide = [tensor.double() for tensor in (x, weight, bias, gradient)]

    def near(values: torch.Tensor, wanted: torch.Tensor) -> None:
        assert (values.double() - wanted).norm() < tolerance * wanted.norm()

    for added in (None, bias):
        y = computed.product(x, weight, added)
        near(y, wide[0] @ wide[1].t() + (0 if added is None else wide[2]))
        place = torch.empty(32, 50, dtype=dtype)[:, 1:49]
        computed.product(x, weight, added, place)
        assert torch.equal(place, y) or kind == "usual"  # whose kernels differ with the place
        near(place, y.double())
    near(computed.by_autograd(x, weight, bias), wide[0] @ wide[1].t() + wide[2])
    of_input = computed.input_gradient(gradient, weight)
    near(of_input, wide[3] @ wide[1])
    total = x.clone()
    computed.add_input_gradient_(total, gradient, weight)
    near(total, wide[0] + wide[3] @ wide[1])
    for fresh in (True, False):
        of_weight = torch.ones(48, 16)
        computed.add_weight_gradient(of_weight, gradient, x, fresh)
        near(of_weight, wide[3].t() @ wide[0] + (0 if fresh else 1))
    y = torch.zeros(32, 48, dtype=dtype)
    computed.add_scaled_product_(y, x, weight, 0.5)
    near(y, wide[0] @ wide[1].t() / 2)
    alone, inner = computed.summed_product(x, weight, Axis("tensor"), lambda part: part, None)
    assert torch.equal(alone, computed.product(x, weight)) and inner is None


@pytest.mark.skipif(not packable(torch.float32), reason="no products of packed weights")
def test_packed_weights_announce_themselves() -> None:
    x, weight, bias, _ = _operands(torch.float32)
    other = packed(weight)
    assert USUAL.reading(weight) is USUAL and EXACT.reading(other) is EXACT
    computed = USUAL.reading(other)
    assert computed is arithmetic._PACKED and computed.unrounded is USUAL and not computed.batched
    torch.testing.assert_close(computed.product(x, other, bias), USUAL.product(x, weight, bias))
