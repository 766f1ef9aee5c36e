"""Checkpoints that DeepSpeed wrote, imported: its own values, and training that continues as its own does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.hugging_face.exporting import saved_config
from hexad.checkpoint.hugging_face.names import published_tensors
from hexad.checkpoint.manifest import verify_files
from hexad.checkpoint.reader import Checkpoint
from hexad.compat import deepspeed
from hexad.compat.deepspeed.import_checkpoint import import_checkpoint
from hexad.compat.facade.imported import ImportResult
from hexad.engine.engine import Engine
from hexad.model.configuration import build_config
from hexad.model.trained import Trained
from hexad.planning import resolve
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ...pool import Pool
from ...small import microbatch_of
from ..resumed import resumed
from .saved_checkpoints import (
    AFTER,
    BETAS,
    CASES,
    EPS,
    LR,
    MOMENTS,
    RANKS,
    STEPS,
    UNIVERSAL,
    Odd,
    deepspeed_config,
    groups_of,
    loss_of,
    published_model,
    samples_of,
    saved,
)

MODELS = ("gpt2", "llama")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def imported(source: Path, to: Path, **options: Any) -> ImportResult:
    """Import as the command does."""
    return import_checkpoint(source, to, lambda config: resolve(config, Layout(world=1)), **options)


def check_values(checkpoint: Path, name: str) -> None:
    """Check that a checkpoint has all values to the last bit, and no others."""
    case, expected = CASES[name], torch.load(saved(f"{name}.pt"))
    with Checkpoint(checkpoint) as opened:
        assert verify_files(checkpoint, opened.manifest) == []
        wanted = {f"model.{name}": value for name, value in expected["model"].items()}
        for kind in MOMENTS:
            wanted |= {f"optimizer.{kind}.{name}": value for name, value in expected[kind].items()}
        wanted |= {f"model.{name}": value.reshape(-1) for name, value in expected["buffers"].items()}
        if "model" not in case:
            torch.manual_seed(1)
            frozen = Odd().fixed  # never changed, but rounded
            wanted["model.fixed.weight"] = frozen.weight.detach().to(DTYPES[case["dtype"]])
            wanted["model.fixed.bias"] = frozen.bias.detach().to(DTYPES[case["dtype"]])
        if "frozen" in case:
            short = case["frozen"].removeprefix("inner.")
            initial = published_model(case["model"]).get_parameter(short)
            wanted[f"model.{case['frozen']}"] = initial.detach()
        assert set(opened.manifest.tensors) == set(wanted)
        for name, value in wanted.items():
            read = opened.read(name)
            assert read.dtype == value.dtype, name
            assert torch.equal(read, value), name
        assert opened.manifest.progress["step"] == STEPS
        assert opened.manifest.progress["samples"] == STEPS * RANKS
        # Without ZeRO, DeepSpeed makes an update with zero gradients first if it keeps master weights.
        extra = case["stage"] == 0 and case["dtype"] != "fp32"
        assert opened.manifest.progress["updates"] == STEPS + extra


@pytest.mark.parametrize("name", [name for name in CASES if name != "none_ambiguous"])
def test_values(name: str, tmp_path: Path) -> None:
    result = imported(saved(name), tmp_path / "checkpoint")
    assert (result.step, result.samples, result.optimizer, result.config) == (
        STEPS,
        STEPS * RANKS,
        True,
        None,
    )
    check_values(tmp_path / "checkpoint", name)


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_values(name: str, tmp_path: Path) -> None:
    imported(saved(f"{name}-universal"), tmp_path / "checkpoint")  # found through latest_universal
    check_values(tmp_path / "checkpoint", name)


def test_loss_scale_of_fp16(tmp_path: Path) -> None:
    imported(saved("zero2_fp16") / f"global_step{STEPS}", tmp_path / "checkpoint")  # a tag's directory
    with Checkpoint(tmp_path / "checkpoint") as opened:
        scale = opened.manifest.progress["loss_scale"]
    assert scale == {"scale": 64.0, "clean": STEPS, "patience": 2}


def test_weights_only(tmp_path: Path) -> None:
    result = imported(saved("zero1_bf16"), tmp_path / "checkpoint", weights_only=True)
    assert (result.step, result.samples, result.optimizer) == (0, 0, False)
    with Checkpoint(tmp_path / "checkpoint") as opened:
        assert opened.manifest.weights_only
        assert opened.manifest.progress["updates"] == 0


def settings(load: Path, directory: Path, zero: int) -> dict[str, Any]:
    """Those of the runs in DeepSpeed."""
    return {
        "run": {"dir": str(directory), "steps": STEPS + AFTER, "device": "cpu"},
        "batch": {"micro": 1, "global": RANKS},
        "parallel": {"zero": zero, "bucket_mb": 1e-4},
        "precision": {"dtype": "fp32"},
        "optimizer": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": 0.1, "clip": 0},
        "lr_schedule": {"kind": "constant", "warmup": 0},
        "checkpoint": {"load": str(load)},
    }


def continued_module(load: Path, directory: Path, zero: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the next steps of the module, and this rank's weights after them."""

    def compute(module: Odd, tokens: torch.Tensor, *_: Any) -> torch.Tensor:
        return loss_of(module(tokens[:, :-1]), tokens)

    config = build_config(settings(load, directory, zero))
    mesh = Mesh.create(Layout(world=RANKS), torch.device("cpu"))
    module = Odd()
    engine = Engine(module, mesh, config, compute=compute)
    checkpointer = Checkpointer(config, mesh)
    path = checkpointer.find()
    assert path == load
    engine.restored(checkpointer.load(path, engine.chunks()).progress)
    checkpointer.close()
    assert int(module.norm.seen) == STEPS
    losses = []
    for step in range(STEPS, STEPS + AFTER):
        engine.begin(1)
        losses.append(float(engine.accumulate([samples_of(step)[[mesh.rank]]], 1 / RANKS)) / RANKS)
        engine.reduce()
        engine.update(LR)
    engine.gatherer.settle()
    with torch.no_grad():
        weights = {
            f"{chunk.name} {chunk.rectangle.offset}": (chunk.rectangle, chunk.tensor.clone())
            for chunk in engine.chunks()
            if chunk.name.startswith("model.")
            and not chunk.name.startswith(("model.norm.s", "model.norm.mean"))
        }
    return losses, weights


@pytest.mark.parametrize(("name", "zero"), [("zero2_fp32", 3), ("zero3_fp32", 1)])
def test_a_module_trains_on(name: str, zero: int, tmp_path: Path, pool: Pool) -> None:
    load = tmp_path / "checkpoint"
    imported(saved(name), load)
    expected = torch.load(saved(f"{name}.pt"))
    results = pool.run(RANKS, continued_module, load, tmp_path / "run", zero)
    losses = [sum(parts) for parts in zip(*(losses for losses, _ in results))]
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
    for _, weights in results:
        for rectangle, values in weights.values():
            short = rectangle.name.removeprefix("model.")
            if short in expected["after"]:
                wanted = expected["after"][short][rectangle.slices]
                torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-6)


def continued_script(directory: Path) -> tuple[list[float], dict[str, Any], tuple[int, ...]]:
    """Resume as the script that has saved would, with the compatibility layer of DeepSpeed."""
    module = Odd()
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=groups_of(module), config=deepspeed_config(CASES["scheduled"])
    )
    path, state = engine.load_checkpoint(str(directory), tag="checkpoint")
    assert path is not None
    counters = engine.global_steps, engine.global_samples, engine.skipped_steps
    losses = []
    for step in range(STEPS, STEPS + AFTER):
        tokens = samples_of(step)[[engine.global_rank]]
        loss = loss_of(engine(tokens[:, :-1]), tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item() / RANKS)
    return losses, state, counters


def test_a_script_trains_on(tmp_path: Path, pool: Pool) -> None:
    imported(saved("scheduled"), tmp_path / "checkpoint")
    results = pool.run(RANKS, continued_script, tmp_path)
    losses = [sum(parts) for parts in zip(*(losses for losses, *_ in results))]
    assert losses == pytest.approx(torch.load(saved("scheduled.pt"))["losses"], rel=1e-5)
    for _, state, counters in results:
        assert state == {"epoch": 1}
        assert counters == (STEPS, STEPS * RANKS, 0)


def continued_model(load: Path, directory: Path, zero: int) -> list[float]:
    """Losses of the next steps of the model that the checkpoint's configuration describes."""
    with Checkpoint(load) as opened:
        model = saved_config(opened).model.model_dump(mode="json", by_alias=True)
    tree = settings(load, directory, zero) | {"model": model, "data": {"sequence": 5}}
    config = build_config(tree)
    mesh = Mesh.create(Layout(world=RANKS), torch.device("cpu"))
    engine = resumed(config, mesh)
    losses = []
    for step in range(STEPS, STEPS + AFTER):
        row = samples_of(step)[[mesh.rank]]
        losses.append(engine.train_step([microbatch_of(row)]).loss)
    assert engine.step == STEPS + AFTER
    return losses


@pytest.mark.parametrize(
    ("name", "kind", "zero"),
    [
        ("gpt2", "gpt2", 1),
        ("gpt2-universal", "gpt2", 3),
        ("none_fp32", "gpt2", 0),
        ("gpt2_inner", "gpt2", 2),
        ("llama", "llama", 3),
    ],
)
def test_a_model_trains_on(
    name: str,
    kind: str,
    zero: int,
    tmp_path: Path,
    pool: Pool,
) -> None:
    load = tmp_path / "checkpoint"
    result = imported(saved(name), load, model=saved(f"{kind}-config"))
    assert result.config is not None
    assert result.config.model.family == kind
    assert result.config.optimizer.betas == BETAS
    if name == "gpt2_inner":
        trained = Trained.of(result.config.model)
        weights = published_tensors(result.config.model)
        assert [weight for weight in weights if trained.frozen(weight)] == ["positions.weight"]
    else:
        assert result.config.model.train == "all"
    losses = pool.run(RANKS, continued_model, load, tmp_path / "run", zero)[0]
    expected = torch.load(saved(f"{name.removesuffix('-universal')}.pt"))
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
