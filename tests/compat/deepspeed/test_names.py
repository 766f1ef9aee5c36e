"""Names that scripts import from DeepSpeed, with the package's own topologies and partitions as oracles."""

import importlib
import pickle
import random
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hexad.compat import deepspeed
from hexad.compat.deepspeed import groups, timers, utils, zero_to_fp32
from hexad.compat.deepspeed.installed import CONSTANTS, MODULES, UNSUPPORTED
from hexad.compat.deepspeed.pipe import balanced, uniform
from hexad.compat.facade import world
from hexad.compat.facade.installed import refused_name
from hexad.config import HexadError

from ... import forks
from ...pool import Pool

SCRIPT = """
from importlib import import_module
from hexad.compat import deepspeed as compat
compat.install()
import deepspeed
from deepspeed import DeepSpeedEngine, get_accelerator
from deepspeed.accelerator import get_accelerator as same
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from deepspeed.runtime.config import LAMB_OPTIMIZER
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.utils import move_to_device, see_memory_usage, set_random_seed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import RepeatingLoader, groups, logger, safe_get_full_fp32_param
from deepspeed.utils.logging import logger as other
import deepspeed.utils.groups as module
from hexad.compat.deepspeed.installed import CONSTANTS, MODULES, UNSUPPORTED
import torch
assert same is get_accelerator and other is logger and module is groups
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
recursive_setattr(model, "0.weight", torch.nn.Parameter(torch.ones(2, 2)))
assert recursive_getattr(model, "0.weight").sum() == 4 and not isinstance(model, MoE)
assert split({"params": model.parameters(), "name": "all"})[0]["name"] == "all"
set_random_seed(3)
first = torch.rand(1)
set_random_seed(3)
assert torch.equal(first, torch.rand(1))
assert move_to_device({"a": [torch.ones(1)]}, "cpu")["a"][0] == 1
assert see_memory_usage("now", force=True) is None
assert groups._get_data_parallel_world_size() == groups.get_sequence_parallel_world_size() == 1
assert groups._get_data_parallel_group().size() == 1 and groups._get_sequence_parallel_rank() == 0
device = get_accelerator()
assert device.memory_allocated() > 1e6 and device.max_memory_allocated() > 1e6 and device.total_memory() > 1e9
assert device.is_synchronized_device() and device._name == "cpu" and device.manual_seed_all(1)
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as weights
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, ZERO_STAGE
import deepspeed.comm as dist
from deepspeed.utils.torch import required_torch_version
assert (OPTIMIZER_STATE_DICT, ZERO_STAGE) == ("optimizer_state_dict", "zero_stage")
assert not deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME] and not isinstance(model, CPUAdamBuilder)
assert required_torch_version(min_version=2.0) and not required_torch_version(max_version=1.9)
assert dist.get_local_rank() == 0 and dist.has_all_gather_into_tensor() and deepspeed.version == "0.19.8"
from deepspeed.inference.v2.engine_factory import HuggingFaceCheckpointEngine
from deepspeed.runtime.zero.stage3 import ZeroParamStatus
assert HuggingFaceCheckpointEngine.why and ZeroParamStatus.AVAILABLE
try:
    from deepspeed.runtime.zero.stage3 import no_such_name
except ImportError:
    pass
else:
    raise AssertionError("found")
implemented, refused = [], 0
for name in [*MODULES, *CONSTANTS, *UNSUPPORTED]:
    module, _, attribute = f"deepspeed.{name}".rpartition(".")
    if name in MODULES:
        import_module(f"deepspeed.{name}")
        continue
    value = getattr(import_module(module), attribute)
    if name in CONSTANTS:
        continue
    if not hasattr(value, "why"):
        implemented.append(name)
        continue
    try:
        value(1, keyword=2)
    except Exception as error:
        assert type(error).__name__ == "HexadError" and "not supported: " in str(error), (name, error)
        refused += 1
    else:
        raise AssertionError(name)
assert {"initialize", "comm.get_local_rank", "utils.safe_get_local_grad"} <= set(implemented)
print(len(implemented) + refused, "names")
"""


def test_every_name_that_the_interface_lists_is_there() -> None:
    for name in deepspeed.__all__:
        assert getattr(deepspeed, name) is not None, name


def test_names_are_found_after_install() -> None:
    done = forks.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len({*UNSUPPORTED} - {*MODULES})), "names"]


def test_the_table_has_what_the_package_has() -> None:
    """A sample of modules, with the installed package as the oracle."""
    theirs = pytest.importorskip("deepspeed")
    assert theirs.__version__ == deepspeed.version
    for module in ("checkpoint.constants", "ops.op_builder", "runtime.pipe.schedule", "runtime.zero.config"):
        names = vars(importlib.import_module(f"deepspeed.{module}"))
        for full in (name for name in (*UNSUPPORTED, *CONSTANTS) if name.rpartition(".")[0] == module):
            short = full.rpartition(".")[2]
            assert short in names or short == "GDSBuilder", full
            value = list(names[short]) if isinstance(names.get(short), tuple) else names.get(short)
            assert full in UNSUPPORTED or value == CONSTANTS[full]
        own = {
            name for name, value in names.items() if getattr(value, "__module__", "") == f"deepspeed.{module}"
        }
        assert {f"{module}.{name}" for name in own if not name.startswith("_")} <= {*UNSUPPORTED, *CONSTANTS}


def test_helpers_return_what_those_of_the_package_return() -> None:
    theirs = pytest.importorskip("deepspeed.runtime.utils")
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("prefix_sum_inc", ([3, 4, 5],)),
        ("call_to_str", ("f", 1, "x")),
        ("get_only_unique_item", ([2, 2],)),
        ("is_model_parallel_parameter", (torch.ones(1),)),
        *(("partition_uniform", (items, parts)) for items in range(9) for parts in (1, 2, 4)),
        *(
            ("partition_balanced", ([1, 5, 2, 2, 7][:items], parts))
            for items in range(1, 6)
            for parts in (1, 2, 4)
        ),
    ]
    for name, arguments in calls:
        assert getattr(utils, name)(*arguments) == getattr(theirs, name)(*arguments), (name, arguments)
    leaves = pytest.importorskip("deepspeed.utils.z3_leaf_module")
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Tanh()), nn.Tanh())
    for marks in ([nn.Tanh], ["Tanh"], ["torch.nn.modules.linear.Linear"]):
        ours = utils.set_z3_leaf_modules(model, marks)
        assert ours == utils.get_z3_leaf_modules(model) and utils.unset_z3_leaf_modules(model, marks) == ours
        assert leaves.set_z3_leaf_modules(model, marks) == ours and leaves.unset_z3_leaf_modules(model, marks)


def test_timers_add_the_milliseconds_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])
    clock = timers.SynchronizedWallClockTimer()
    for seconds in (1, 2, 3):
        clock("forward").start()
        now[0] += seconds
        clock("forward").stop()
    assert clock("forward").mean() == 2000 and clock.get_mean(["forward", "none"]) == {"forward": 2e6}
    assert clock("forward").elapsed() == 6000 and clock("forward").elapsed() == 0
    clock("forward").start()
    with pytest.raises(HexadError, match="timer forward: found it started already"):
        clock("forward").start()
    assert timers.NoopTimer()("x").elapsed() == 0 and "memory_allocated" in clock.memory_usage()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.one.weight = self.other.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tied_weights_of_a_checkpoint_have_all_their_names(stage: int, tmp_path: Path) -> None:
    engine = engine_of(stage, module=Tied())
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    engine.save_checkpoint(str(tmp_path))
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    module = Tied()
    module.load_state_dict(state, strict=True)
    weight = utils.safe_get_full_fp32_param(engine.module.one.weight)
    assert torch.equal(module.other.weight, weight) and not torch.equal(weight, torch.zeros(2, 2))
    for safe, file in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", None, safe)
        read = load_file(tmp_path / "out" / file) if safe else torch.load(tmp_path / "out" / file)
        assert torch.equal(read["one.weight"], weight) and (safe or "other.weight" in read)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_weights_of_a_checkpoint_are_read_by_name(stage: int, tmp_path: Path) -> None:
    engine = engine_of(stage, bf16={"enabled": True})
    engine.backward(engine(torch.ones(2, 2, dtype=torch.bfloat16)).sum())
    engine.step()
    engine.save_checkpoint(str(tmp_path), tag="first")
    master = utils.safe_get_full_fp32_param(next(engine.module.parameters()))
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state.keys() == {"weight"} and torch.equal(state["weight"], master)
    assert state["weight"].dtype == torch.float32
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", tag="first")
    assert torch.equal(torch.load(tmp_path / "out" / "pytorch_model.bin")["weight"], master)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(nn.Linear(2, 1, bias=False), tmp_path)
    assert torch.equal(model.weight, master)
    with pytest.raises(HexadError, match="none: no such directory"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "none")


def _local(stage: int) -> tuple[Any, ...]:
    torch.manual_seed(2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=nn.Linear(3, 3), config=config)[0]
    weight, rank = engine.module.weight, torch.distributed.get_rank()
    engine.backward(engine(torch.full((2, 3), 1.0 + rank)).square().sum())
    local = utils.safe_get_local_grad(weight)
    assert local is not None and not utils.safe_get_local_optimizer_state(weight, "exp_avg")
    utils.safe_set_local_grad(weight, local * 2)
    kept = [local, utils.safe_get_full_grad(weight)]
    engine.step()
    state, values = (
        utils.safe_get_local_optimizer_state(weight, "exp_avg"),
        utils.safe_get_local_fp32_param(weight),
    )
    assert state is not None and values is not None
    utils.safe_set_local_optimizer_state(weight, torch.full_like(state, 2.0), "exp_avg")
    utils.safe_set_local_fp32_param(weight, torch.full_like(values, 1.0 + rank))
    full = utils.safe_get_full_optimizer_state(weight, "exp_avg"), utils.safe_get_full_fp32_param(weight)
    return [*kept, *full], len(values)


@pytest.mark.parametrize("stage", [1, 3])
def test_local_values_are_a_ranks_part_of_the_complete_ones(stage: int, pool: Pool) -> None:
    (one, length), (two, other) = pool.run(2, _local, stage)
    gradient = torch.cat([one[0], two[0]])
    assert length + other == 9 and torch.equal(one[1].flatten(), gradient * 2)
    assert (one[2] == 2).all() and one[3].flatten().tolist() == [1.0] * length + [2.0] * other


def _generated(stage: int) -> tuple[Any, ...]:
    """What libraries do to generate in training: gather all, remove hooks, run the module, register them."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, **keys})[0]
    x, results = torch.linspace(-1, 1, 6).view(2, 3), []
    for _ in range(3):
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            offload = getattr(engine.optimizer, "parameter_offload", None)
            if offload is not None:
                parameters = dict(offload.module.named_parameters()) | dict(
                    offload.module.ds_external_parameters()
                )
                for parameter in parameters.values():
                    parameter.ds_active_sub_modules.clear()
                for hook in (*offload.forward_hooks, *offload.backward_hooks):
                    hook.remove()
                offload.forward_hooks, offload.backward_hooks = [], []
            with torch.no_grad():
                weights = [parameter.clone() for parameter in model.parameters()]
                results += [engine.module(x).sum().item(), model[0](x).sum().item()]
                assert all(
                    torch.equal(one, two) for one, two in zip(weights, model.parameters(), strict=True)
                )
            if offload is not None:
                offload._register_deepspeed_module(offload.module)
        with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
            results.append(unwrapped(x).sum().item())
        loss = engine(x).square().sum()
        engine.backward(loss)
        engine.step()
        results.append(loss.item())
    return results, offload is not None, [parameter.numel() for parameter in model.parameters()]


def test_modules_generate_between_steps(pool: Pool) -> None:
    plain, sharded = pool.run(2, _generated, 0), pool.run(2, _generated, 3)
    assert [offloads for _, offloads, _ in plain + sharded] == [False, False, True, True]
    # The engine computes in 32 bits: a sum near 0 of terms near 1 has their rounding.
    assert sharded[0][0] == pytest.approx(plain[0][0], rel=1e-6, abs=2**-23)
    assert sharded[0][0] == sharded[1][0]


def test_missing_names_are_refused() -> None:
    with pytest.raises(HexadError, match=r"deepspeed.moe.layer.MoE: not supported: mixtures of experts"):
        refused_name("deepspeed.moe.layer.MoE", UNSUPPORTED["moe.layer.MoE"])(hidden_size=2)
    with pytest.raises(AttributeError, match="get_data_parallel_size"):
        groups.get_data_parallel_size  # noqa: B018
    with pytest.raises(AttributeError, match=r"cpu.*has no 'memory'"):
        deepspeed.get_accelerator().memory  # noqa: B018


def test_the_mesh_of_a_former_process_group_is_forgotten() -> None:
    mesh = engine_of()._engine.mesh
    assert world.current_mesh() is mesh
    torch.distributed.destroy_process_group()
    assert world.current_mesh() is not mesh and groups._get_data_parallel_group().size() == 1


@pytest.mark.parametrize(("selected", "expected"), [(0, 3), (2, 2)])
def test_a_gpu_is_selected_where_the_script_has_not(
    monkeypatch: pytest.MonkeyPatch, selected: int, expected: int
) -> None:
    current = [selected]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.insert(0, device))
    for name, value in {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert world.join() == torch.device("cuda", expected)


def test_topologies_are_those_of_the_package() -> None:
    theirs = pytest.importorskip("deepspeed.runtime.pipe.topology")
    for kind, sizes in (("PipeDataParallelTopology", (3, 2)), ("PipeModelDataParallelTopology", (2, 3, 2))):
        one, two = getattr(theirs, kind)(*sizes), getattr(groups, kind)(*sizes)
        assert one.world_size() == two.world_size() and one.get_axis_names() == two.get_axis_names()
        for rank in range(one.world_size()):
            assert tuple(one.get_coord(rank)) == tuple(two.get_coord(rank))
            assert two.get_rank(**two.get_coord(rank)._asdict()) == rank
        for axis in ("pipe", "data", "model"):
            assert one.get_dim(axis) == two.get_dim(axis)
            assert one.get_axis_comm_lists(axis) == two.get_axis_comm_lists(axis)
        assert one.get_axis_list("data", 1) == two.get_axis_list("data", 1)
    with pytest.raises(HexadError, match="topology: found 3 model-parallel ranks"):
        deepspeed.PipelineModule([nn.Linear(1, 1)], topology=groups.PipeModelDataParallelTopology(1, 3, 1))


def test_stages_are_those_of_the_package() -> None:
    theirs = pytest.importorskip("deepspeed.runtime.utils")
    draw = random.Random(17)
    for _ in range(150):
        stages = draw.randint(1, 8)
        weights = [draw.choice((0, 1, 7, draw.randint(0, 999))) for _ in range(draw.randint(stages, 30))]
        for parts, method, given in (
            (balanced(weights, stages), "partition_balanced", weights),
            (uniform(len(weights), stages), "partition_uniform", len(weights)),
        ):
            bounds = [int(bound) for bound in getattr(theirs, method)(given, stages)]
            assert [part.start for part in parts] == bounds[:-1] and parts[-1].stop == bounds[-1]


def engine_of(stage: int = 0, module: nn.Module | None = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return deepspeed.initialize(model=module or nn.Linear(2, 1, bias=False), config=config)[0]


def test_an_engine_has_what_scripts_ask_for() -> None:
    engine = engine_of()
    assert engine.optimizer_name() == "sgd" and engine.grid.get_data_parallel_rank() == 0
    assert engine.grid.stage_id == 0 and engine.grid.is_last_stage and engine.grid.stage_to_global(0) == 0
    engine.tput_timer.update_epoch_count()
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
    assert engine.tput_timer.epoch_count == 1 and engine.tput_timer.avg_samples_per_sec() > 0
    before = engine.module.weight.detach().clone()
    engine.offload_states()  # no effect where the state is in the host's memory
    engine.reload_states()
    assert torch.equal(engine.module.weight, before)
    engine.device = torch.device("cuda")
    with pytest.raises(HexadError, match="offload_states: state stays where it is"):
        engine.offload_states()


def test_messages_are_logged_on_the_ranks_that_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hexad")
    engine_of()
    for ranks in ([0], [-1], [1], [], None):
        deepspeed.utils.log_dist(f"on {ranks}", ranks)
    assert [text for text in caplog.messages if " on " in text] == ["[Rank 0] on [0]", "[Rank 0] on [-1]"]


def test_assigned_gradients_replace_a_backward_pass() -> None:
    engine = engine_of(2)
    before = engine.module.weight.detach().clone()
    engine.module.weight.grad = torch.tensor([[0.5, 0.25]])
    engine.step()
    assert torch.allclose(before - engine.module.weight, torch.tensor([[0.5, 0.25]]))
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.module.weight.grad = torch.ones(1, 2)
    with pytest.raises(HexadError, match=r"found 1 parameters with an assigned .grad after a backward pass"):
        engine.step()


def test_the_smallest_loss_scale_is_kept_at_stage_0_and_an_error_with_zero() -> None:
    def skips(stage: int) -> Any:
        engine = engine_of(stage, fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1})
        for _ in range(3):
            engine.module.weight.grad = torch.full((1, 2), torch.inf, dtype=torch.float16)
            engine.step()
        return engine

    engine = skips(0)
    assert (engine.skipped_steps, engine.loss_scale()) == (3, 1)
    with pytest.raises(HexadError, match="not finite at the smallest loss scale, 1"):
        skips(1)


class Outside(nn.Module):
    """A model that reads a weight of another module."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if registered:
            deepspeed.zero.register_external_parameter(self, self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.second(self.first(x)), self.first.weight).sum()


def test_a_weight_that_another_module_or_a_hook_reads_is_gathered() -> None:
    """Registered or not, as in DeepSpeed; outside the forward pass nothing is there."""

    def engine(stage: int, registered: bool) -> Any:
        keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
        torch.manual_seed(3)
        return deepspeed.initialize(model=Outside(registered), config={"train_batch_size": 2, **keys})[0]

    def losses(engine: Any) -> Any:
        for _ in range(3):
            loss = engine(torch.ones(2, 4))
            engine.backward(loss)
            engine.step()
            yield loss.item()

    expected = list(losses(engine(0, False)))
    assert list(losses(engine(3, True))) == expected
    unregistered = engine(3, False)
    seen: list[float] = []
    module = unregistered.module

    def watch(*_: Any) -> None:
        seen.append(float(module.second.weight.detach().sum()))

    module.register_forward_hook(watch)
    plain = engine(0, False)
    for loss in losses(unregistered):
        assert loss == expected.pop(0) and seen.pop() == float(plain.module.second.weight.detach().sum())
        assert module.first.weight.detach().numel() == module.second.weight.detach().numel() == 0
        plain.backward(plain(torch.ones(2, 4)))
        plain.step()
    with torch.no_grad():
        assert unregistered(torch.ones(2, 4)).isfinite()
    assert module.first.weight.detach().numel() == 0


@pytest.mark.parametrize("copied", [deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_module_have_their_own_zero_grad(copied: Callable[[nn.Module], nn.Module]) -> None:
    engine = engine_of()
    copy: Any = copied(engine.module)
    engine.backward(engine(torch.ones(2, 2)).sum())
    copy.weight.grad = torch.ones(1, 2)
    copy.zero_grad()
    assert copy.weight.grad is None and engine._accumulation.pending
    engine.module.zero_grad()
    assert not engine._accumulation.pending


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"bfloat16": {"enabled": True}}, torch.bfloat16),
        ({"fp16": {"enabled": "auto"}}, torch.float32),
        ({"bf16": True}, torch.float32),  # which initialize refuses
    ],
)
def test_modules_are_created_in_the_format_of_the_configuration(config: Any, dtype: torch.dtype) -> None:
    with deepspeed.zero.Init(config_dict_or_path=config):
        assert nn.Linear(1, 1).weight.dtype == dtype
    assert nn.Linear(1, 1).weight.dtype == torch.float32
