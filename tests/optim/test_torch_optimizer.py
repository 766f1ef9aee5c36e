"""Optimizers of ``torch.optim`` on buckets, against themselves on parameters."""

import copy

import pytest
import torch
from torch import nn

from hexad import Engine, Layout, Mesh
from hexad.optim.torch_optimizer import ELEMENTWISE

from ..layers import CPU
from ..small import config_of

STEPS = 4


def module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """With two groups of different rates."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=0.02)
    return optimizer


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    result: torch.Tensor = model(torch.randn(6, 5, dtype=torch.float64, generator=generator)).square().mean()
    return result


def engine_with(model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    config = config_of(precision={"dtype": "fp64"}, optimizer={"clip": 0.0}, parallel={"bucket_mb": 1e-4})
    return Engine(model, Mesh.create(Layout(world=1), CPU), config, optimizer=optimizer)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_values_are_those_of_parameters_one_by_one(name: str, hooked: bool) -> None:
    plain = module()
    model = copy.deepcopy(plain)
    reference, optimizer = optimizer_of(name, plain), optimizer_of(name, model)
    calls = []
    if hooked:
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
    engine = engine_with(model, optimizer)
    assert len(engine.trained) > 3
    for step in range(STEPS):
        reference.zero_grad()
        loss_of(plain, step).backward()
        reference.step()
        engine.begin(1)
        loss_of(model, step).backward()
        engine.reduce()
        engine.update(None)
    for one, other in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(other, one, rtol=1e-13, atol=1e-15)
    assert len(calls) == (STEPS if hooked else 0)  # hooks see one step per step
