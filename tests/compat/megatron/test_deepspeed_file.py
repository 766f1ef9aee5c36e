"""The file of ``--deepspeed_config``: it determines what no flag does, contradicts none, and is reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from hexad.compat.megatron.arguments import derive, parse
from hexad.compat.megatron.translate import translate, translated

from .test_translate import SMALL, problem, resolved, small

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 8,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "initial_scale_power": 10},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "scheduler": {"type": "WarmupLR"},
}
FILE = ["--deepspeed", "--deepspeed_config", "ds.json"]


def test_files_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file determines what no flag does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    translation = translate([*SMALL, *FILE])
    config = resolved(translation).config
    assert (config.parallel.zero, config.memory.offload, config.optimizer.clip) == (2, "optimizer", 0.5)
    assert (config.precision.dtype, config.precision.loss_scale_initial) == ("fp16", 1024.0)
    assert config.precision.loss_scale_window == 1000
    assert "ds.json: scheduler: no effect: the flags determine it" in translation.notes
    line = parse([*SMALL, *FILE, "--fp16", "--loss-scale-window", "50"])  # of which the file says nothing
    derive(line.arguments)
    assert translated(line).tree["precision"]["loss_scale_window"] == 50
    assert (line.arguments.zero_stage, line.arguments.clip_grad, line.arguments.fp16) == (2, 0.5, True)
    script = translated(line, script=True)  # whose deepspeed.initialize uses the optimizer of the file
    assert script.tree == translated(line).tree and not [note for note in script.notes if "ds.json" in note]
    (tmp_path / "ds.json").write_text('{"gradient_allreduce_op": "sum"}')
    assert translated(line, script=True).tree["batch"]["global"] == 8
    assert "a run.yaml has the mean" in str(problem(*SMALL, *FILE))
    (tmp_path / "ds.json").write_text("{}")
    assert small(*FILE) == small()
    for flag in ("--deepspeed", "--deepspeed_config=ds.json"):
        assert "no effect without" in translate([*SMALL, flag]).notes[-1]


@pytest.mark.parametrize(
    ("more", "keys", "text"),
    [
        ("--global-batch-size 16", {}, "found 16 (batch.global), but ds.json has train_batch_size 8"),
        ("--micro-batch-size 2", {}, "has train_micro_batch_size_per_gpu 1; make them equal"),
        ("--zero-stage 1", {}, "found 1 (parallel.zero), but ds.json has zero_optimization.stage 2"),
        ("--use-torch-fsdp2", {}, "has zero_optimization.stage 2"),
        ("--clip-grad 1.0", {}, "has gradient_clipping 0.5"),
        ("--bf16", {}, "has fp16.enabled true"),
        ("--bf16", {"fp16": {}, "bf16": {"enabled": False}}, "has bf16.enabled false"),
        ("--fp16 --initial-loss-scale 4", {}, "has fp16.initial_scale_power 10"),
        ("", {"gradient_accumulation_steps": 4}, "8 passes x 1 data ranks, but ds.json has"),
        ("", {"tensor_parallel": {"autotp_size": 2}}, "found 1 (parallel.tensor)"),
        ("", {"zero_optimisation": {}}, "ds.json: zero_optimisation: unknown key (did you mean"),
        ("", {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "found nvme"),
        ("--deepspeed_config no.json", {}, "no.json: no such DeepSpeed configuration"),
        (
            "--bf16 --grad-reduce-in-bf16",
            {"fp16": {}, "bf16": {"enabled": True}, "communication_data_type": "fp32"},
            "found bf16 (precision.reduce), but ds.json has communication_data_type",
        ),
        (
            "--bf16 --grad-reduce-in-bf16",
            {"fp16": {}, "data_types": {"grad_accum_dtype": "fp32"}},
            "found bf16 (precision.accumulate), but ds.json has data_types.grad_accum_dtype",
        ),
        (
            "--micro-batch-size 3 --global-batch-size 4",
            {
                "train_micro_batch_size_per_gpu": None,
                "train_batch_size": None,
                "gradient_accumulation_steps": 2,
            },
            "found 4, expected a multiple of --micro-batch-size 3 x 1 data ranks = 3",
        ),
    ],
)
def test_contradictions_to_a_file_of_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, keys: dict[str, Any], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({**DEEPSPEED, **keys}))
    error = problem(*SMALL, *FILE, *more.split())
    assert text in str(error), str(error)
    assert error.field in (*more.split(), "--deepspeed_config", "--global-batch-size") or "parallel" in text


@pytest.mark.parametrize(
    ("more", "keys", "wanted", "note"),
    [
        ("--bf16", {"communication_data_type": "bf16"}, {"reduce": "bf16"}, ""),
        ("", {"communication_data_type": "bf16"}, {}, "communication_data_type: no effect: bf16 needs"),
        (
            "--fp16",
            {"communication_data_type": "fp16"},
            {},
            "communication_data_type: no effect: fp16 is not",
        ),
        (
            "--bf16",
            {"data_types": {"grad_accum_dtype": "bf16"}},
            {},
            "data_types.grad_accum_dtype: no effect",
        ),
        (
            "--bf16 --grad-reduce-in-bf16",
            {"data_types": {"grad_accum_dtype": "bf16"}},
            {"reduce": "bf16", "accumulate": "bf16"},
            "",
        ),
        (
            "--fp16",
            {"fp16": {"hysteresis": 3}},
            {"loss_scale_hysteresis": 2},
            "hysteresis: no effect without",
        ),
        ("", {"tensor_parallel": {"autotp_size": 0}}, {}, ""),
        ("", {"steps_per_print": 3}, {}, "steps_per_print: no effect: the flags determine it"),
    ],
)
def test_keys_of_a_file_of_deepspeed_reach_the_run_or_are_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    keys: dict[str, Any],
    wanted: dict[str, Any],
    note: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(keys))
    translation = translate([*SMALL, *FILE, *more.split()])
    resolved(translation)
    assert translation.tree["precision"].items() >= wanted.items()
    reported = [line for line in translation.notes if line.startswith("ds.json: ")]
    assert [note in line for line in reported] == ([True] if note else []), reported
