"""Mistakes of scripts and files, and ranks that disagree: one line, on all ranks alike."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hexad.compat import deepspeed
from hexad.config import HexadError

from ...pool import Pool, RankError
from .program import Mlp, batch_of
from .test_engine import deepspeed_config, deepspeed_engine


def mistake(kind: str) -> None:
    if kind == "no model":
        deepspeed.initialize(config={"train_batch_size": 1})
    if kind == "no configuration":
        deepspeed.initialize(model=Mlp())
    if kind == "no optimizer":
        engine, *_ = deepspeed.initialize(model=Mlp(), config={"train_batch_size": 1})
        engine.backward(engine(*batch_of("mlp", 0, 0)))
    engine = deepspeed_engine(2 if kind == "no_sync" else 0)
    if kind == "step":
        engine.step()
    if kind == "save_dir":
        engine.save_checkpoint("")
    if kind == "scheduler":
        config = {key: value for key, value in deepspeed_config(0).items() if key != "scheduler"}
        other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(Mlp().parameters()), 1)
        deepspeed.initialize(model=Mlp(), config=config, lr_scheduler=other)
    if kind == "graph":
        engine.backward(torch.zeros(()))
    if kind == "shape":
        engine.backward(torch.zeros(2, requires_grad=True))
    if kind == "no_sync":
        with engine.no_sync():
            pass
    if kind == "optimizer.step":
        engine.optimizer.step()
    if kind in WRONG_CALLS:
        WRONG_CALLS[kind](engine)
    if kind == "name":
        getattr(deepspeed, "initialise")  # noqa: B009
    if kind == "parallel":
        deepspeed.initialize(model=Mlp(), config=deepspeed_config(0, tensor_parallel={"autotp_size": 2}))


def adam(**params: Any) -> dict[str, Any]:
    return deepspeed_config(0, optimizer={"type": "Adam", "params": params})


WRONG_CALLS: dict[str, Callable[[Any], Any]] = {
    "misspelt": lambda _: deepspeed.initialize(model=Mlp(), config=adam(weigth_decay=0.9)),
    "betas": lambda _: deepspeed.initialize(model=Mlp(), config=adam(betas=0.9)),
    "one beta": lambda _: deepspeed.initialize(model=Mlp(), config=adam(betas=[0.9])),
    "lr true": lambda _: deepspeed.initialize(model=Mlp(), config=adam(lr=True)),
    "no parameters": lambda _: deepspeed.initialize(
        model=Mlp(), model_parameters=[], config=deepspeed_config(0)
    ),
    "lr": lambda _: deepspeed.initialize(model=Mlp(), config=adam(lr="high")),
    "scheduler.params": lambda _: deepspeed.initialize(
        model=Mlp(), config=deepspeed_config(0, scheduler={"type": "WarmupLR", "params": {"warmup_steps": 1}})
    ),
    "scheduler.type": lambda _: deepspeed.initialize(
        model=Mlp(), config=deepspeed_config(0, scheduler={"type": "WarmupLr"})
    ),
    "object": lambda engine: engine.save_checkpoint("unused", client_state={"a": [1, {"b": object()}]}),
    "generator": lambda _: deepspeed.initialize(
        model=Mlp(), config=deepspeed_config(0), training_data=(sample for sample in [1])
    ),
    "no loss": lambda _: deepspeed.initialize(model=nn.Linear(3, 2), config=deepspeed_config(0))[
        0
    ].train_batch(iter([torch.ones(4, 3)])),
    "batch": lambda engine: engine.set_train_batch_size(4),
    "file": lambda engine: engine.load_checkpoint(__file__),
    "other parameters": lambda _: deepspeed.initialize(
        model=(model := Mlp()),
        model_parameters=[*model.parameters(), nn.Parameter(torch.ones(1))],
        config=deepspeed_config(0),
    ),
    "config": lambda _: deepspeed.initialize(model=Mlp(), config=3),
    "model": lambda _: deepspeed.initialize(model=3, config=deepspeed_config(0)),
    "lr_scheduler": lambda _: deepspeed.initialize(model=Mlp(), config=adam(), lr_scheduler="adam"),
    "client_state": lambda engine: engine.save_checkpoint("unused", client_state=[1]),
    "save_filename": lambda engine: engine.save_16bit_model("unused", "a/b.bin"),
    "load_dir": lambda engine: engine.load_checkpoint(None),
    "group": lambda engine: engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "mpu": lambda _: deepspeed.initialize(
        model=Mlp(), config=deepspeed_config(0), mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    ),
    "mesh_param": lambda _: deepspeed.initialize(model=Mlp(), config=deepspeed_config(0), mesh_param=(1, 2)),
    "recompute": lambda _: deepspeed.checkpointing.configure(
        deepspeed_config={"activation_checkpointing": {"cpu_checkpoint": True}}
    ),
}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no model", "initialize: found no model"),
        ("no configuration", "initialize: found no configuration"),
        ("no optimizer", "backward: the engine has no optimizer"),
        ("step", "step: found no backward pass since the last update"),
        ("save_dir", "save_checkpoint: found save_dir '', expected a directory"),
        ("scheduler", "lr_scheduler: found one of another optimizer"),
        ("graph", r"backward: found shape \(\), requires_grad False, expected a scalar loss with a graph"),
        ("shape", r"backward: found shape \(2,\), requires_grad True"),
        ("no_sync", "no_sync: found zero_optimization.stage 2"),
        ("optimizer.step", "found no backward pass since the last update"),
        ("misspelt", "optimizer.params.weigth_decay: not a parameter of Adam .did you mean 'weight_decay'"),
        ("betas", "optimizer.params.betas: found 0.9, expected two numbers"),
        ("one beta", r"optimizer.params.betas: found \[0.9\], expected two numbers"),
        ("lr", "optimizer.params.lr: found 'high', expected a number"),
        ("lr true", "optimizer.params.lr: found True, expected a number"),
        ("no parameters", "model_parameters: found none; pass those to train, or leave it out to train all"),
        ("scheduler.params", "scheduler.params.warmup_steps: not a parameter of WarmupLR .did you mean"),
        ("scheduler.type", "unknown scheduler 'WarmupLr' .did you mean 'WarmupLR'"),
        ("object", r"client_state.a\[1\].b: found a object, which a checkpoint cannot store"),
        ("generator", "training_data: found a generator, expected a data set"),
        ("no loss", r"train_batch: the module returned a Tensor of shape \(4, 2\), expected its loss"),
        ("batch", "set_train_batch_size: found 4, expected a multiple of 3"),
        ("file", "load_checkpoint: found load_dir .*, a file; expected a directory"),
        ("other parameters", r"optimizer: found 1 of 12 parameters that the model does not have"),
        ("config", "config: found a int, expected a path"),
        ("model", "initialize: found a model of type int"),
        ("lr_scheduler", "lr_scheduler: found 'adam', expected a scheduler"),
        ("client_state", "client_state: found a list, expected a dictionary"),
        ("save_filename", "save_filename: found 'a/b.bin', expected a name without a directory"),
        ("load_dir", "load_checkpoint: found load_dir None"),
        ("group", "optimizer.add_param_group: found after initialize"),
        (
            "recompute",
            "activation_checkpointing.cpu_checkpoint: unknown key .did you mean 'cpu_",
        ),
        ("mpu", r"mpu.get_model_parallel_world_size\(\): found 2, but a user-defined module is not divided"),
        ("mesh_param", r"mesh_param\[1\]: found 2, but a user-defined module is not divided; use 1"),
        ("parallel", "tensor_parallel.autotp_size: found 2 in a world of 1 ranks"),
    ],
)
def test_mistakes_are_named(kind: str, message: str) -> None:
    with pytest.raises(HexadError, match=message):
        mistake(kind)


def test_unknown_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"it has .*initialize"):
        mistake("name")
    engine = deepspeed_engine(0)
    with pytest.raises(AttributeError, match=r"have no 'global_step' .did you mean 'global_steps'"):
        engine.global_step  # noqa: B018
    assert not hasattr(engine, "unheard_of") and engine.local_rank == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "optimizer.params.lr: rank 0 has 0.01, rank 1 has 0.5": {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.1}}
    },
    "gradient_accumulation_steps: rank 0 has None, rank 1 has 2": {"gradient_accumulation_steps": 2},
    "zero_optimization.stage: rank 0 has 1, rank 1 has 2": {"zero_optimization": {"stage": 2}},
    "bf16.enabled: rank 0 has False, rank 1 has True": {"bf16": {"enabled": True}},
    "trian_batch_size: unknown key": {"trian_batch_size": 2},
}


def _disagree(more: dict[str, Any]) -> str:
    try:
        deepspeed_engine(1, **(more if torch.distributed.get_rank() else {}))
    except HexadError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("message", SETTINGS)
def test_ranks_need_the_same_settings(pool: Pool, message: str) -> None:
    assert all(message in text for text in pool.run(2, _disagree, SETTINGS[message]))


def _other_rates() -> str:
    model, rank = Mlp(), torch.distributed.get_rank()
    sgd = torch.optim.SGD([{"params": list(model.parameters()), "lr": 0.5 + rank}])
    try:
        deepspeed.initialize(model=model, optimizer=sgd, config={"train_batch_size": 2})
    except HexadError as error:
        return str(error)
    return "accepted"


def test_ranks_need_the_same_groups(pool: Pool) -> None:
    message = "optimizer.param_groups.0.lr: rank 0 has 0.5, rank 1 has 1.5; all ranks need the same"
    assert pool.run(2, _other_rates) == [message] * 2


def test_other_logs_on_other_ranks_are_accepted(pool: Pool) -> None:
    more = {"steps_per_print": 7, "wall_clock_breakdown": True}
    assert pool.run(2, _disagree, more) == ["accepted", "accepted"]


def _loads(directory: str) -> list[str]:
    engine, own = deepspeed_engine(0), "ab"[torch.distributed.get_rank()]
    engine.save_checkpoint(directory, tag="a")
    messages = []
    for attempt in (
        lambda: engine.load_checkpoint(directory, tag=own),
        lambda: engine.save_checkpoint(directory + own),
    ):
        with pytest.raises(HexadError) as error:
            attempt()
        messages.append(str(error.value).replace(directory, ""))
    return messages


def test_ranks_name_the_same_checkpoint(pool: Pool, tmp_path: Path) -> None:
    has = "rank 0 has a, rank 1 has b; all ranks need the same"
    messages = pool.run(2, _loads, str(tmp_path))
    assert messages == [[f"load_checkpoint.tag: {has}", f"save_checkpoint.save_dir: {has}"]] * 2
    assert deepspeed_engine(0).load_checkpoint(str(tmp_path / "empty")) == (None, None)


class Rows(torch.optim.Optimizer):
    """Not elementwise: every row is divided by its norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = parameter.grad
                    parameter.sub_(group["lr"] * grad / grad.norm(dim=-1, keepdim=True).clamp_min(1e-6))


def by_rows(stage: int, **more: Any) -> torch.Tensor:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, **more}
    engine, *_ = deepspeed.initialize(model=module, optimizer=Rows(module.parameters(), 0.1), config=config)
    engine.backward(engine(torch.ones(2, 7)).square().sum())
    engine.step()
    return engine.module_state_dict()["0.weight"]


def test_an_optimizer_of_complete_parameters_is_not_given_shards(pool: Pool) -> None:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = Rows(module.parameters(), 0.1)
    loss = module(torch.ones(2, 7)).square().sum()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    torch.testing.assert_close(pool.run(2, by_rows, 0)[0], module[0].weight.detach())
    with pytest.raises(RankError, match="found 1 with Rows, which may need complete parameters"):
        pool.run(2, by_rows, 1)
