"""NeMo's names: its modules as rows of a table, the recipes of models, and the settings of configurations."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hexad.config import HexadError

from ... import forks

pytest.importorskip("lightning")

SCRIPT = """
import inspect
import sys
from megatron.core.dist_checkpointing.validation import StrictHandling
from nemo.collections import llm
from nemo.collections.common.tokenizers.huggingface import AutoTokenizer
from nemo.collections.llm.deploy.base import get_trtllm_deployable
from nemo.collections.llm.evaluation.api import EvaluationConfig
from nemo.collections.llm.gpt.data.hf_dataset import HFMockDataModule
from nemo.collections.llm.gpt.model.gemma3 import Gemma3Model
from nemo.collections.llm.modelopt import ExportConfig, QuantizationConfig
from nemo.collections.llm.recipes import finetune_default, hf_auto_model_for_causal_lm
from nemo.collections.llm.recipes.llama3_8b import MegatronCommOverlapCallback
from nemo.collections.llm.recipes.tp_overlap_configs.userbuffers import (
    TransformerLayerTPOverlapCfg,
    userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192,
)
from nemo.collections.nlp.modules.common.tokenizer_utils import get_nmt_tokenizer
from nemo.lightning.base import DEFAULT_NEMO_CACHE_HOME
from nemo.lightning.pytorch.callbacks.flops_callback import FLOPsMeasurementCallback
from nemo.utils import logging
from nemo.utils.get_rank import is_global_rank_zero
import hexad.compat.nemo.callbacks

assert sys.argv == ["script.py", "--steps", "3"], sys.argv
assert MegatronCommOverlapCallback is hexad.compat.nemo.callbacks.MegatronCommOverlapCallback
assert hasattr(llm, "mixtral_8x7b") and hasattr(llm, "llama3_8b") and hasattr(llm, "adam")
userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192.fc1_fprop.aggregate = True
assert get_nmt_tokenizer("null", vocab_size=99).vocab_size == 100
assert is_global_rank_zero() and DEFAULT_NEMO_CACHE_HOME.name == "nemo"
for use in (llm.deploy, llm.mixtral_8x7b.pretrain_recipe, Gemma3Model, llm.ptq, llm.evaluate):
    try:
        use("anything")
    except Exception as error:
        print(error)
inspect.signature(llm.distill)  # as NeMo-Run does
"""


def test_script_by_the_command(tmp_path: Path) -> None:
    """A script that imports names that Hexad lacks runs until it uses one of them, which ends it with one
    line; a name that is a function and a package is the function."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "hexad.compat.nemo", "script.py", "--steps", "3"]
    result = forks.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    reasons = [line.partition(": not supported: ")[2] for line in result.stdout.splitlines()]
    assert [" ".join(reason.split()[:3]) for reason in reasons] == [
        "serve a checkpoint",
        "experts are not",
        "it is not",
        "quantization, pruning and",
        "evaluate with hexad",
    ]
    last = result.stderr.splitlines()[-1]
    assert last.startswith("hexad: error: nemo.collections.llm.distill: not supported: quantization")
    assert last.endswith("(script.py:36)")
    assert "Traceback" not in result.stderr


def test_module_by_the_command(tmp_path: Path) -> None:
    """A module is run by its name; a name that NeMo's releases lack ends it with one line."""
    text = "import sys\nprint(sys.argv[1:])\nfrom nemo.collections.llm import Nothing\n"
    (tmp_path / "training.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "hexad.compat.nemo", "-m", "training", "--steps", "3"]
    result = forks.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "['--steps', '3']\n"), result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        "hexad: error: found the name nemo.collections.llm.Nothing, which Hexad's nemo does"
    )
    assert last.endswith("(training.py:3)")


def test_a_function_hides_its_module() -> None:
    """Where a system has a package and a function of one name, both can be imported."""
    from hexad.compat.facade.installed import install

    try:
        install(
            ModuleType("hexad_hidden"),
            "system_hidden",
            {},
            {"a.deploy": "use nothing", "a.deploy.base.Server": "use nothing"},
            modules=("a", "a.deploy", "a.deploy.base"),
        )
        from system_hidden.a import deploy  # type: ignore[import-not-found]
        from system_hidden.a.deploy.base import Server  # type: ignore[import-not-found]

        for refused in (deploy, Server, deploy.base):
            with pytest.raises(HexadError, match="use nothing"):
                refused()
            with pytest.raises(HexadError, match="use nothing"):
                signature(refused)  # as NeMo-Run asks for it, and Fiddle

        @dataclass
        class Settings(Server):  # type: ignore[misc]
            size: int = 0

        assert str(signature(Settings.__init__)).startswith("(self, size")
    finally:
        for name in [name for name in sys.modules if name.startswith("system_hidden")]:
            del sys.modules[name]


def test_reasons_name_what_is_missing() -> None:
    """Every name has a reason, and models wherever they are the same one."""
    from hexad.compat.nemo.installed import UNSUPPORTED

    experts = [name for name in UNSUPPORTED if re.match(r"collections\.llm\..*mixtral", name.lower())]
    assert len(experts) > 20
    assert {UNSUPPORTED[name] for name in experts} == {
        "experts are not supported yet outside a run.yaml (model.moe)"
    }
    assert all(why and "\n" not in why for why in UNSUPPORTED.values())


def test_table_of_recipes() -> None:
    """Every row has classes of this package and layouts that divide the ranks it names."""
    from hexad.compat.nemo import models
    from hexad.compat.nemo.recipe_table import KINDS, ROWS, RecipeLayout

    assert len(ROWS) == 35
    for row in ROWS.values():
        config = getattr(models, row.config)()
        assert issubclass(getattr(models, row.model), models.GPTModel)
        assert config.num_layers % (row.layout.pipeline * (row.layout.virtual or 1)) in (0, 14), row.name
        assert config.num_attention_heads % row.layout.tensor == 0
        assert row.layout.sequence <= (row.layout.tensor > 1)
    large = ROWS["llama31_405b"]
    assert large.layout == RecipeLayout(8, 8, 2, 4, sequence=True, ends=True)
    assert large.tuned[True, True] == RecipeLayout(4, 4, 4, sequence=True, ends=True, nodes=3)
    assert (large.kind, large.options["batch"], large.fast) == (KINDS["large"], "6", True)
    assert not ROWS["qwen2_7b"].fast
    assert ROWS["qwen2_7b"].tuned[False, True] == ROWS["qwen2_7b"].tuned[False, False]


def _tree(weights: str | None = None, offload: bool = False, **config: Any) -> dict[str, Any]:
    """The settings of a small model with a configuration's further settings."""
    from hexad.compat import nemo as nl
    from hexad.compat.nemo import llm
    from hexad.compat.nemo.recipe import recipe_settings

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    model = llm.LlamaModel(llm.Llama3Config(**{**sizes, "seq_length": 16, **config}))
    model.weights = weights
    model.optim.config.optimizer_cpu_offload = offload
    data = llm.MockDataModule(16, nl.tokenizers.NullTokenizer(99), 1, 2)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 4, "logger": False}
    trainer = nl.Trainer(strategy=nl.MegatronStrategy(), **options)
    trainer.strategy.shard_as(model)  # type: ignore[attr-defined]
    return recipe_settings(trainer, model, data, "runs/none")[1]


def test_further_settings() -> None:
    """Settings of Megatron-Core that only concern speed change nothing; others are those of their flags."""
    plain = _tree()
    assert plain["model"]["vocab"] == 100
    fast = {"tp_comm_overlap_disable_qkv": True, "cuda_graph_scope": "full_iteration"}
    fast |= {"use_transformer_engine_op_fuser": True, "moe_router_topk": 8, "cpu_offloading": True}
    assert _tree(**fast) == plain
    assert _tree(seq_len_interpolation_factor=4.0)["model"]["rope_scaling"]["factor"] == 4.0


def test_settings_beside_others() -> None:
    """Recomputation beside offloading; beside loaded weights what these do not determine."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert _tree(offload=True, **recompute)["memory"] == {"recompute": "full", "offload": "optimizer"}
    assert _tree("DIR")["model"] == {"load": "DIR"}
    dropped = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
    expected = {"load": "DIR", "dropout": 0.1, "attention_dropout": 0.2}
    assert _tree("DIR", **dropped)["model"] == expected
    assert _tree("DIR", seq_len_interpolation_factor=4.0)["model"]["rope_scaling"]["factor"] == 4.0
    with pytest.raises(HexadError, match="num_layers_in_first_pipeline_stage: found 1 with pipeline_model"):
        _tree(num_layers_in_first_pipeline_stage=1)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "scale": (lambda: _tree(softmax_scale=0.5), "GPTConfig.softmax_scale: found 0.5; it is not supported"),
    "function": (lambda: _tree(init_method=print), "GPTConfig.init_method: found builtin_function_or_method"),
    "flag": (lambda: _tree(fp32_residual_connection=True), "fp32_residual_connection: found True"),
    "offset": (lambda: _tree(glu_linear_offset=1.0), "glu_linear_offset: found 1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_change_numbers(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(HexadError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)


def test_trainer_of_gpus_without_one(caplog: pytest.LogCaptureFixture) -> None:
    """The CPU trains, which is logged; without that the trainer would be refused."""
    import torch

    from hexad.compat import nemo as nl

    if torch.cuda.is_available():
        pytest.skip("needs a host without GPU")
    trainer = nl.Trainer(accelerator="gpu", devices=1, strategy=nl.MegatronStrategy(), logger=False)
    assert trainer.strategy.root_device.type == "cpu"
    assert "found no GPU" in caplog.text
