"""Compiled blocks: the same numbers, one graph each."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from hexad import Engine, Layout, Mesh, Microbatch, load_config


def _losses(compile_blocks: bool, family: str, dtype: str = "fp32", dropout: float = 0.0) -> list[float]:
    model = {"family": family, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "vocab": 100}
    config = load_config(
        {
            "run": {"compile": compile_blocks},
            "model": {**model, "dropout": dropout},
            "data": {"sequence": 32},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": dtype},
            "lr_schedule": {"warmup": 1},
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), torch.device("cpu")))
    losses = []
    for step in range(3):
        tokens = torch.randint(100, (2, 33), generator=torch.Generator().manual_seed(step))
        batch = Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        losses.append(engine.train_step([batch, batch]).loss)
    return losses


@pytest.mark.slow  # needs a C++ compiler, and half a minute
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("dtype", "dropout", "tolerance"), [("fp32", 0.0, 1e-5), ("fp32", 0.2, 1e-5), ("fp8", 0.0, 1e-2)]
)
def test_compiled_blocks_give_the_same_losses_without_graph_breaks(
    family: str, dtype: str, dropout: float, tolerance: float
) -> None:
    counters.clear()
    found, wanted = (_losses(compiled, family, dtype, dropout) for compiled in (True, False))
    assert found == pytest.approx(wanted, rel=tolerance)
    assert not counters["graph_break"]
