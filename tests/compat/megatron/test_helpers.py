"""Enumerations, functions and settings that scripts import, with those of the installed megatron-core as
oracles; scripts that name GPUs on a host without one; and arguments that are read before ``pretrain``."""

import dataclasses
import importlib
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from hexad.compat import megatron
from hexad.compat.megatron import enums, helpers, initialize, training
from hexad.compat.megatron.installed import NAMES
from hexad.compat.megatron.process_groups import ProcessGroupCollection
from hexad.compat.megatron.tables import EARLIER, FLAGS, SETTINGS
from hexad.config import ConfigError, HexadError

from ... import forks
from ...pool import Pool

LINE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --train-iters 2 --lr 1e-3"
).split()


def test_enumerations_have_the_members_of_the_package() -> None:
    compared = 0
    for module in ("megatron.core.enums", "megatron.core.transformer.enums"):
        for name, theirs in vars(importlib.import_module(module)).items():
            if isinstance(theirs, type) and issubclass(theirs, Enum) and theirs.__members__:
                ours = getattr(enums, name)
                members = {member: value.value for member, value in theirs.__members__.items()}
                assert members.items() <= {m: v.value for m, v in ours.__members__.items()}.items(), name
                compared += 1
    assert compared >= 7


def test_functions_compute_what_those_of_the_package_compute() -> None:
    x, y = torch.linspace(-3, 3, 12).view(3, 4), torch.randn(3, 4)
    mask = torch.rand(3, 4) < 0.5
    calls: dict[str, tuple[Any, ...]] = {
        "core.activations.squared_relu": (x,),
        "core.activations.quick_gelu": (x,),
        "core.transformer.utils.openai_gelu": (x,),
        "core.transformer.utils.gelu_impl": (x,),
        "core.transformer.utils.erf_gelu": (x,),
        "core.transformer.utils.attention_mask_func": (x.clone(), mask),
        "core.utils.divide": (12, 4),
        "core.utils.is_torch_min_version": ("2.0.0",),
    }
    for full, arguments in calls.items():
        assert NAMES[full] == "helpers"
        module, _, name = full.rpartition(".")
        theirs = getattr(importlib.import_module(f"megatron.{module}"), name)
        theirs = getattr(theirs, "_torchdynamo_orig_callable", theirs)  # without compilation
        ours = getattr(helpers, name)
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        assert torch.allclose(torch.as_tensor(ours(*arguments)), torch.as_tensor(theirs(*copies))), full
    fused = importlib.import_module("megatron.core.fusions.fused_bias_dropout")
    for bias in (None, torch.randn(4)):
        for training_now in (True, False):
            rate = 0.0 if training_now else 0.5
            ours = helpers.get_bias_dropout_add(training_now, False)((x, bias), y, rate)
            theirs = fused.get_bias_dropout_add(training_now, False)((x, bias), y, rate)
            assert torch.allclose(ours, theirs)
    torch.manual_seed(1)
    wide = helpers.scaled_init_method_normal(0.02, 8)(torch.empty(400, 400))
    assert float(wide.std()) == pytest.approx(0.02 / 4, rel=0.02)
    layer = helpers.get_linear_layer(3, 2, helpers.init_method_normal(0.1))
    assert layer.weight.shape == (2, 3) and not layer.bias.any()
    with pytest.raises(HexadError, match="divide: found 7, which 2 does not divide"):
        helpers.divide(7, 2)
    with pytest.raises(HexadError, match="cu_seqlens: found packed sequences"):
        helpers.flatten_batch_for_packed_sequences({"cu_seqlens": x})


def test_modules_are_built_of_specifications() -> None:
    spec = megatron.transformer.ModuleSpec(torch.nn.Linear, {"bias": False})
    layer = helpers.build_module(spec, 2, 3)
    assert layer.weight.shape == (3, 2) and layer.bias is None
    inner = megatron.transformer.ModuleSpec(helpers.IdentityOp, submodules=spec)
    assert helpers.build_module(inner)(5) == 5 and helpers.build_module(helpers.IdentityFuncOp)()(5) == 5
    assert helpers.build_module(helpers.openai_gelu) is helpers.openai_gelu


def _groups() -> dict[str, tuple[int, int]]:
    torch.manual_seed(0)
    megatron.parallel_state.initialize_model_parallel(2, 2)
    groups = vars(ProcessGroupCollection.use_mpu_process_groups())
    with pytest.raises(HexadError, match=r"ProcessGroupCollection: found 'xx'; expected some of tp, pp"):
        ProcessGroupCollection.use_mpu_process_groups(["xx"])
    megatron.parallel_state.destroy_model_parallel()
    return {name: (group.size(), group.rank()) for name, group in groups.items() if group is not None}


def test_collections_have_the_groups_of_the_mesh(pool: Pool) -> None:
    for rank, groups in enumerate(pool.run(4, _groups)):
        tensor, pipeline = rank % 2, rank // 2
        assert groups["tp"] == (2, tensor) and groups["pp"] == (2, pipeline) and groups["mp"] == (4, rank)
        assert groups["dp"] == groups["dp_cp"] == groups["cp"] == (1, 0) and groups["embd"][0] == 2
        assert ("pos_embd" in groups) == (pipeline == 0)


def test_arguments_are_read_before_pretrain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *LINE, "--bf16"])
    with pytest.raises(HexadError, match="there are no arguments yet"):
        initialize.get_args()
    args = initialize.parse_args()
    assert args.ffn_hidden_size is None and not hasattr(args, "params_dtype")
    args = initialize.validate_args(args, {"tokenizer_type": "NullTokenizer", "lr": 5.0})
    assert (args.ffn_hidden_size, args.lr, args.tokenizer_type) == (128, 1e-3, "NullTokenizer")
    assert args.params_dtype == torch.bfloat16 and args.num_query_groups == 4
    assert initialize.get_args() is args and training.gpt_config_from_args(args).hidden_size == 32
    with pytest.raises(HexadError, match="validate_args: found other arguments"):
        initialize.validate_args(initialize.Namespace())
    with pytest.raises(HexadError, match="parsed_args: found others than those of parse_args"):
        initialize.initialize_megatron(parsed_args=initialize.Namespace(), skip_mpu_initialization=True)
    with pytest.raises(HexadError, match="gpt_config_from_args: found the class int"):
        training.gpt_config_from_args(args, int)
    monkeypatch.setattr(sys, "argv", ["script", *LINE, "--num-layer", "3"])
    with pytest.raises(ConfigError, match="--num-layer"):
        initialize.parse_and_validate_args()
    monkeypatch.setattr(initialize, "_parsed", None)


def test_earlier_arguments_are_no_flags_and_have_their_defaults() -> None:
    of_flags = {flag.attribute: flag.default for flag in FLAGS.values()}
    assert not of_flags.keys() & EARLIER.keys()
    known = of_flags | EARLIER
    assert known["remote_device"] == "none" and known["moe_use_legacy_grouped_gemm"] is False
    assert not known["use_dataset_only"] and len(EARLIER) > 30


def test_settings_have_the_defaults_of_the_package() -> None:
    theirs = importlib.import_module("megatron.core.transformer.transformer_config")
    compared = 0
    for field in dataclasses.fields(theirs.TransformerConfig):
        default = SETTINGS[field.name].default
        if default is not None:
            assert default == field.default, field.name
            compared += 1
    assert compared > 150
    config = megatron.TransformerConfig(hidden_size=64)
    assert config.hidden_size == 64 and config.use_kitchen is False and config.num_query_groups is None
    with pytest.raises(AttributeError, match="has no attribute 'use_kitchens'"):
        config.use_kitchens  # noqa: B018


ON_CPU = """
import torch
from hexad.compat import megatron
megatron.install()
torch.cuda.set_device(3)
torch.distributed.init_process_group(backend="nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
assert torch.distributed.get_backend() == "gloo"
cuda = torch.device("cuda")
made = [
    torch.ones(2).cuda(), torch.ones(2).cuda(0, non_blocking=True), torch.ones(2).to("cuda:1"),
    torch.ones(2).to(cuda), torch.ones(2).to(device=cuda), torch.zeros(2, device="cuda"),
    torch.tensor([1.0], device=torch.cuda.current_device()), torch.empty(2, device=cuda),
    torch.cuda.FloatTensor([1.0, 2.0]), *torch.nn.Linear(2, 2).cuda().parameters(),
    *torch.nn.Linear(2, 2).to(cuda).parameters(), torch.ones(2).to("cpu"), torch.ones(2).to(torch.float64),
]
assert {tensor.device.type for tensor in made} == {"cpu"} and made[-1].dtype == torch.float64
torch.nn.Linear(2, 2).cuda()(made[0]).sum().backward()
torch.cuda.synchronize()
assert not torch.cuda.is_available() and torch.empty(1, device="meta").device.type == "meta"
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are used where there are any")
def test_what_a_script_does_on_gpus_happens_on_the_cpu() -> None:
    done = forks.run([sys.executable, "-c", ON_CPU], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


REFUSED = """
from megatron.training import get_args
from megatron.training.checkpointing import load_checkpoint

def load():
    load_checkpoint([], None, None)

print("loading")
load()
"""


def test_what_is_refused_ends_a_script_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REFUSED)
    command = [sys.executable, "-m", "hexad.compat.megatron", str(script)]
    done = forks.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "loading\n"
    message = "megatron.training.checkpointing.load_checkpoint: not supported: convert checkpoints with"
    assert done.stderr.startswith(f"hexad: error: {message}") and done.stderr.count("\n") == 1
    assert done.stderr.endswith(" (script.py:6)\n")
