"""Checkpoints that DeepSpeed wrote, imported: its own values, and training that continues as its own does.

What is not imported is refused in one line that names the file, and nothing is written.
"""

import json
import os
import shutil
from collections.abc import Callable
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
from hexad.compat.deepspeed.import_checkpoint import import_checkpoint, read_state
from hexad.compat.deepspeed.saved_state import load_file
from hexad.compat.facade.imported import ImportResult
from hexad.compat.facade.inert import Inert
from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.model.configuration import build_config
from hexad.model.trained import Trained
from hexad.planning import resolve
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ...pool import Pool
from ...small import microbatch_of
from ...training.command import call
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
TAG = f"global_step{STEPS}"
MODEL = "mp_rank_00_model_states.pt"
SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
SHARD3 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
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


def copied(name: str, to: Path) -> Path:
    """A copy to be damaged; its tag's directory."""
    shutil.copytree(saved(name), to / "given")
    (tag,) = (path for path in (to / "given").iterdir() if path.is_dir())
    return tag


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Save the content of a file with a change."""
    content = load_file(path)
    # What is read as inert would not be written as what it was.
    content.pop("options", None)
    content.get("optimizer_state_dict", {}).pop("loss_scaler", None)
    content.get("optimizer_state_dict", {}).pop("zero_stage", None)
    content.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
    change(content)
    torch.save(content, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def refused(source: Path, to: Path, *expected: str, **options: Any) -> None:
    """An error of one line with these words, and no checkpoint."""
    with pytest.raises(HexadError) as raised:
        imported(source, to / "checkpoint", **options)
    message = str(raised.value)
    assert "\n" not in message
    for words in expected:
        assert words in message
    assert [path.name for path in to.iterdir()] in (["given"], [])


class Evil:
    """Runs a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize("file", [MODEL, SHARD])
@pytest.mark.parametrize("function", [os.system, eval, exec, __import__])
def test_code_is_not_run(file: str, function: Callable[..., Any], tmp_path: Path) -> None:
    tag = copied("zero1_bf16", tmp_path)
    mark = tmp_path / "given" / "run"
    code = f"touch {mark}" if function is os.system else f"open({str(mark)!r}, 'w')"
    edited(tag / file, lambda content: content.update(more=[Evil(function, code)]))
    refused(tmp_path / "given", tmp_path, file, function.__name__, "could run code")
    assert not mark.exists()


def test_members_of_enumerations_are_inert(tmp_path: Path) -> None:
    """Enumerations are inert as Python 3.11.0 to 3.11.3 pickles them: by ``getattr``, which is not called."""
    torch.save({"stage": Evil(getattr, "real", "imag")}, tmp_path / "extra.pt")
    member = load_file(tmp_path / "extra.pt")["stage"]
    assert isinstance(member, Inert)
    assert member.arguments == ("real", "imag")


def test_known_classes_are_inert(tmp_path: Path) -> None:
    from argparse import Namespace

    import numpy as np

    torch.save({"args": Namespace(lr=1.0), "state": np.random.get_state()}, tmp_path / "extra.pt")
    with torch.serialization.safe_globals([Namespace]):  # as packages do that the process imports
        content = load_file(tmp_path / "extra.pt")
        assert Namespace in torch.serialization.get_safe_globals()
    assert isinstance(content["args"], Inert)
    assert content["args"].attributes == {"lr": 1.0}
    assert isinstance(content["state"][1], Inert)


def test_truncated(tmp_path: Path) -> None:
    path = copied("zero1_bf16", tmp_path) / SHARD
    path.write_bytes(path.read_bytes()[:-400])
    refused(tmp_path / "given", tmp_path, str(path), "truncated")


def test_flipped_bit(tmp_path: Path) -> None:
    path = copied("zero1_bf16", tmp_path) / SHARD
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(tmp_path / "given", tmp_path, str(path), "checksum")


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("zero1_bf16", SHARD, "partition_count 2, but 1 files"),
        ("zero1_bf16", SHARD.replace("rank_1", "rank_0"), "the file of rank 0 is missing"),
        ("zero1_bf16", MODEL, "expected mp_rank_00_model_states.pt"),
        ("zero3_fp32", MODEL3, "1 files of model states and 2 of optimizer states"),
        ("zero3_fp32", SHARD3, "2 files of model states and 1 of optimizer states"),
        ("zero1_bf16-universal", "zero/up.weight/fp32.pt", "up.weight/fp32.pt: missing"),
        ("zero1_bf16-universal", "zero/up.weight/exp_avg.pt", "up.weight/exp_avg.pt: missing"),
        ("zero1_bf16-universal", "zero/optimizer_state.pt", "optimizer_state.pt: missing"),
    ],
)
def test_missing(name: str, file: str, words: str, tmp_path: Path) -> None:
    (copied(name, tmp_path) / file).unlink()
    refused(tmp_path / "given", tmp_path, words)


def test_other_steps_mixed_in(tmp_path: Path) -> None:
    tag = copied("zero1_bf16", tmp_path)
    (later,) = (path for path in saved("zero1_bf16-later").iterdir() if path.is_dir())
    shutil.copy(later / SHARD, tag / SHARD)
    refused(tmp_path / "given", tmp_path, MODEL, "several checkpoints are mixed", f"{STEPS} and {STEPS + 1}")
    for path in later.glob("*optim*"):
        shutil.copy(path, tag)
    # All of one step, but not the module's.
    edited(tag / MODEL, lambda content: content.update(global_steps=STEPS + 1))
    refused(tmp_path / "given", tmp_path, "are not those of the module", "several checkpoints are mixed")


def test_other_runs_mixed_in(tmp_path: Path) -> None:
    tag = copied("zero1_bf16", tmp_path)
    shutil.copy(saved("zero2_fp32") / TAG / SHARD3, tag)
    refused(tmp_path / "given", tmp_path, SHARD3, "files of several checkpoints are mixed")


def adam(optimizer: Any) -> Any:
    """The state of the first group."""
    return optimizer["base_optimizer_state"]["state"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o["single_partition_of_fp32_groups"].pop(), "1 tensors, but param_shapes"),
        (lambda o: o["single_partition_of_fp32_groups"].__setitem__(0, torch.zeros(60)), "expected 245"),
        (
            lambda o: o["base_optimizer_state"]["state"][0].__setitem__("exp_avg", torch.zeros(7)),
            "expected 245",
        ),
        (lambda o: o.update(partition_count=[3, 3]), "partition_count 3, but 2 files"),
        (lambda o: adam(o)["step"].fill_(1), f"after 1 and {STEPS} updates"),
    ],
)
def test_inconsistent_shards(change: Callable[[Any], object], words: str, tmp_path: Path) -> None:
    tag = copied("zero1_bf16", tmp_path)
    edited(tag / SHARD, lambda content: change(content["optimizer_state_dict"]))
    refused(tmp_path / "given", tmp_path, words)


@pytest.mark.parametrize("file", ["layer_00-model_00-model_states.pt", "mp_rank_01_model_states.pt"])
def test_model_parallel(file: str, tmp_path: Path) -> None:
    tag = copied("zero1_bf16", tmp_path)
    shutil.copy(tag / MODEL, tag / file)
    refused(tmp_path / "given", tmp_path, file, "ds_to_universal")


def test_directories(tmp_path: Path) -> None:
    refused(tmp_path / "none", tmp_path, "no such directory")
    refused(saved("gpt2-config"), tmp_path, "no DeepSpeed checkpoint; expected mp_rank_00_model_states.pt")
    copied("zero1_bf16", tmp_path)
    (tmp_path / "given" / "latest").write_text("../elsewhere")
    refused(tmp_path / "given", tmp_path, "latest: found '../elsewhere', which is no directory in")


def test_no_moments(tmp_path: Path) -> None:
    tag = copied("zero1_bf16", tmp_path)
    for path in tag.glob("*optim*"):
        edited(path, lambda content: content["optimizer_state_dict"]["base_optimizer_state"]["state"].clear())
    refused(tmp_path / "given", tmp_path, "exp_avg and exp_avg_sq", "--weights-only")
    assert not imported(tmp_path / "given", tmp_path / "checkpoint", weights_only=True).optimizer


def test_ambiguous_state_without_names(tmp_path: Path) -> None:
    refused(saved("none_ambiguous"), tmp_path, "without names", "ZeRO stage 1", "--weights-only")
    imported(saved("none_ambiguous"), tmp_path / "checkpoint", weights_only=True)
    expected = torch.load(saved("none_ambiguous.pt"))["model"]
    with Checkpoint(tmp_path / "checkpoint") as opened:
        for name, value in expected.items():
            assert torch.equal(opened.read(f"model.{name}"), value)


def as_vectors(content: dict[str, Any]) -> None:
    """Store the state as DeepSpeed's fused Adam does, which needs a GPU: each group is one vector."""
    optimizer = content["optimizer"]
    groups = optimizer.pop("fp32_groups")
    optimizer["fp32_groups_flat"] = [torch.cat([tensor.flatten() for tensor in group]) for group in groups]
    inner = optimizer["optimizer_state_dict"]
    states, inner["state"] = inner["state"], {}
    for number, group in enumerate(inner["param_groups"]):
        held = [states[key] for key in group["params"]]
        inner["state"][number] = {
            kind: torch.cat([tensor[kind].flatten() for tensor in held]) for kind in ("exp_avg", "exp_avg_sq")
        }
        group["step"], group["params"] = int(held[0]["step"]), [number]


def test_fused_state_without_names(tmp_path: Path) -> None:
    tag = copied("none_bf16", tmp_path)
    edited(tag / MODEL, as_vectors)
    state, expected = read_state(tag), torch.load(saved("none_bf16.pt"))
    assert state.progress["updates"] == STEPS + 1
    for name, value in expected["model"].items():
        assert torch.equal(state.weights[name].read(name), value)
        for kind, tensors in state.moments.items():
            assert torch.equal(tensors[name].read(name), expected[kind][name])
    edited(tag / MODEL, lambda content: content["module"]["up.bias"].copy_(content["module"]["norm.bias"]))
    assert "without names" in read_state(tag).lacking


def test_other_models(tmp_path: Path) -> None:
    refused(
        saved("llama"), tmp_path, "tensor transformer.wpe.weight", "is missing", model=saved("gpt2-config")
    )
    (tmp_path / "given").mkdir()
    config = json.loads((saved("gpt2-config") / "config.json").read_text())
    (tmp_path / "given" / "config.json").write_text(json.dumps(config | {"vocab_size": 14}))
    words = "transformer.wte.weight has shape (307, 12), the model has (14, 12)"
    refused(saved("gpt2"), tmp_path, words, model=tmp_path / "given")


def test_commands(tmp_path: Path) -> None:
    to = tmp_path / "checkpoint"
    source = f"ds:{saved('gpt2')}"
    result = call("checkpoint", "import", "--from", source, "--to", str(to), "--model",
                  str(saved("gpt2-config") / "config.json"), "--json")  # fmt: skip
    assert result.status == 0, result.err
    document = json.loads(result.out)
    assert document["family"] == "gpt2"
    assert document["step"] == STEPS
    assert document["optimizer"] is True
    assert call("checkpoint", "verify", str(to)).status == 0
    again = call("checkpoint", "import", "--from", source, "--to", str(to))
    assert again.status == 2
    assert "is not empty" in again.err
    other = call("checkpoint", "import", "--from", str(saved("gpt2-config")), "--to", "x", "--weights-only")
    assert other.status == 2
    assert "--weights-only: found with --from" in other.err
