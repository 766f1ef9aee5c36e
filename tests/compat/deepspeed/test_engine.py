"""The engine: checkpoints in any layout, complete values of sharded parameters, mistakes."""

import argparse
import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hexad.compat import deepspeed
from hexad.compat.deepspeed.zero import ZeroParamStatus
from hexad.config import HexadError

from ... import forks
from ...pool import Pool, RankError
from .program import Mlp, batch_of

STAGES = [0, 1, 2, 3]


def deepspeed_config(stage: int, **more: Any) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02}}
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": adam,
        "scheduler": warmup,
        "zero_optimization": {"stage": stage},
        **more,
    }


def deepspeed_engine(stage: int, **more: Any) -> Any:
    torch.manual_seed(5)
    return deepspeed.initialize(model=Mlp(), config=deepspeed_config(stage, **more))[0]


def steps(engine: Any, first: int, last: int) -> list[float]:
    """The losses over all samples of a step: the ranks of any world divide four microbatches."""
    losses = []
    for step in range(first, last):
        total = torch.zeros(())
        for micro in range(engine.gradient_accumulation_steps()):
            number = engine.global_rank * engine.gradient_accumulation_steps() + micro
            loss = engine(*batch_of("mlp", number, step))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / 4
        if engine.world_size > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total))
    return losses


def saved(stage: int, directory: str, script_optimizer: bool) -> tuple[list[float], list[float]]:
    """Losses before a checkpoint and after."""
    engine = script(stage, script_optimizer)
    before = steps(engine, 0, 3)
    args = argparse.Namespace(lr=0.5)
    engine.save_checkpoint(directory, client_state={"epoch": 4, "args": args, "mean": torch.arange(3.0)})
    return before, steps(engine, 3, 6)


def script(stage: int, script_optimizer: bool) -> Any:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    accumulated = {"gradient_accumulation_steps": 4 // ranks}
    if not script_optimizer:
        return deepspeed_engine(stage, **accumulated)
    torch.manual_seed(5)
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    config = {**deepspeed_config(stage), **accumulated, "zero_allow_untested_optimizer": True}
    del config["optimizer"], config["scheduler"]
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def resumed(stage: int, directory: str, script_optimizer: bool) -> tuple[list[float], str, Any]:
    engine = script(stage, script_optimizer)
    path, state = engine.load_checkpoint(directory)
    assert engine.global_steps == 3
    state["args"] = vars(state["args"])
    state["mean"] = state["mean"].tolist()
    return steps(engine, 3, 6), path, state


@pytest.mark.parametrize(
    ("one", "two", "ours"),
    [((2, 1), (4, 3), False), ((4, 3), (1, 0), False), ((2, 2), (2, 1), True), ((2, 0), (4, 3), True)],
)
def test_checkpoints_resume_in_any_layout(
    pool: Pool, tmp_path: Path, one: tuple[int, int], two: tuple[int, int], ours: bool
) -> None:
    directory = str(tmp_path / "saved")
    _, after = pool.run(one[0], saved, one[1], directory, ours)[0]
    assert (tmp_path / "saved" / "latest").read_text() == "global_step3"
    losses, path, state = pool.run(two[0], resumed, two[1], directory, ours)[0]
    assert path == str(tmp_path / "saved" / "global_step3")
    assert state == {"epoch": 4, "args": {"lr": 0.5}, "mean": [0.0, 1.0, 2.0]}
    torch.testing.assert_close(losses, after, rtol=1e-5, atol=0)
    # Weights alone begin another optimizer.
    assert len(set(after)) == 3


def weights_only(directory: str) -> tuple[bool, int]:
    engine = deepspeed_engine(1)
    steps(engine, 0, 2)
    engine.save_checkpoint(directory, tag="mine")
    kept = engine.module_state_dict()
    steps(engine, 2, 3)
    engine.load_checkpoint(directory, "mine", load_module_only=True)
    now = engine.module_state_dict()
    return all(torch.equal(kept[name], now[name]) for name in kept), engine.global_steps


def test_weights_alone_are_loaded(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, weights_only, str(tmp_path)) == [(True, 3), (True, 3)]


class Wider(Mlp):
    """More than an :class:`Mlp`; one buffer is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Linear(5, 5)
        self.register_buffer("offset", torch.tensor([3.0]))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def test_checkpoints_of_other_modules_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unless ``load_module_strict`` is False: what is lacking is unchanged, what is unknown is ignored."""
    narrow, wide = (
        deepspeed.initialize(model=module, config=deepspeed_config(1, gradient_accumulation_steps=2))[0]
        for module in (Mlp(), Wider())
    )
    names = "gain.bias, gain.weight, offset"
    for one, other, problem in (
        (narrow, wide, f"missing: {names}"),
        (wide, narrow, f"unexpected: {names}"),
    ):
        directory, before = str(tmp_path / problem[:7]), other.module_state_dict()
        steps(one, 0, 2)
        one.save_checkpoint(directory, client_state={"epoch": 2})
        with pytest.raises(HexadError, match=rf"\({problem}\); load it into the same module"):
            other.load_checkpoint(directory)
        with caplog.at_level("WARNING", "hexad"):
            _, state = other.load_checkpoint(directory, load_module_strict=False)
        assert problem in caplog.text and state == {"epoch": 2}
        assert other.global_steps == one.global_steps
        for name, value in other.module_state_dict().items():
            kept = before if name in names else one.module_state_dict()
            assert torch.equal(value, kept[name])
        steps(other, 2, 3)


def test_counters_are_loaded_without_optimizer_states(tmp_path: Path) -> None:
    """Batch sizes change as in DeepSpeed; accumulation restarts."""
    one, two = (deepspeed_engine(1, gradient_accumulation_steps=2) for _ in range(2))
    steps(one, 0, 2)
    one.skipped_steps = 1
    one.save_checkpoint(str(tmp_path), client_state={"epoch": 2})
    for _ in range(3):
        two.backward(two(*batch_of("mlp", 0, 0)))
        two.step()
    _, state = two.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert (two.global_steps, two.global_samples, two.skipped_steps) == (2, 12, 1)
    assert state == {"epoch": 2} and two.lr_scheduler.state_dict() == one.lr_scheduler.state_dict()
    assert two.micro_steps == 2
    assert not two.is_gradient_accumulation_boundary()


class Odd(nn.Module):
    """One parameter's name ends another's; one is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 4), nn.Sequential(nn.Linear(4, 4)))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.inner(x).sum(1) * self.scale - y).square().mean()


class MyAdamW(torch.optim.AdamW):
    """Not one of torch's own, so that it is given complete parameters."""


def odd_engine(own: bool) -> Any:
    torch.manual_seed(5)
    module = Odd()
    optimizer = (MyAdamW if own else torch.optim.AdamW)(module.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 0 if own else 2}}
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def rolled_back(own: bool, directory: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Losses of steps 0 to 3, and of these again from checkpoints before the first and after the second."""
    engine = odd_engine(own)
    engine.save_checkpoint(directory, tag="begin")
    first = steps(engine, 0, 2)
    engine.save_checkpoint(directory, tag="middle")
    second = steps(engine, 2, 4)
    engine.backward(engine(*batch_of("mlp", 0, 9)))  # forgotten
    engine.load_checkpoint(directory, "middle")
    again = steps(engine, 2, 4)
    engine.load_checkpoint(directory, "begin")
    return first, second, again, steps(engine, 0, 2)


@pytest.mark.parametrize("own", [True, False])
def test_odd_names_and_sizes_are_saved(pool: Pool, tmp_path: Path, own: bool) -> None:
    for first, second, again, begun in pool.run(2, rolled_back, own, str(tmp_path)):
        assert again == second
        assert begun == first


def tags(directory: str, validation: str) -> None:
    engine = deepspeed_engine(0, checkpoint={"tag_validation": validation})
    engine.save_checkpoint(directory, tag=f"of-{engine.global_rank}")


def test_tags_are_compared(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, tags, str(tmp_path), "WARN")
    assert (tmp_path / "latest").read_text() == "of-0"
    with pytest.raises(RankError, match="rank 1 where rank 0 has 'of-0'; all ranks need the same"):
        pool.run(2, tags, str(tmp_path), "Fail")


# Complete values


def masters(engine: Any) -> list[torch.Tensor]:
    """This rank's shard of all master values except those of ``last.weight``."""
    kept = [chunk for chunk in engine._engine.chunks() if chunk.name != "model.last.weight"]
    return [chunk.tensor.clone() for chunk in kept if chunk.name.startswith("model.")]


def changed(stage: int) -> tuple[bool, list[float], float]:
    """Whether values are complete inside, the values that rank 1 has changed, and the ranks' difference."""
    engine = deepspeed_engine(stage, bf16={"enabled": True})
    steps(engine, 0, 2)
    layer = engine.module.last
    before = masters(engine)
    assert any(not torch.equal(weight, weight.bfloat16()) for weight in before)
    with deepspeed.zero.GatheredParameters(layer.parameters(), modifier_rank=1):
        with deepspeed.zero.GatheredParameters(layer.weight), torch.no_grad():
            engine(*batch_of("mlp", 0, 0))
        whole = not layer.weight.isnan().any().item()
        if engine.global_rank == 1:
            with torch.no_grad():
                layer.weight.fill_(0.25)
    assert all(torch.equal(one, two) for one, two in zip(before, masters(engine), strict=True))
    steps_before = engine.module_state_dict()["last.weight"]
    steps(engine, 2, 3)
    after = engine.module_state_dict()["last.weight"]
    other = after.clone()
    torch.distributed.broadcast(other, 0)
    return whole, steps_before.unique().tolist(), float((after - other).abs().max())


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_parameters_can_be_changed(pool: Pool, stage: int) -> None:
    for whole, values, apart in pool.run(2, changed, stage):
        assert whole and values == [0.25] and apart == 0.0


def idioms(stage: int) -> list[dict[str, torch.Tensor]]:
    """A module's parameters as scripts read them: as DeepSpeed-Chat saves a model, and without a thought."""
    engine = deepspeed_engine(stage)
    steps(engine, 0, 1)
    chat, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            fetched = [parameter] if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE else []
            with deepspeed.zero.GatheredParameters([*fetched, None]):  # as of a layer without bias
                assert parameter.ds_status == ZeroParamStatus.AVAILABLE
                assert parameter.shape == parameter.ds_shape and parameter.numel() == parameter.ds_numel
                chat[name] = parameter.data.cpu()
        else:
            chat[name] = parameter.cpu()
        plain[name] = parameter.detach().cpu()
    parts = {n: p.ds_tensor.clone() for n, p in engine.module.named_parameters() if hasattr(p, "ds_id")}
    steps(engine, 1, 2)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pass
    empty = {name: value for name, value in engine.module.state_dict().items() if value.numel() == 0}
    return [chat, plain, parts, empty, {name: torch.empty(0) for name, _ in engine.named_parameters()}]


def test_parameters_are_read_as_scripts_do(pool: Pool) -> None:
    whole = pool.run(2, idioms, 0)[0][0]
    ids = set()
    for stage in (1, 3):
        first, second = pool.run(2, idioms, stage)
        for chat, plain, parts, empty, named in (first, second):
            assert all(torch.allclose(chat[name], whole[name], atol=1e-6) for name in whole)
            sharded = {name for name, part in parts.items() if part.numel() < whole[name].numel()}
            assert set(empty) == sharded and bool(sharded) == (stage == 3)
            for name, value in plain.items():
                assert torch.equal(value, torch.empty(0) if name in sharded else chat[name]), name
            assert all(name.startswith("module.") for name in named)
            ids.add(len(parts))
        for name in first[2]:
            halves = [part for part in (first[2][name], second[2][name]) if name in first[3]]
            assert not halves or torch.equal(torch.cat(halves), first[0][name].view(-1))
    assert ids == {0, len(whole)}


def written(stage: int, directory: str) -> None:
    engine = deepspeed_engine(stage, bf16={"enabled": True})
    steps(engine, 0, 1)
    engine.save_16bit_model(directory)
    engine.save_16bit_model(directory, "model.safetensors")
    gathered = engine._zero3_consolidated_16bit_state_dict()
    assert (gathered is None) == (engine.global_rank > 0)


def copies(stage: int, directory: str) -> int:
    """The number of parameters that a rank copies to its host to write a model."""
    engine, count = deepspeed_engine(stage), 0
    move = torch.Tensor.to

    def counted(tensor: torch.Tensor, *to: Any, **more: Any) -> torch.Tensor:
        nonlocal count
        count += to[:1] == ("cpu",)
        return move(tensor, *to, **more)

    with mock.patch.object(torch.Tensor, "to", counted):
        engine.save_16bit_model(directory)
    return count


def test_only_the_first_rank_copies_a_model(pool: Pool, tmp_path: Path) -> None:
    first, other = pool.run(2, copies, 3, str(tmp_path))
    assert first == len(Mlp().state_dict()) and other == 0


def test_models_are_written_alike_at_any_stage(pool: Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    states = []
    for stage in STAGES:
        pool.run(2, written, stage, str(tmp_path / str(stage)))
        states.append(torch.load(tmp_path / str(stage) / "pytorch_model.bin", weights_only=True))
        other = load_file(tmp_path / str(stage) / "model.safetensors")
        assert all(torch.equal(states[-1][name], other[name]) for name in other)
    assert list(states[0]) == list(Mlp().state_dict())
    assert states[0]["last.weight"].dtype == torch.bfloat16
    for state in states[1:]:
        assert all(torch.equal(states[0][name], state[name]) for name in state)


# Boundaries


def boundaries(kind: str) -> tuple[list[bool], dict[str, torch.Tensor], int]:
    """Two updates of two backward passes each, counted in different ways."""
    more = {} if kind == "unmanaged" else {"gradient_accumulation_steps": 2}
    engine = deepspeed_engine(1, **more, managed_gradient_accumulation=kind != "unmanaged")
    updates = []
    for step in range(2):
        if kind == "no_sync":
            with engine.no_sync():
                engine.backward(engine(*batch_of("mlp", engine.global_rank, 2 * step)))
                updates.append(engine.is_gradient_accumulation_boundary())
            engine.backward(engine(*batch_of("mlp", engine.global_rank, 2 * step + 1)))
            engine.set_gradient_accumulation_boundary(True)
            updates.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            continue
        for micro in range(2):
            if kind == "by hand":
                engine.set_gradient_accumulation_boundary(micro == 1)
            loss = engine(*batch_of("mlp", engine.global_rank, 2 * step + micro))
            engine.backward(loss / 2 if kind == "unmanaged" else loss)
            updates.append(engine.is_gradient_accumulation_boundary())
            if kind != "unmanaged" or micro:
                engine.step()
    return updates, engine.module_state_dict(), engine.global_steps


def test_boundaries_are_found_in_every_way(pool: Pool) -> None:
    expected, values, count = pool.run(2, boundaries, "counted")[0]
    assert expected == [False, True, False, True] and count == 2
    for kind in ("by hand", "no_sync", "unmanaged"):
        updates, other, steps_made = pool.run(2, boundaries, kind)[0]
        assert steps_made == 2
        assert updates == (expected if kind != "unmanaged" else [True] * 4) or kind == "no_sync"
        for name, value in values.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-7)


def several(stage: int, kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """An update by the sum of three losses: at once, one after the other, or through another engine."""
    engine, rank = deepspeed_engine(stage, gradient_clipping=0.0), torch.distributed.get_rank()
    other = deepspeed_engine(stage)
    for step in range(2):
        losses = [engine(*batch_of("mlp", rank, 3 * step + n)) for n in range(3)]
        if kind == "at once":
            engine.backward(losses[0] + losses[1] + losses[2])
        elif kind == "one by one":
            for loss in losses:
                engine.backward(loss)
        else:
            other.backward(losses[0] + losses[1] + losses[2] + other(*batch_of("mlp", rank, step)))
        engine.step()
    return engine.get_global_grad_norm(), engine.module_state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_any_number_of_losses(pool: Pool, stage: int) -> None:
    norm, values = pool.run(2, several, stage, "at once")[0]
    for kind in ("one by one", "through another engine"):
        for again, others in pool.run(2, several, stage, kind):
            assert again == pytest.approx(norm, rel=1e-5)
            for name, value in values.items():
                torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-6)


# Alone: one process, no launcher


def test_one_process_trains_without_a_launcher() -> None:
    """A script, ``python script.py``, imports deepspeed after one added line."""
    text = """
from hexad.compat import deepspeed as compat
compat.install()
import deepspeed, torch, argparse, json
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.utils import logger
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args(["--deepspeed"])
model = torch.nn.Linear(4, 2)
deepspeed.init_distributed()
data = [(torch.randn(4), torch.randn(2)) for _ in range(6)]
engine, optimizer, loader, scheduler = deepspeed.initialize(
    args=args, model=model, optimizer=FusedAdam(model.parameters(), lr=0.1), training_data=data,
    lr_scheduler=lambda optimizer: WarmupLR(optimizer, warmup_num_steps=2),
    config_params={"train_batch_size": 2},
)
assert isinstance(engine, deepspeed.DeepSpeedEngine) and deepspeed.comm.get_world_size() == 1
losses = []
for x, y in loader:
    loss = (engine(x) - y).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
rates = scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]
print(json.dumps([len(losses), engine.global_steps, *rates]))
"""
    result = forks.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [3, 3, [0.1], 0.1]


def test_train_batch_and_eval_batch() -> None:
    engine = deepspeed_engine(0, gradient_accumulation_steps=3)
    batches = iter([batch_of("mlp", 0, number) for number in range(9)])
    first = engine.train_batch(batches)
    assert engine.global_steps == 1 and engine.micro_steps == 3
    expected = [deepspeed_engine(0)(*batch_of("mlp", 0, number)).item() for number in range(3)]
    assert first.item() == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert engine.eval_batch(batches).requires_grad is False


class Counting(torch.optim.SGD):
    """Counts in a tensor of one element, of one dimension."""

    def step(self, closure: Any = None) -> Any:
        for tensor in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[tensor].setdefault("steps", torch.zeros(1)).add_(1)
        return super().step(closure)


def test_the_shape_of_a_count_is_kept(tmp_path: Path) -> None:
    def engine() -> Any:
        model = Mlp()
        config = deepspeed_config(1, zero_allow_untested_optimizer=True)
        return deepspeed.initialize(model=model, optimizer=Counting(model.parameters()), config=config)[0]

    first, second = engine(), engine()
    steps(first, 0, 2)
    first.save_checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path))
    assert {str(state["steps"]) for state in second.basic_optimizer.state.values()} == {"tensor([2.])"}


def test_training_data_is_read_in_order_by_a_pipeline_only() -> None:
    data = [(torch.tensor([float(number)]), torch.zeros(1)) for number in range(16)]
    layers = [nn.Linear(1, 1)]
    config = {"train_batch_size": 1, "pipeline": {"activation_checkpoint_interval": 2}}
    model = deepspeed.PipelineModule(layers, num_stages=1)
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=data, config=config)
    assert [float(inputs) for inputs, _ in loader] == list(range(16))
    assert model.activation_checkpoint_interval == 2
    _, _, loader, _ = deepspeed.initialize(model=nn.Linear(1, 1), training_data=data, config=config)
    assert [float(inputs) for inputs, _ in loader] != list(range(16))
    alone = engine.deepspeed_io(data, data_sampler=[3, 1], num_local_io_workers=0)
    assert [float(inputs) for inputs, _ in alone] == [3.0, 1.0]


def test_engines_beside_each_other() -> None:
    one, two = deepspeed_engine(0), deepspeed_engine(0)
    steps(one, 0, 3)
    kept = two.module_state_dict()
    assert not torch.equal(one.module_state_dict()["last.weight"], kept["last.weight"])
    assert steps(two, 0, 3) == steps(deepspeed_engine(0), 0, 3)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    from hexad.compat.deepspeed import checkpointing

    class Recomputed(Mlp):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return checkpointing.checkpoint(super().forward, x, y)

    checkpointing.configure(deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True}})
    assert checkpointing.is_configured()
    torch.manual_seed(5)
    engine = deepspeed.initialize(model=Recomputed(), config=deepspeed_config(0))[0]
    assert steps(engine, 0, 3) == steps(deepspeed_engine(0), 0, 3)


def test_a_scheduler_of_torch_is_made_of_the_optimizer(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(5)
    config = {key: value for key, value in deepspeed_config(1).items() if key != "scheduler"}
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=Mlp(), config=config, lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    )
    steps(engine, 0, 2)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.0025
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.parametrize(("stage", "of_engine", "of_optimizer"), [(0, 2, 2), (1, 2, 2), (2, 3, 3), (3, 3, 2)])
def test_gradients_are_discarded_as_in_deepspeed(stage: int, of_engine: int, of_optimizer: int) -> None:
    """Measured with the package: by how much a weight changes, in units of the first gradient."""

    def change(which: str) -> float:
        model = nn.Linear(4, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=2.0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0,
            "zero_optimization": {"stage": stage},
        }
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
        before = engine.module_state_dict()["weight"]
        for size in (1.0, 2.0):
            {"engine": engine, "optimizer": optimizer}[which].zero_grad()
            engine.backward(engine(torch.full((1, 4), size)).sum())
            engine.step()
        assert engine.global_steps == 1
        return float((before - engine.module_state_dict()["weight"]).mean())

    assert change("engine") == pytest.approx(of_engine)
    assert change("optimizer") == pytest.approx(of_optimizer)


def test_a_step_of_discarded_gradients_changes_nothing() -> None:
    torch.manual_seed(5)
    module = Mlp()
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    config = {"train_micro_batch_size_per_gpu": 3}
    engine, *_ = deepspeed.initialize(model=module, optimizer=sgd, config=config)
    before = engine.module_state_dict()
    engine.backward(engine(*batch_of("mlp", 0, 0)))
    engine.zero_grad()
    engine.step()
    now = engine.module_state_dict()
    assert engine.get_global_grad_norm() == 0 and all(torch.equal(before[name], now[name]) for name in now)
    steps(engine, 1, 2)
    assert engine.get_global_grad_norm() > 0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_engines_are_freed_when_nothing_refers_to_them(stage: int) -> None:
    gc.disable()
    try:
        engine, optimizer, *_ = deepspeed.initialize(model=Mlp(), config=deepspeed_config(stage))
        inner = weakref.ref(engine._engine)
        del engine
        optimizer.zero_grad()  # refers to the inner engine alone
        del optimizer, _
        assert inner() is None
    finally:
        gc.enable()


def test_batch_sizes_can_be_changed_between_steps() -> None:
    engine = deepspeed_engine(1, gradient_accumulation_steps=2)
    steps(engine, 0, 1)
    engine.set_train_batch_size(12)
    assert engine.get_batch_info() == (12, 3, 4) and engine.global_steps == 1
    assert len(steps(engine, 1, 3)) == 2 and engine.global_steps == 3
    expected = deepspeed_engine(1, gradient_accumulation_steps=4)
    expected_norm = (steps(expected, 0, 1), expected.get_global_grad_norm())[1]
    fresh = deepspeed_engine(1, gradient_accumulation_steps=2)
    fresh.set_train_batch_size(12)
    steps(fresh, 0, 1)
    assert fresh.get_global_grad_norm() == pytest.approx(expected_norm, rel=1e-6)
    fresh.set_train_micro_batch_size(5)
    assert fresh.get_batch_info() == (20, 5, 4)
    fresh.backward(fresh(*batch_of("mlp", 0, 0)))
    with pytest.raises(HexadError, match="found accumulated gradients"):
        fresh.set_train_batch_size(40)
