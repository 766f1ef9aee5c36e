"""What a layer launches on a GPU, counted on ``meta`` tensors by ``benchmarks/roofline.py``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import roofline

from hexad import load_config
from hexad.topology.devices import Attainable


@pytest.mark.parametrize("tensor", [1, 8])
def test_a_layer_launches_few_kernels(tensor: int) -> None:
    """Twelve matrix products and attention's four kernels; and little else."""
    before, after = (roofline.bound("llama3.2-1b", 2048, tensor, now) for now in (False, True))
    products = {"mm", "addmm", "attention forward", "attention backward"}
    operators = after["block_operators"]
    assert sum(operators[name]["launches"] for name in products) == 16
    assert after["block_launches"] <= 32 < before["block_launches"]
    assert after["mfu_bound"] > before["mfu_bound"]


@pytest.mark.parametrize(("model", "low", "high"), [("llama3.2-1b", 0.57, 0.63), ("llama3-8b", 0.65, 0.7)])
def test_the_bound_on_mfu(model: str, low: float, high: float) -> None:
    """Of the published peak, at the rates that were measured: matrix products alone reach 0.81 of it."""
    for tensor in (1, 8):
        assert low < roofline.bound(model, 8192, tensor, True)["mfu_bound"] < high


def test_a_layer_computes_while_it_sends() -> None:
    """An 8B layer on 8 ranks, 8192 tokens: messages of 64 MiB, those of the forward pass in two chunks."""
    before, after = (roofline.bound("llama3-8b", 8192, 8, now) for now in (False, True))
    starts = after["block_sent_ms"] - before["block_sent_ms"]
    assert starts == pytest.approx(4 * 1e3 * roofline.START)
    assert after["block_exposed_ms"] < 0.5 * after["block_sent_ms"]
    assert before["block_exposed_ms"] > 0.65 * before["block_sent_ms"]


def test_the_kinds_of_operators_add_up() -> None:
    model = load_config({"model": {"preset": "llama3.2-1b", "layers": 1}}).model
    one, two = (
        roofline.run(model, 256, 1, True, Attainable(1e12, 1e12, 1e10), count).by_kind() for count in (1, 2)
    )
    assert one.keys() == {"products", "attention", "others"}
    assert two["products"] == pytest.approx(2 * one["products"], rel=0.3)
    # A tenth of the rate takes ten times as long, and changes nothing else.
    slow = roofline.run(model, 256, 1, True, Attainable(1e12, 1e11, 1e10), 1).by_kind()
    assert slow == pytest.approx(one | {"attention": 10 * one["attention"]})
