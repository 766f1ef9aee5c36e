"""Models divided over tensor ranks under DeepSpeed's interface."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hexad import HexadError, Layout, Mesh, parallelize
from hexad.compat import deepspeed

from ...conversion.small_models import Kind
from ...layers import CPU
from ...pool import Pool

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
LLAMA = Kind("llama", "LlamaConfig")


def config_of(zero: int, tensor: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": zero},
        "tensor_parallel": {"autotp_size": tensor},
    }


def steps(zero: int, tensor: int, by_hand: bool) -> list[float]:
    """Losses of a data rank."""
    model = LLAMA.build().float()
    world = dist.get_world_size()
    if by_hand:
        parallelize(model, Mesh.create(Layout(world=world, tensor=tensor), CPU))
    parameters = list(model.parameters())  # made before the model is divided
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config_of(zero, 0 if by_hand else tensor)
    )
    place, losses = dist.get_rank() // tensor, []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, 60, (2, 2, 8), generator=generator)[place]
        logits = engine(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("zero", "by_hand"), [(0, False), (1, True), (2, False), (3, False)])
def test_losses_are_those_of_data_ranks(zero: int, by_hand: bool, pool: Pool) -> None:
    alone = pool.run(2, steps, 0, 1, False)
    many = pool.run(4, steps, zero, 2, by_hand)
    for rank, losses in enumerate(many):
        assert losses == pytest.approx(alone[rank // 2], rel=2e-5)
    assert alone[0] != pytest.approx(alone[1], rel=1e-3)


def without_plan() -> str:
    with pytest.raises(HexadError) as caught:
        deepspeed.initialize(model=nn.Linear(4, 4), config=config_of(0, 2))
    return str(caught.value)


def test_a_model_without_a_plan_is_refused(pool: Pool) -> None:
    for said in pool.run(2, without_plan):
        assert said.startswith("plan: found none, and Linear carries no plan of its own")
