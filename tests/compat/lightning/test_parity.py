"""One script with Lightning's DDPStrategy and with ours: losses, rates, metrics, gradients, weights."""

from typing import Any

import pytest
import torch

from ...pool import Pool
from .program import differences, fitted

pytest.importorskip("lightning")

_kept: dict[Any, Any] = {}
"""Results of DDPStrategy, by case."""


def compared(
    pool: Pool,
    kind: str,
    zero: int,
    options: dict[str, Any] | None = None,
    precision: Any = "64-true",
    reference: Any = None,
) -> dict[str, float]:
    """The differences of our strategy from DDPStrategy, two ranks; ``reference``: the latter's precision, if
    it differs."""
    options = options or {}
    key = kind, repr(options), repr(reference or precision)
    if key not in _kept:
        _kept[key] = pool.run(2, fitted, kind, "ddp", options, reference or precision)
    return differences(pool.run(2, fitted, kind, f"zero {zero}", options, precision), _kept[key])


def assert_equal(found: dict[str, float], state: float = 1e-9) -> None:
    assert found.pop("state") < state
    assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        pytest.param(kind, zero, marks=() if zero in usual else pytest.mark.slow)
        for kind, usual in (("classifier", (0,)), ("fine-tune", ()), ("language", (3,)))
        for zero in range(4)
    ],
)
def test_tutorials_equal_ddp(pool: Pool, kind: str, zero: int) -> None:
    """Losses of every step, rates, metrics, weights and buffers, in float64."""
    assert_equal(compared(pool, kind, zero))


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 3},  # of five batches: the last group is incomplete
    "clipped by norm": {"gradient_clip_val": 0.3},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2},
}


@pytest.mark.parametrize(
    ("case", "zero"),
    [
        pytest.param(case, zero, marks=() if zero == usual else pytest.mark.slow)
        for case, usual in zip(OPTIONS, (None, None, 3, 2))
        for zero in range(4)
    ],
)
def test_options_equal_ddp(pool: Pool, case: str, zero: int) -> None:
    assert_equal(compared(pool, "classifier", zero, OPTIONS[case]))


@pytest.mark.parametrize("zero", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("language: GradientNorms", {"gradient_clip_val": 0.5, "accumulate_grad_batches": 5}),
        ("language: OwnClipping", {}),
        ("classifier: Manual", {}),
        ("classifier: Averaged", {"accumulate_grad_batches": 2}),
        ("classifier: Skips", {}),
        ("classifier: Partial", {}),
    ],
)
def test_hooks_equal_ddp(pool: Pool, kind: str, options: dict[str, Any], zero: int) -> None:
    """Hooks read and change complete gradients, manual optimization accumulates and clips."""
    assert_equal(compared(pool, kind, zero, options))


@pytest.mark.parametrize("zero", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))])
def test_what_hooks_write_stays_beside_master_values(pool: Pool, zero: int) -> None:
    """Where the weights have 16 bits: a hook sets all weights of a layer to zero after every step, so that
    each next one leaves them small."""
    results = pool.run(2, fitted, "classifier: Zeroes", f"zero {zero}", {"max_epochs": 1}, "bf16-true")
    for result in results:
        first, *others = result["recorded"]
        assert len(others) + 1 == result["steps"] and 0 < max(others) < 0.1 * first, result["recorded"]
        assert not result["state"]["head.weight"].any()


@pytest.mark.slow
def test_single_precision_equals_ddp_but_for_rounding(pool: Pool) -> None:
    for kind in ("classifier", "fine-tune", "language"):
        found = compared(pool, kind, 3, {}, "32-true")
        assert max(found["losses"], found["validated"]) < 2e-5, found


def scaled(init_scale: float = 2.0**20) -> Any:
    """fp16 in autocast with a loss scale that overflows at first and grows later."""
    from lightning.pytorch.plugins import MixedPrecision

    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    )


@pytest.mark.parametrize(
    ("precision", "kind", "zeros"),
    [
        ("fp16", "language: GradientNorms", (3,)),
        *(
            pytest.param(precision, kind, (0, 1, 3), marks=pytest.mark.slow)
            for precision in ("bf16", "fp16")
            for kind in ("language: GradientNorms", "language")
        ),
    ],
)
def test_mixed_precision(pool: Pool, precision: str, kind: str, zeros: tuple[int, ...]) -> None:
    """With clipping; hooks see gradients without the loss scale, the first steps overflow."""
    case: list[Any] = [kind, "ddp", {"gradient_clip_val": 0.5}, "bf16-mixed"]
    if precision == "fp16":
        case[-1] = scaled()
    theirs = pool.run(2, fitted, *case)
    for zero in zeros:
        case[1] = f"zero {zero}"
        ours = pool.run(2, fitted, *case)
        for result in (*ours, *theirs):
            result["recorded"] = [x if abs(x) < torch.inf else -1.0 for x in result["recorded"]]
        found = differences(ours, theirs)
        assert max(found["losses"], found["recorded"]) < 2e-3, found
    overflows = kind != "language" and sum(x < 0 for x in theirs[0]["recorded"])
    assert not overflows if precision == "bf16" or kind == "language" else 2 < overflows < 12


@pytest.mark.parametrize("zero", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 3))])
def test_overflow_of_one_shard(pool: Pool, zero: int) -> None:
    """No rank updates, and all have the same loss scale, where one rank's shard is not finite."""
    theirs, ours = (
        pool.run(2, fitted, "language: Overflows", name, {}, scaled(init_scale=4.0))
        for name in ("ddp", f"zero {zero}")
    )
    assert differences(ours, theirs)["losses"] < 2e-3
