"""Recipes in NeMo 2's words: the settings, and the numbers of ``hexad train``."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ...pool import Pool
from ...training.command import call
from .recipes import SIZES, objects, pretrained

pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Byte tokens."""
    directory = tmp_path_factory.mktemp("data")
    for number in range(30):
        lines = (f"line {n} of {number}: {n * n} is the square of {n}" for n in range(8))
        (directory / f"{number:02}.txt").write_text("\n".join(lines))
    inputs = [str(path) for path in sorted(directory.glob("*.txt"))]
    options = ("--tokenizer", "byte", "--workers", "1", "--output", str(directory / "train"))
    assert call("data", "build", "--input", *inputs, *options).status == 0
    return str(directory / "train")


def settings_of(parts: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The settings of a recipe's objects."""
    from hexad.compat.nemo.recipe import recipe_settings

    trainer, model = parts["trainer"], parts["model"]
    model.optim = parts["optim"]
    trainer.strategy.shard_as(model)
    return recipe_settings(trainer, model, parts["data"], str(directory))[1]


def test_group_of_microbatches(tmp_path: Path, data: str) -> None:
    """The strategy's argument, or the configuration's setting, is ``parallel.schedule_group``."""
    from hexad.compat import nemo as nl
    from hexad.compat.nemo import llm

    module = llm.PreTrainingDataModule([data], 24, nl.tokenizers.AutoTokenizer("byte"), 2, 16)
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    parts = objects(str(tmp_path), module, {**layout, "microbatch_group_size_per_vp_stage": 4}, 8)
    assert settings_of(parts, tmp_path)["parallel"]["schedule_group"] == 4
    parts = objects(str(tmp_path), module, layout, 8)
    parts["model"].architecture.microbatch_group_size_per_vp_stage = 4
    assert settings_of(parts, tmp_path)["parallel"]["schedule_group"] == 4


def test_settings(tmp_path: Path, data: str) -> None:
    """Every group of a run.yaml, by the values of the objects."""
    from hexad.compat import nemo as nl
    from hexad.compat.nemo import llm

    module = llm.PreTrainingDataModule(
        ["0.3", data, "0.7", data], 24, nl.tokenizers.AutoTokenizer("byte"), 2, 16, [8, 4, 64], split="9,1,0"
    )
    given = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    given |= {"num_layers_in_first_pipeline_stage": 1}
    parts = objects(
        str(tmp_path), module, given, 8, plugins=nl.MegatronMixedPrecision("bf16-mixed", fp8="hybrid")
    )
    tree = settings_of(parts, tmp_path)
    assert tree["model"] | {"dropout": 0.0} == tree["model"]
    for name, key in {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "kv_heads": "num_query_groups",
    }.items():
        assert tree["model"][name] == SIZES[key]
    assert (tree["model"]["family"], tree["model"]["rope_theta"]) == ("llama", 500_000)
    assert tree["data"]["train"] == [[0.3, data], [0.7, data]]
    assert (tree["data"]["sequence"], tree["data"]["split"]) == (24, [9.0, 1.0, 0.0])
    assert tree["batch"] == {"micro": 2, "global": 16, "ramp": [8, 4, 64]}
    assert tree["parallel"] | {"tensor": 2, "pipeline": 2, "sequence": True, "zero": 1} == tree["parallel"]
    assert tree["parallel"]["split"] == [1, 3]
    assert tree["precision"] == {"dtype": "fp8", "fp8_weight_gradients": True}
    assert (tree["optimizer"]["lr"], tree["optimizer"]["clip"]) == (0.01, 0.5)
    assert tree["lr_schedule"] == {"kind": "cosine", "warmup": 3, "min_lr": 0.001, "decay_steps": 7}
    assert (tree["run"]["steps"], tree["validate"]["batches"]) == (6, 2)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "context": (2, {"context_parallel_size": 2, "zero": 3}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tensor and pipeline": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def alone(pool: Pool, data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The numbers of one process, with the directory of its run."""
    directory = tmp_path_factory.mktemp("alone")
    return {**pool.run(1, pretrained, str(directory), data, {})[0], "directory": directory / "run"}


def test_equal_to_the_command(alone: dict[str, Any], tmp_path: Path) -> None:
    """The run.yaml that a recipe leaves in its directory, trained by ``hexad train``."""
    path = alone["directory"] / "run.yaml"
    overrides = [f"run.dir={tmp_path / 'run'}", "validate.every=3", "checkpoint.every=0"]
    assert call("train", str(path), "--nproc", "1", *overrides).status == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert alone["losses"] == pytest.approx([line["loss"] for line in lines], rel=1e-6)
    assert alone["rates"] == pytest.approx([line["lr"] for line in lines])
    # Warm-up as NeMo's: a third, two thirds, the whole; then a cosine whose end is the least.
    assert alone["rates"][:3] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    settings = yaml.safe_load(path.read_text())
    assert settings["model"]["layers"] == SIZES["num_layers"]


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n == "tensor and pipeline" else pytest.mark.slow) for n in LAYOUTS]
)
def test_any_layout(pool: Pool, data: str, tmp_path: Path, alone: dict[str, Any], layout: str) -> None:
    """Losses of fp32, whose sums differ in order; the checkpoint is resumed in one process."""
    ranks, given = LAYOUTS[layout]
    found = pool.run(ranks, pretrained, str(tmp_path), data, given, None, 3)[0]
    assert found["losses"] == pytest.approx(alone["losses"][:3], rel=2e-5)
    resumed = pool.run(1, pretrained, str(tmp_path), data, {}, {"resume_if_exists": True})[0]
    assert resumed["losses"] == pytest.approx(alone["losses"][3:], rel=2e-5)
    assert resumed["val"][-1] == pytest.approx(alone["val"][-1], rel=2e-5)
    assert resumed["samples"] == alone["samples"]
