"""NeMo's recipes of models and its plugins, as configurations of NeMo-Run, where that is installed."""

from pathlib import Path
from typing import Any

import pytest

from hexad.config import HexadError

pytest.importorskip("lightning")
run = pytest.importorskip("nemo_run")


def _recipe(name: str) -> Any:
    from hexad.compat.nemo.model_recipes import ModelRecipe
    from hexad.compat.nemo.recipe_table import ROWS

    return ModelRecipe(ROWS[name])


def test_pretraining() -> None:
    """The row's sizes, what a script changes by NeMo's names, and the copy in another process."""
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    from hexad.compat.nemo import llm

    recipe = _recipe("llama31_70b").pretrain_recipe(name="run", performance_mode=True)
    strategy, serializer = recipe.trainer.strategy, ZlibJSONSerializer()
    degrees = ("tensor_model", "pipeline_model", "virtual_pipeline_model")
    sizes = [getattr(strategy, f"{axis}_parallel_size", None) for axis in degrees]
    assert (sizes, strategy.context_parallel_size, strategy.sequence_parallel) == ([4, 4, 5], 2, True)
    assert (recipe.data.global_batch_size, recipe.model.config.seq_length) == (512, 8192)
    assert recipe.__fn_or_cls__ is llm.pretrain
    recipe.model.config.tp_comm_overlap_disable_qkv = True
    strategy.ddp.nccl_ub = True
    assert serializer.deserialize(serializer.serialize(recipe)) == recipe
    small = _recipe("qwen2_7b").pretrain_recipe(tensor_parallelism=1, max_steps=3, global_batch_size=4)
    assert small.trainer.strategy.tensor_model_parallel_size == 1
    assert (small.trainer.max_steps, small.data.global_batch_size) == (3, 4)
    with pytest.raises(TypeError, match="tensor_degree"):
        _recipe("qwen2_7b").pretrain_recipe(tensor_degree=1)
    with pytest.raises(HexadError, match="found precision='fp64', expected one of bf16-mixed, 16-mixed"):
        _recipe("qwen2_7b").pretrain_recipe(precision="fp64")
    with pytest.raises(HexadError, match=r"gradient_clip_val=0\.5; set recipe\.optim\."):
        _recipe("qwen2_7b").pretrain_recipe(gradient_clip_val=0.5)


def test_fine_tuning() -> None:
    """Adapters and all weights have layouts of their own; other schemes are refused."""
    recipe = _recipe("llama3_70b")
    adapters = recipe.finetune_recipe()
    assert (adapters.peft.dim, adapters.peft.alpha, adapters.trainer.num_nodes) == (16, 32, 1)
    assert adapters.resume.restore_config.path == "nemo://meta-llama/Meta-Llama-3-70B"
    weights = recipe.finetune_recipe(peft_scheme="none", seq_length=1024)
    assert (weights.trainer.num_nodes, weights.optim.config.lr) == (4, 5e-6)
    assert weights.data.seq_length == weights.model.config.seq_length == 1024
    assert weights.peft is None
    with pytest.raises(HexadError, match="found peft_scheme='dora', expected lora or none"):
        recipe.finetune_recipe(peft_scheme="dora")


def test_packed_fine_tuning() -> None:
    """NeMo's packed recipe has smaller steps."""
    from hexad.compat.nemo.recipes import default_finetune_recipe

    data = [default_finetune_recipe(None, "x", packed_sequence=packed).data for packed in (False, True)]
    assert [one.global_batch_size for one in data] == [128, 8]
    assert data[1].packed_sequence_specs.packed_sequence_size == data[1].seq_length == 2048


def test_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each changes what it says, once."""
    from hexad.compat.nemo import callbacks, plugins

    recipe = _recipe("llama3_8b").pretrain_recipe()
    executor = run.LocalExecutor(ntasks_per_node=2, launcher="torchrun")
    check = plugins.ConfigValidationPlugin()
    with pytest.raises(HexadError, match="found a recipe without PreemptionCallback; add PreemptionPlugin"):
        check.setup(recipe, executor)
    for _ in range(2):
        plugins.PreemptionPlugin().setup(recipe, executor)
        plugins.MemoryProfilePlugin(dir=str(tmp_path)).setup(recipe, executor)
    profiling = plugins.NsysPlugin(start_step=2, end_step=3, ranks=[1])
    monkeypatch.setattr(plugins.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(plugins.shutil, "which", lambda command: None)
    profiling.setup(recipe, executor)
    assert not executor.get_launcher().nsys_profile
    assert "found no GPU and no command nsys" in caplog.text
    monkeypatch.setattr(plugins.torch.cuda, "is_available", lambda: True)
    with pytest.raises(HexadError, match="found no command nsys; install Nsight Systems"):
        profiling.setup(recipe, executor)
    monkeypatch.setattr(plugins.shutil, "which", lambda command: f"/bin/{command}")
    profiling.setup(recipe, executor)
    variables = dict(executor.env_vars)
    plugins.PerfEnvPlugin(nccl_pp_comm_chunksize=4).setup(recipe, executor)
    check.setup(recipe, executor)
    assert executor.env_vars == variables
    assert executor.get_launcher().nsys_profile
    kinds = [one.__fn_or_cls__ for one in recipe.trainer.callbacks]
    expected = [callbacks.TimingCallback, callbacks.PreemptionCallback, callbacks.MemoryProfileCallback]
    assert kinds == [*expected, callbacks.NsysCallback]
    assert recipe.trainer.callbacks[-1].ranks == [1]
