"""What modules declare that a rank does, beside what their code does on ``meta`` tensors, through the branch
that a GPU takes: counted by ``benchmarks/roofline.py``."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import roofline

from hexad import load_config
from hexad.config.model import ModelSettings
from hexad.model.inventory import ModelInventory, StageSpec
from hexad.model.recompute_inventory import Recompute
from hexad.parallel.inventory import Execution, Operation, Operations, Pass, Product
from hexad.parallel.tensor.linear_inventory import forward_chunks
from hexad.topology.devices import Attainable

RATES = Attainable(1e15, 5e14, 3e12)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336},
    "qwen3": {"hidden": 2560, "heads": 20, "kv_heads": 4, "head_dim": 96, "ffn_hidden": 7040},
    "gpt2": {"hidden": 1600, "heads": 20, "kv_heads": 20, "ffn_hidden": 6400},
    "mixtral": {
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 4,
        "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 3584},
    },
    "deepseek_v2": {
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 16,
        "mla": {"q_rank": None, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        "moe": {"experts": 32, "top_k": 6, "ffn_hidden": 1408, "shared_experts": 2},
    },
}


def _model(family: str, tokens: int, layers: int) -> ModelSettings:
    settings = {"family": family, "vocab": 50001, "layers": layers, **FAMILIES[family]}
    return load_config({"model": settings, "data": {"sequence": tokens}}).model


def _declared(model: ModelSettings, tokens: int, tensor: int) -> tuple[StageSpec, Execution]:
    chunks = forward_chunks(tokens * model.hidden * 2)
    run = Execution(1, tokens, tensor, tensor > 1, 2, cpu=False, compiled=True, chunks=chunks)
    return ModelInventory(model, tensor > 1, tensor).stage(range(model.layers)), run


def _sums(operations: Iterable[Operation]) -> tuple[float, int, int]:
    """FLOPs of products, bytes and kernels of passes."""
    flops, nbytes, kernels = 0.0, 0, 0
    for operation in operations:
        if isinstance(operation, Product) and operation.kernel == "product":
            flops += operation.flops
        elif isinstance(operation, Pass):
            nbytes, kernels = nbytes + operation.nbytes, kernels + operation.kernels
    return flops, nbytes, kernels


def _counted(cost: roofline.Cost) -> tuple[float, int, int]:
    kinds = roofline.PRODUCTS | roofline.ATTENTION
    others = [name for name in cost.launches if name not in kinds]
    flops = sum(cost.flops[name] for name in roofline.PRODUCTS)
    return flops, sum(cost.nbytes[name] for name in others), sum(cost.launches[name] for name in others)


def _both(operations: Operations) -> list[Operation]:
    return [*operations.forward, *operations.backward]


@pytest.mark.parametrize(
    ("family", "tokens", "tensor"),
    [
        ("llama", 4096, 1),
        ("llama", 4095, 1),
        ("llama", 8192, 4),
        ("qwen3", 2044, 4),
        ("gpt2", 1000, 1),
        ("gpt2", 1000, 5),
        ("mixtral", 4096, 1),
        ("mixtral", 4096, 4),
        ("deepseek_v2", 4096, 1),
        ("deepseek_v2", 4096, 2),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_layer(family: str, tokens: int, tensor: int, recompute: Any) -> None:
    """The same FLOPs in matrix products; bytes and kernels of everything else but for small ones."""
    models, kind = [_model(family, tokens, layers) for layers in (1, 2)], Recompute(recompute)
    one, two = (roofline.run(model, tokens, tensor, True, RATES, recompute=kind) for model in models)
    stage, run = _declared(models[1], tokens, tensor)
    flops, nbytes, kernels = _sums(_both(stage.layer_operations(run, kind, False)[-1]))
    counted = _counted(two.minus(one))
    assert flops == pytest.approx(counted[0], rel=1e-9)
    assert nbytes == pytest.approx(counted[1], rel=0.03)
    assert kernels == pytest.approx(counted[2], rel=0.2)


LOSS = {"statistics", "gradient", "rms_forward", "rms_backward", "native_layer_norm", "mul"} | {
    "native_layer_norm_backward"
}
"""Operators of the final norm and the loss, with the scaling of its gradient."""


@pytest.mark.parametrize(
    ("family", "tokens", "tensor"), [("llama", 4096, 1), ("llama", 8192, 4), ("gpt2", 1000, 5)]
)
def test_the_head(family: str, tokens: int, tensor: int) -> None:
    """Logits with padding, in slices; the loss and both gradients."""
    one, two = (
        roofline.run(_model(family, tokens, layers), tokens, tensor, True, RATES) for layers in (1, 2)
    )
    stage, run = _declared(_model(family, tokens, 1), tokens, tensor)
    flops, nbytes, _ = _sums(_both(stage.after_layers(run)))
    cost = one.minus(two.minus(one))
    assert flops == pytest.approx(sum(cost.flops[name] for name in roofline.PRODUCTS), rel=1e-9)
    assert nbytes == pytest.approx(sum(cost.nbytes[name] for name in LOSS), rel=0.03)
