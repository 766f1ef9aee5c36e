"""What upstream scripts do beside forward, backward, step: run with the package and with ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Numbers = dict[str, Any]


def keys(stage: int, micro: int = 3, lr: float = 1e-2, **more: Any) -> dict[str, Any]:
    adam = {"type": "Adam", "params": {"lr": lr, "torch_adam": True}}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0.0,
        "optimizer": adam,
        "zero_optimization": {"stage": stage},
        **more,
    }


def record(losses: list[float], engine: Any, **more: Any) -> Numbers:
    counts = {"steps": engine.global_steps, "skipped": engine.skipped_steps, "samples": engine.global_samples}
    return {"loss": losses, "norm": [], "lr": [], "scale": [], **counts, **more}


def adversarial(deepspeed: Any, stage: int, rank: int) -> Numbers:
    """One loss through two engines, of which the second one's gradients are discarded or kept: a GAN."""
    torch.manual_seed(3)
    critic = nn.Sequential(nn.Linear(6, 9), nn.LeakyReLU(0.2, inplace=True), nn.Linear(9, 1))
    maker = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6))
    engines = [deepspeed.initialize(model=module, config=keys(stage))[0] for module in (critic, maker)]
    judge, make = engines
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for number in range(5):
        if number != 3:
            critic.zero_grad()  # the module's own, not the engine's
        real, noise = torch.randn(3, 6, generator=generator), torch.randn(3, 4, generator=generator)
        first = nn.functional.softplus(-critic(real)).mean()
        judge.backward(first)
        fake = maker(noise)
        second = nn.functional.softplus(critic(fake.detach())).mean()
        judge.backward(second)
        judge.step()
        maker.zero_grad()
        third = nn.functional.softplus(-critic(fake)).mean()
        make.backward(third)
        make.step()
        losses += [float(loss) for loss in (first, second, third)]
    return record(losses, make)


def values(deepspeed: Any, stage: int, rank: int) -> Numbers:
    """Master values, gradients and optimizer state, read and written."""
    utils = deepspeed.utils
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3, bias=False))
    engine, *_ = deepspeed.initialize(
        model=model, config=keys(stage, gradient_accumulation_steps=2, bf16={"enabled": True})
    )
    generator = torch.Generator().manual_seed(rank)
    seen: list[float] = []
    losses = []
    weight = model[2].weight
    for number in range(3):
        for micro in range(2):
            x = torch.randn(3, 5, generator=generator).bfloat16()
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            losses.append(float(loss))
            if micro:
                gradient = utils.safe_get_full_grad(weight)
                seen += [float(gradient.float().norm()), float(gradient.abs().max())]
                if number == 1:
                    utils.safe_set_full_grad(weight, torch.full_like(gradient, 0.25))
                    seen.append(float(utils.safe_get_full_grad(weight).sum()))
            engine.step()
        moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
        seen += [float(utils.safe_get_full_fp32_param(weight).norm()), float(moment.double().norm())]
        utils.safe_set_full_optimizer_state(weight, moment * 0.5, "exp_avg")
        if number == 2:
            utils.safe_set_full_fp32_param(weight, torch.ones(3, 8))
            seen.append(float(utils.safe_get_full_fp32_param(weight).sum()))
    return record(losses, engine, seen=seen)


def alone(deepspeed: Any, stage: int, rank: int) -> Numbers:
    """The optimizer's own step, and gradients that the script assigns."""
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=keys(stage))
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for number in range(4):
        loss = engine(torch.randn(3, 4, generator=generator)).square().mean()
        losses.append(float(loss))
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number == 2 and stage == 0:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            engine.step()
            optimizer.zero_grad()
    return record(losses, engine)


def epochs(deepspeed: Any, stage: int, rank: int) -> Numbers:
    """Two epochs and a half over ``training_data``, of which the last microbatch is incomplete."""
    torch.manual_seed(6)
    data = [(torch.randn(4), torch.tensor([float(number)])) for number in range(14)]
    engine, _, loader, _ = deepspeed.initialize(
        model=nn.Linear(4, 1), training_data=data, config=keys(stage, gradient_accumulation_steps=2)
    )
    losses, repeated = [], iter(deepspeed.utils.RepeatingLoader(loader))
    for _ in range(8):
        x, y = next(repeated)
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return record(losses, engine)


def in_place(deepspeed: Any, stage: int, rank: int) -> Numbers:
    """A pipeline whose second stage begins with a layer that works in place, with dropout in both."""
    torch.manual_seed(7)
    layers = [
        nn.Linear(6, 40),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(40, 10),
        nn.ReLU(inplace=True),
    ]
    layers += [nn.Dropout(0.5), nn.Linear(10, 4)]
    module = deepspeed.PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.cross_entropy, partition_method="type:Linear|ReLU"
    )
    data = [(torch.randn(6), number % 4) for number in range(12)]
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        training_data=data,
        config=keys(stage, micro=2, lr=1e-3, gradient_accumulation_steps=3),
    )
    return record([float(engine.train_batch()) for _ in range(4)], engine)


SCRIPTS: dict[str, Callable[[Any, int, int], Numbers]] = {
    "adversarial": adversarial,
    "values": values,
    "alone": alone,
    "epochs": epochs,
    "in_place": in_place,
}
"""By name: given the package, the ZeRO stage and the rank, what a script computes."""
