"""What a layer launches on a GPU, counted on ``meta`` tensors by ``benchmarks/roofline.py``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import roofline


@pytest.mark.parametrize("tensor", [1, 8])
def test_a_layer_launches_few_kernels(tensor: int) -> None:
    """Twelve matrix products and attention's four kernels; and little else."""
    before, after = (roofline.bound("llama3.2-1b", 2048, tensor, now) for now in (False, True))
    products = {"mm", "addmm", "attention forward", "attention backward"}
    operators = after["block_operators"]
    assert sum(operators[name]["launches"] for name in products) == 16
    assert after["block_launches"] <= 32 < before["block_launches"]
    assert after["mfu_bound"] > before["mfu_bound"]


@pytest.mark.parametrize(("model", "bound"), [("llama3.2-1b", 0.5), ("llama3-8b", 0.6)])
def test_the_bound_on_mfu(model: str, bound: float) -> None:
    for tensor in (1, 8):
        assert roofline.bound(model, 8192, tensor, True)["mfu_bound"] > bound
