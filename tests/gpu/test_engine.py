"""One GPU gives the CPU's numbers; skipped without one."""

from __future__ import annotations

import pytest
import torch

from hexad import Engine, Layout, Mesh, Microbatch, load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]


def _losses(device: str, dtype: str, family: str, compile_blocks: bool = False) -> list[float]:
    config = load_config(
        {
            "run": {"compile": compile_blocks},
            "model": {"family": family, "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "vocab": 300},
            "data": {"sequence": 64},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": dtype},
            "lr_schedule": {"warmup": 1},
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), torch.device(device)))
    losses = []
    for step in range(4):
        tokens = torch.randint(300, (2, 65), generator=torch.Generator().manual_seed(step))
        bounds = (0, 20 + step, 64, 128) if step % 2 else None
        batch = Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), bounds)
        losses.append(engine.train_step([batch, batch]).loss)
    return losses


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4), ("bf16", 2e-2)])
def test_losses_equal_the_cpus(family: str, dtype: str, tolerance: float) -> None:
    assert _losses("cuda", dtype, family) == pytest.approx(_losses("cpu", dtype, family), rel=tolerance)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_blocks(family: str) -> None:
    found = _losses("cuda", "fp32", family, compile_blocks=True)
    assert found == pytest.approx(_losses("cuda", "fp32", family), rel=1e-4)
