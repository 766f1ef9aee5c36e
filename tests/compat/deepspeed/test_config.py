"""DeepSpeed's configurations: batch arithmetic, defaults, aliases, refusals, and published ones, trained."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hexad.compat import deepspeed
from hexad.compat.deepspeed.config import (
    known,
    nested,
    read_config,
    spelling,
    unknown_keys,
    with_autos_filled,
    without_effect,
)
from hexad.compat.deepspeed.entry import DeepSpeedConfig
from hexad.compat.deepspeed.keys import Keys, Section
from hexad.compat.deepspeed.translate import run_settings
from hexad.config import ConfigError, HexadError
from hexad.model.configuration import load_config

from ...pool import Pool
from ...training.command import call
from .program import Mlp, batch_of
from .published import PUBLISHED, REFUSED


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ((32, 16, 1), 2, (16, 1, 32)),
        ((32, 8, 2), 2, (8, 2, 32)),
        ((32, None, None), 2, (16, 1, 32)),
        ((32, None, 4), 2, (4, 4, 32)),
        ((32, 2, None), 2, (2, 8, 32)),
        ((None, 7, 3), 5, (7, 3, 105)),
        ((None, 7, None), 3, (7, 1, 21)),
    ],
)
def test_two_batch_sizes_infer_the_third(
    given: tuple[Any, ...], ranks: int, expected: tuple[int, ...]
) -> None:
    batch = read_config(sizes(given), ranks).batch
    assert (batch.micro, batch.accumulation, batch.total) == expected


@pytest.mark.parametrize("given", [(33, 17, 2), (32, 18, 1), (33, None, None), (32, None, 5), (32, 64, None)])
def test_batch_sizes_that_do_not_fit_are_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size: found \d+, expected .* data ranks"):
        read_config(sizes(given), 2)


def test_accumulation_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="found neither train_batch_size nor"):
        read_config({"gradient_accumulation_steps": 4}, 2)


def test_the_class_reads_what_deepspeeds_does(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4, "gradient_allreduce_op": "SUM"}')
    config = DeepSpeedConfig(tmp_path / "ds.json")
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (4, 4)
    assert (config.gradient_accumulation_steps, config.gradient_allreduce_op) == (1, "sum")
    with pytest.raises(AttributeError, match="no attribute 'sum'"):
        config.sum  # noqa: B018


def sizes(given: tuple[Any, ...]) -> dict[str, int]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {name: value for name, value in zip(names, given) if value is not None}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key (did you mean 'zero_optimization'?)"),
        (
            {"zero_optimization": {"stag": 1}},
            "zero_optimization.stag: unknown key (did you mean 'stage'?)",
        ),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
            "compression_training: found it enabled; it is not supported: it changes the training; "
            "remove the section",
        ),
        (
            {"zero_optimization": {"stage": 4}},
            "zero_optimization.stage: found 4, expected less than or equal to 3",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bf16.enabled: found true with fp16.enabled: true; enable one of them",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
            "optimizer.params.lr: found auto, which transformers' Trainer fills in; give a value",
        ),
        ({"amp": {"enabled": True}}, "amp: found it enabled; it is not supported: use fp16 or bf16"),
        (
            {"torch_autocast": {"dtype": [1]}},
            "torch_autocast.dtype: found [1], expected 'bfloat16' or 'float16'",
        ),
        (
            {"checkpoint": {"tag_validation": "x"}},
            "checkpoint.tag_validation: found 'x', expected 'Ignore', 'Warn' or 'Fail'",
        ),
        ({"optimizer": {"params": {}}}, "optimizer.type: is missing; give it"),
        ({"optimizer": 3}, "optimizer: found 3, expected a section"),
        ({"fp16": None}, "fp16: found null, expected a section"),
        (
            {"Gradient-Accumulation-Step": 2},
            "Gradient-Accumulation-Step: unknown key (did you mean 'gradient_accumulation_steps'?)",
        ),
        ({"steps_per_print": 8.5}, "steps_per_print: found 8.5, expected an integer"),
        ({"gradient_clipping": "x"}, "gradient_clipping: found 'x', expected a number"),
        ({"gradient_accumulation_steps": "x"}, "gradient_accumulation_steps: found 'x', expected an integer"),
        ({"nebula": 3.5}, "nebula: found 3.5, expected a section or true or false"),
        (
            {"fp16": {"initial_scale_power": 5000}},
            "fp16.initial_scale_power: found 5000, expected less than or equal to 127",
        ),
        (
            {"pipeline": {"activation_checkpoint_interval": -1}},
            "pipeline.activation_checkpoint_interval: found -1, expected greater than or equal to 0",
        ),
    ],
)
def test_mistakes_are_named(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config({"train_batch_size": 4, **tree}, 1)
    assert str(error.value) == message


IGNORED = {
    "zero_optimization.reduce_bucket_size": 16,  # what TRL adds for a reference model
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "_comment": "for 8 GPUs",
    "// note": 1,
    "log": {},
    "monitor_config": {"enabled": True},
    "ratio": 1,
    "stage": 2,
    "offload_optimizer": {"device": "nvme"},
    "num-layers": [1, 2],
    "gradient_accumulation_dtype": "fp32",
    "fp16_old": {"enabled": True},
}
"""Keys at the top level that the package ignores."""


def test_what_the_package_ignores_is_named_and_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    tree = {"train_batch_size": 4, **IGNORED, "zero_optimization": {"stage": 1, "find_unused": "auto"}}
    checked_config = read_config(tree, 1)
    assert (
        checked_config.keys == read_config({"train_batch_size": 4, "zero_optimization": {"stage": 1}}, 1).keys
    )
    names = unknown_keys(tree)
    hints = {"stage": "zero_optimization.stage", "offload_optimizer": "zero_optimization.offload_optimizer"}
    hinted = [key + (f" (did you mean '{hints[key]}'?)" if key in hints else "") for key in IGNORED]
    assert names == [*hinted, "zero_optimization.find_unused"]
    _, notes = run_settings(checked_config)
    assert [note for note in notes if "unknown" in note] == [
        f"{key}: unknown key; no effect" for key in names
    ]
    caplog.set_level(logging.WARNING)
    deepspeed.initialize(model=torch.nn.Linear(2, 2), config={**tree, "zero_optimization": {}})
    (line,) = [record.message for record in caplog.records if "unknown" in record.message]
    assert line == f"unknown keys without effect: {', '.join(hinted)}"


@pytest.mark.parametrize(
    ("fp16", "dtype"),
    [
        ({"enabled": True, "fp16": True, "type": "bfloat16", "loss_scale": 0}, "bf16"),
        ({"enabled": False, "type": "bfloat16"}, "fp32"),
        ({"enabled": True, "type": "fp16"}, "fp16"),
    ],
)
def test_the_format_in_files_of_gpt_neox(fp16: dict[str, Any], dtype: str) -> None:
    assert read_config({"train_batch_size": 4, "fp16": fp16}, 1).dtype == dtype


def _sections(section: type[Section] = Keys, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """(path, key) of every key in the file."""
    for name, info in section.model_fields.items():
        key, inner = spelling(name, info), nested(info)
        yield path, key
        yield from _sections(inner, (*path, key)) if inner is not None else ()


def test_a_key_with_a_letter_too_few_is_misspelt_and_one_that_is_turned_off_is_not() -> None:
    def placed(path: tuple[str, ...], key: str) -> dict[str, Any]:
        tree: dict[str, Any] = {key: 1}
        for section in reversed(path):
            tree = {section: tree}
        return tree

    for path, key in _sections():
        known_here = {other for place, other in _sections() if place == path}
        misspelt = key[: len(key) // 2] + key[len(key) // 2 + 1 :]
        if len(key) > 4 and misspelt not in known_here:
            with pytest.raises(ConfigError, match=r"unknown key .did you mean"):
                known(placed(path, misspelt), Keys)
            known(placed(path, misspelt), Keys, strict=False)
        for other in (f"_{key}", f"//{key}", f"# {key}", f"{key}_old", f"a.{key}"):
            assert len(unknown_keys(placed(path, other))) == 1, (path, other)
            known(placed(path, other), Keys)


@pytest.mark.parametrize(
    "more",
    [
        {"data_efficiency": {"enabled": False, "data_routing": {"enabled": True}}},
        {"data_efficiency": {"enabled": True, "seed": 3, "data_sampling": {"enabled": False}}},
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "num_workers": 2}}},
        {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {}}}},
        {"comms_config": {"verbose": False}, "pipe-parallel-size": 1, "model-parallel-size": 1},
        {"cuda_visible_devices": 0},
        {
            "memory_breakdown": None,
            "pipeline": {"partition": None},
            "zero_optimization": {"overlap_comm": None},
        },
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    ],
)
def test_keys_found_in_the_wild_are_accepted(more: dict[str, Any]) -> None:
    config = read_config({"train_batch_size": 4, **more}, 1)
    assert config.batch.total == 4 and config.keys.data_efficiency is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            "zero_optimization.zenflow: found it enabled",
        ),
        (
            {
                "data_efficiency": {
                    "enabled": True,
                    "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
                }
            },
            "data_efficiency: found it enabled",
        ),
        (
            {"optimizer": {"type": "Lamb"}},
            "with zero_optimization.stage 0, pass an optimizer of another package",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            "torch.optim lacks or defines differently; use AdamW, or, with",
        ),
        ({"optimizer": {"type": "Lion"}}, "found Lion, which torch.optim lacks"),
        ({"optimizer": {"type": "Muon"}}, "Muon only supports 2D"),
        (
            {"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 1}, "matrices": True},
            "zero_optimization.stage: found 1 with Muon, which may need complete parameters",
        ),
    ],
)
def test_what_would_pass_in_silence_is_refused(more: dict[str, Any], message: str) -> None:
    from hexad.compat import deepspeed

    model = torch.nn.Linear(2, 2, bias="matrices" not in more)
    config = {"train_batch_size": 4, **{name: value for name, value in more.items() if name != "matrices"}}
    with pytest.raises(HexadError, match=message):
        deepspeed.initialize(model=model, config=config)


def test_muon_is_pytorchs() -> None:
    from hexad.compat import deepspeed

    config = {"train_batch_size": 4, "optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 2, bias=False), config=config)
    alone = torch.nn.Linear(3, 2, bias=False)
    alone.load_state_dict(engine.module_state_dict())
    muon = torch.optim.Muon(alone.parameters(), lr=1e-2)
    x = torch.tensor([[0.1, 0.2, 0.3]])
    for _ in range(3):
        engine.backward(engine(x).square().sum())
        engine.step()
        muon.zero_grad()
        alone(x).square().sum().backward()
        muon.step()
    torch.testing.assert_close(engine.module.weight, alone.weight)


def test_files_with_comments_and_trailing_commas(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n  // samples\n  "train_batch_size": 4, # of a step\n  "fp16": {"enabled": false,},\n}\n'
    )
    assert read_config(path, 1).batch.total == 4
    path.write_text('{"train_batch_size": 4,\n // again\n "train_batch_size": 8,}')
    with pytest.raises(HexadError, match="key 'train_batch_size' is given twice"):
        read_config(path, 1)
    path.write_text('{"train_batch_size": 4, "x"')
    with pytest.raises(HexadError, match="not valid JSON"):
        read_config(path, 1)
    path.write_text('{"train_batch_size": 4,}')
    with mock.patch.dict(sys.modules, hjson=None), pytest.raises(HexadError, match=r"hexad\[hjson\]"):
        read_config(path, 1)


def test_older_spellings_mean_the_same() -> None:
    older = {
        "train_batch_size": 4,
        "bfloat16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "cpu_offload": True,
            "stage3_gather_fp16_weights_on_model_save": True,
        },
    }
    keys = read_config(older, 1).keys
    assert keys.bf16.enabled
    zero = keys.zero_optimization
    assert zero.offload_optimizer is not None
    assert zero.offload_optimizer.device == "cpu"
    assert zero.gather_16bit_weights_on_model_save
    assert (
        read_config({"train_batch_size": 4, "zero_optimization": True}, 1).keys.zero_optimization.stage == 1
    )


def test_clipping() -> None:
    assert read_config({"train_batch_size": 1}, 1).clip == 1.0
    assert read_config({"train_batch_size": 1, "gradient_clipping": 0}, 1).clip == 0.0
    adam = {"type": "Adam", "params": {"max_grad_norm": 0.5}}
    assert read_config({"train_batch_size": 1, "optimizer": adam}, 1).clip == 0.5
    assert read_config({"train_batch_size": 1, "optimizer": adam, "gradient_clipping": 0.5}, 1).clip == 0.5
    with pytest.raises(
        ConfigError, match=r"max_grad_norm: found 0\.5 with gradient_clipping 2\.0; remove it"
    ):
        _ = read_config({"train_batch_size": 1, "optimizer": adam, "gradient_clipping": 2.0}, 1).clip


def test_keys_without_effect_are_named_with_the_reason() -> None:
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1e8, "contiguous_gradients": True}
    notes = without_effect(read_config({"train_batch_size": 1, "zero_optimization": zero}, 1).keys)
    assert notes == (
        "zero_optimization.overlap_comm: no effect: always on",
        "zero_optimization.reduce_bucket_size: no effect: Hexad sizes its own buffers",
    )


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    with pytest.raises(HexadError, match="no such DeepSpeed configuration"):
        read_config(path, 1)
    path.write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    with pytest.raises(HexadError, match="key 'train_batch_size' is given twice"):
        read_config(path, 1)
    path.write_text('{"train_batch_size": 1 2 [}')
    with pytest.raises(HexadError, match="line 1, column 24: not valid JSON"):
        read_config(path, 1)
    path.write_text("[]")
    with pytest.raises(HexadError, match="found a list"):
        read_config(path, 1)


# Published ones


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_become_a_run(name: str) -> None:
    tree, _ = with_autos_filled(PUBLISHED[name], 8)
    settings, _ = run_settings(read_config(tree, 8))
    config = load_config({**settings, "run": {"steps": 5}})
    assert config.parallel.zero == PUBLISHED[name].get("zero_optimization", {}).get("stage", 0)
    assert config.optimizer.clip == 1.0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    tree, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        run_settings(read_config(tree, 8))


@pytest.mark.parametrize(
    ("adam", "schedule", "message"),
    [
        (
            {},
            ("WarmupLR", {"warmup_num_step": 10}),
            "warmup_num_step: unknown key (did you mean",
        ),
        ({"beta": [0.9, 0.95]}, None, "optimizer.params.beta: unknown key (did you mean 'betas'?)"),
        (
            {"amsgrad": True},
            None,
            "params.amsgrad: found true, expected false: a run.yaml has",
        ),
        (
            {"bias_correction": False},
            None,
            "bias_correction: found false, expected true: AdamW always",
        ),
        ({"betas": 0.9}, None, "optimizer.params.betas: found 0.9, expected [beta1, beta2]"),
        ({"betas": [0.9, 2]}, None, "optimizer.params.betas: found 2, expected less than 1"),
        ({"max_grad_norm": "x"}, None, "optimizer.params.max_grad_norm: found 'x', expected a number"),
        ({"betas": [0.9]}, None, "optimizer.params.betas: found [0.9], expected [beta1, beta2]"),
        (
            {"lr": "fast"},
            ("WarmupCosineLR", {"total_num_steps": 9}),
            "lr: found 'fast', expected a number",
        ),
        ({}, ("WarmupDecayLR", {}), "scheduler.params.total_num_steps: is missing; give it"),
        ({}, ("WarmupCosineLR", {}), "scheduler.params.total_num_steps: is missing; give it"),
        (
            {},
            ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": "x"}),
            "scheduler.params.cos_min_ratio: found 'x', expected a number",
        ),
    ],
)
def test_parameters_without_counterpart_are_refused(
    adam: dict[str, Any], schedule: tuple[str, dict[str, Any]] | None, message: str
) -> None:
    tree: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": adam}}
    if schedule is not None:
        tree["scheduler"] = {"type": schedule[0], "params": schedule[1]}
    with pytest.raises(ConfigError) as error:
        run_settings(read_config(tree, 1))
    assert message in str(error.value), str(error.value)


def test_parameters_of_a_schedule() -> None:
    params = {"warmup_num_steps": 5, "total_num_steps": 20, "warmup_min_lr": 1e-5, "warm": 1}
    tree = {"train_batch_size": 1, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    settings, _ = run_settings(read_config(tree, 1), strict=False)
    assert settings["lr_schedule"] == {"kind": "linear", "warmup": 5, "decay_steps": 20, "min_lr": 1e-5}
    assert settings["optimizer"]["lr"] == 1e-3  # DeepSpeed's, for any rate of the optimizer


@pytest.mark.parametrize(
    "keys",
    [
        {"pipeline": {"activation_checkpoint_interval": 1}},
        {"data_parallel_size": 1},
        {"communication_data_type": "bf16"},
        {"managed_gradient_accumulation": False},
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"dataloader_drop_last": True},
        {"data_types": {"buffer_dtype": "bf16"}},
        {"data_types": {"grad_accum_dtype": "fp16"}},
        {"zero_allow_untested_optimizer": True},
        {"checkpoint": {"tag_validation": "Fail"}},
    ],
)
def test_keys_that_a_run_does_not_have_are_reported(keys: dict[str, Any]) -> None:
    (name, value), *_ = keys.items()
    key = ".".join([name, *value]) if isinstance(value, dict) else name
    plain, plain_notes = run_settings(read_config({"train_batch_size": 1}, 1))
    settings, notes = run_settings(read_config({"train_batch_size": 1, **keys}, 1))
    assert settings == plain
    (note,) = set(notes) - set(plain_notes)
    assert note.startswith(f"{key}: no effect: "), note


def test_lines_of_the_log_are_as_far_apart() -> None:
    assert run_settings(read_config({"train_batch_size": 1, "steps_per_print": 7}, 1))[0]["log"] == {
        "every": 7
    }


def reduced(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration at a size that a test can train."""
    tree, _ = with_autos_filled(tree, 2)
    for section in {"optimizer", "scheduler"} & tree.keys():
        params = {name: 1e-2 if value == 5e-5 else value for name, value in tree[section]["params"].items()}
        tree[section] = {**tree[section], "params": params}
    sizes = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "train_batch_size": 12}
    tree = {**tree, **sizes}
    if tree.get("fp16", {}).get("enabled"):
        tree["fp16"] = {**tree["fp16"], "initial_scale_power": 8}
    scheduler = tree.get("scheduler")
    if scheduler is not None:
        tree["scheduler"] = {**scheduler, "params": {**scheduler["params"], "warmup_num_steps": 2}}
    return tree


def train_all(trees: list[dict[str, Any]], steps: int) -> list[list[float]]:
    """The losses of a module that each of the configurations trains."""
    from hexad.compat import deepspeed

    all_losses = []
    rank = torch.distributed.get_rank()
    for tree in trees:
        torch.manual_seed(3)
        module = Mlp()
        optimizer = None if "optimizer" in tree else torch.optim.AdamW(module.parameters(), lr=1e-2)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=tree)
        losses = []
        for _ in range(steps):
            for micro in range(2):
                loss = engine(*batch_of("mlp", rank, micro))
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
        all_losses.append(losses)
    return all_losses


def test_published_configurations_train(pool: Pool) -> None:
    trees = [reduced(tree) for tree in PUBLISHED.values()]
    for name, losses in zip(PUBLISHED, pool.run(2, train_all, trees, 6)[0]):
        assert losses[-1] < losses[0], (name, losses)


# The command


def test_the_command_prints_a_run_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PUBLISHED["transformers, stage 3"]))
    arguments = ["config", "from-deepspeed", str(path), "train_micro_batch_size_per_gpu=4", "--world", "2"]
    result = call(*arguments, "gradient_accumulation_steps=2")
    assert result.status == 0, result.error
    assert "# optimizer.params.lr: auto, which the Trainer sets; here 5e-05" in result.out
    run = tmp_path / "run.yaml"
    run.write_text(result.out)
    config = load_config(run)
    assert (config.parallel.zero, config.batch.micro, config.batch.global_) == (3, 4, 16)


def test_the_command_as_json(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PUBLISHED["GPT-NeoX 20B"]))
    result = call("config", "from-deepspeed", str(path), "--json")
    document = json.loads(result.out)
    assert document["config"]["precision"]["loss_scale_initial"] == 4096.0
    names = "zero_optimization.allgather_bucket_size, zero_optimization.reduce_bucket_size"
    assert f"{names}: no effect: Hexad sizes its own buffers" in document["notes"]
    assert call("config", "from-deepspeed", str(tmp_path / "none.json")).status == 2
