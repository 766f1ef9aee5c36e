"""How gradients are added up: on a GPU in one product, and reduced without waiting in ZeRO 1."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hexad.parallel.contributions import Contribution, Dense, EmbeddingRows, WeightGradient, widening_products
from hexad.parallel.data.bucket_plan import BucketPlan, HeldParameter, plan_buckets
from hexad.parallel.data.ordering import Rounds
from hexad.parallel.inventory import Parameter, Weight


class _Operators(TorchDispatchMode):
    """The operators that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("fresh", "operator"), [(True, "aten.mm.dtype_out"), (False, "aten.addmm.dtype_out")]
)
def test_a_gpu_adds_a_weight_gradient_in_one_product(fresh: bool, operator: str) -> None:
    gradient = torch.empty(24, 5, dtype=torch.bfloat16, device="meta")
    inputs = torch.empty(24, 7, dtype=torch.bfloat16, device="meta")
    total = torch.empty(5, 7, device="meta")
    assert widening_products(total.device)
    with _Operators() as operators:
        WeightGradient(gradient, inputs).add_to(total, fresh)
    assert [name for name in operators.called if name != "aten.t.default"] == [operator]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_device_without_such_products_adds_a_temporary(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    gradient, inputs = (torch.randn(24, n, generator=generator).to(dtype) for n in (5, 7))
    total = torch.full((5, 7), 2.0)
    WeightGradient(gradient, inputs).add_to(total, False)
    torch.testing.assert_close(total, gradient.float().t() @ inputs.float() + 2, rtol=1e-2, atol=1e-2)


def _contributions(dtype: torch.dtype) -> list[Contribution]:
    generator = torch.Generator().manual_seed(5)
    values, left, right, rows = (torch.randn(n, 7, generator=generator) for n in (12, 6, 6, 5))
    product = WeightGradient(torch.cat([left, left[:, :5]], 1).to(dtype), right.to(dtype))
    return [Dense(values.to(dtype)), product, EmbeddingRows(torch.tensor([3, 0, 3, 11, 7]), rows.to(dtype))]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", range(3))
def test_a_scaled_contribution(number: int, dtype: torch.dtype, fresh: bool) -> None:
    contribution = _contributions(dtype)[number]
    total, scaled = torch.full((12, 7), 2.0), torch.full((12, 7), 2.0)
    contribution.add_to(total, fresh)
    contribution.scaled(3.0).scaled(1 / 7).add_to(scaled, fresh)
    before = 0.0 if fresh else 2.0
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(scaled - before, (total - before) * 3 / 7, rtol=tolerance, atol=tolerance)
    assert (scaled - before).abs().max() > 0.5


class _Recorded:
    """What :class:`Rounds` decides."""

    def __init__(self) -> None:
        self.decided: list[tuple[str, int]] = []

    def start(self, bucket: int, first: bool, last: bool, absent: Sequence[int]) -> None:
        self.decided.append(("start", bucket))

    def overrun(self) -> None:
        self.decided.append(("overrun", -1))

    def retire(self, bucket: int, last: bool) -> None:
        self.decided.append(("retire", bucket))


def _plans(zero: int) -> list[BucketPlan]:
    weights = [Weight(f"layers.{n}.weight", (8, 8), unit=f"layers.{n}") for n in range(5)]
    held = [HeldParameter.of(0, Parameter(weight.name, (weight,)), {}) for weight in weights]
    return plan_buckets(held, 4 * 64, 4, zero, {"dense": 2})


@pytest.mark.parametrize(
    ("zero", "beside", "before"), [(1, False, 0), (1, True, 3), (2, False, 3), (3, True, 3)]
)
def test_reductions_in_place_are_not_waited_for_before_the_end(zero: int, beside: bool, before: int) -> None:
    plans, recorded = _plans(zero), _Recorded()
    rounds = Rounds(plans, recorded, beside)
    rounds.begin(1)
    for bucket in reversed(range(len(plans))):
        rounds.added(bucket, 0)
    assert sum(what == "retire" for what, _ in recorded.decided) == before
    rounds.finish()
    assert sorted(recorded.decided) == sorted((what, n) for what in ("start", "retire") for n in range(5))
