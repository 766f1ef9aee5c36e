"""Learning rates against closed formulas."""

import math

import pytest

from hexad.config.schema import LrScheduleSettings
from hexad.optim.schedule import learning_rate


def _rate(step: int, total: int = 1000, peak: float = 0.1, **settings: object) -> float:
    return learning_rate(LrScheduleSettings.model_validate(settings), peak, total, step)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
def test_warmup_is_linear_from_zero(kind: str) -> None:
    for step in (1, 37, 99):
        assert _rate(step, kind=kind, warmup=100) == pytest.approx(0.1 * step / 100)
    assert _rate(100, kind=kind, warmup=100) == pytest.approx(0.1)


def test_shapes() -> None:
    common = {"warmup": 100, "min_lr": 0.001}
    half = 550  # half way between warm-up and the end
    assert _rate(999, kind="constant", **common) == 0.1
    assert _rate(half, kind="linear", **common) == pytest.approx((0.1 + 0.001) / 2)
    assert _rate(half, kind="cosine", **common) == pytest.approx((0.1 + 0.001) / 2)
    quarter = 0.001 + (0.1 - 0.001) * (1 + math.cos(math.pi / 4)) / 2
    assert _rate(325, kind="cosine", **common) == pytest.approx(quarter)
    assert _rate(400, kind="inverse_sqrt", **common) == pytest.approx(0.05)
    assert _rate(800, kind="wsd", **common) == 0.1
    assert _rate(900, kind="wsd", **common) == pytest.approx((0.1 + 0.001) / 2)
    assert _rate(950, kind="wsd", decay_steps=100, **common) == pytest.approx((0.1 + 0.001) / 2)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_ends_at_the_minimum_and_stays(kind: str) -> None:
    for step in (1000, 1500):
        assert _rate(step, kind=kind, warmup=10, min_lr=0.002) == pytest.approx(0.002)
    assert _rate(5, total=5, kind=kind, warmup=0, min_lr=0.002) == pytest.approx(0.002)


def test_decay_steps_ends_before_the_run() -> None:
    assert _rate(600, kind="cosine", warmup=100, decay_steps=500, min_lr=0.003) == pytest.approx(0.003)


def test_without_warmup() -> None:
    assert _rate(1, kind="linear", warmup=0, min_lr=0.0) == pytest.approx(0.1 * 999 / 1000)
