"""One GPU gives the CPU's numbers; skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.parallel.tensor import fp8
from hexad.topology.cluster import has_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]


def _losses(
    device: str, dtype: str, family: str, compiled: str = "none", dropout: float = 0.0, **groups: Any
) -> list[float]:
    model = {"family": family, "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "vocab": 300}
    config = load_config(
        {
            "run": {"compile": compiled},
            "model": {**model, "dropout": dropout, "attention_dropout": dropout},
            "data": {"sequence": 64},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": dtype},
            "lr_schedule": {"warmup": 1},
            **groups,
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
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 1e-2)]
)
def test_losses_equal_the_cpus(family: str, dtype: str, tolerance: float) -> None:
    assert _losses("cuda", dtype, family) == pytest.approx(_losses("cpu", dtype, family), rel=tolerance)


@pytest.fixture
def eight_bits() -> None:
    if not has_fp8(torch.device("cuda", 0)):
        pytest.skip("the GPU has no fp8 units")


@pytest.mark.usefixtures("eight_bits")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("compiled", ["none", "pointwise", "full"])
def test_eight_bit_products(family: str, compiled: str) -> None:
    """The GPU's units against the CPU's emulation, which rounds alike and sums in another order."""
    found = _losses("cuda", "fp8", family, compiled)
    assert found == pytest.approx(_losses("cpu", "fp8", family), rel=2e-2)
    assert found != _losses("cuda", "bf16", family, compiled)


@pytest.mark.usefixtures("eight_bits")
def test_eight_bit_products_of_one_layer() -> None:
    """Products alone are nearer: fast accumulation keeps 13 bits or so of a partial sum."""
    generator = torch.Generator().manual_seed(1)
    x, weight, gradient, bias = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((48, 256), (512, 256), (48, 512), (512,))
    )
    for function, operands in (
        (fp8.product, (x, weight)),
        (fp8.product, (x, weight, bias)),
        (fp8.input_gradient, (gradient, weight)),
    ):
        wanted = function(*operands).float()
        found = function(*(operand.cuda() for operand in operands)).cpu().float()
        assert (found - wanted).norm() < 1e-2 * wanted.norm()
    x[3, 4] = float("inf")
    assert torch.isnan(fp8.product(x.cuda(), weight.cuda())[3]).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("compiled", ["pointwise", "full"])
def test_compiled(family: str, compiled: str) -> None:
    found = _losses("cuda", "fp32", family, compiled=compiled)
    assert found == pytest.approx(_losses("cuda", "fp32", family), rel=1e-4)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dropout_drops_what_it_drops_on_a_cpu(recompute: str) -> None:
    memory = {"recompute": recompute}
    found = _losses("cuda", "fp64", "gpt2", dropout=0.2, memory=memory)
    assert found == pytest.approx(_losses("cpu", "fp64", "gpt2", dropout=0.2), rel=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_host_makes_the_update(dtype: str, zero: int) -> None:
    """Copies to and from pinned memory arrive before they are used."""
    found = _losses("cuda", dtype, "llama", memory={"offload": "optimizer"}, parallel={"zero": zero})
    assert found == pytest.approx(_losses("cuda", dtype, "llama"), rel=1e-5)
