"""Megatron-Core's ``torch_dist`` checkpoints, imported: training continues as there; damage is refused."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hexad.checkpoint.manifest import verify_files
from hexad.checkpoint.reader import Checkpoint
from hexad.compat.facade.imported import ImportResult
from hexad.compat.megatron.import_checkpoint import TorchDistCheckpoint, import_checkpoint
from hexad.config import HexadError
from hexad.model.configuration import build_config
from hexad.planning import resolve
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ...pool import Pool
from ...small import microbatch_of
from ...training.command import call
from ..resumed import resumed
from .saved_checkpoints import AFTER, BETAS, DECAY, EPS, LR, MODELS, SEQUENCE, STEPS, VOCAB, samples_of, saved

ITERATION = f"iter_{STEPS:07d}"


def run_file(kind: str, directory: Path, **changes: Any) -> Path:
    """A run.yaml with the model."""
    path = directory / f"{kind}.yaml"
    tree = {"model": MODELS[kind] | changes, "data": {"sequence": SEQUENCE}}
    path.write_text(yaml.safe_dump(tree))
    return path


def imported(source: Path, to: Path, model: Path, weights_only: bool = False) -> ImportResult:
    """Import as the command does."""
    return import_checkpoint(
        source, to, lambda config: resolve(config, Layout(world=1)).config, model, weights_only
    )


def continued(load: Path, directory: Path, kind: str, parallel: dict[str, Any]) -> list[float]:
    """Losses of the next steps."""
    config = build_config(
        {
            "run": {"dir": str(directory), "steps": STEPS + AFTER, "device": "cpu"},
            "model": MODELS[kind],
            "data": {"sequence": SEQUENCE},
            "batch": {"micro": 1, "global": 2},
            "parallel": {"bucket_mb": 1e-4, **parallel},
            "precision": {"dtype": "fp32"},
            "optimizer": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "clip": 0},
            "lr_schedule": {"kind": "constant", "warmup": 0},
            "checkpoint": {"load": str(load)},
        }
    )
    layout = Layout.from_settings(config.parallel, 2)
    mesh = Mesh.create(layout, torch.device("cpu"))
    engine = resumed(config, mesh)
    losses = []
    for step in range(STEPS, STEPS + AFTER):
        rows = samples_of(step)[mesh.data.rank :: mesh.data.size].split(1)
        parts = [microbatch_of(row) for row in rows]
        losses.append(engine.train_step(parts).loss)
    return losses


@pytest.mark.parametrize(
    ("kind", "parallel"), [("gpt2", {"pipeline": 2}), ("llama", {"zero": 3}), ("llama", {"tensor": 2})]
)
def test_a_model_trains_on(kind: str, parallel: dict[str, Any], tmp_path: Path, pool: Pool) -> None:
    load = tmp_path / "checkpoint"
    result = imported(saved(kind), load, run_file(kind, tmp_path))
    assert (result.step, result.samples, result.optimizer) == (STEPS, 2 * STEPS, True)
    with Checkpoint(load) as opened:
        assert verify_files(load, opened.manifest) == []
        assert opened.manifest.progress["updates"] == STEPS
        assert opened.manifest.tensors["model.embedding.weight"].shape == (VOCAB, 16)
    losses = pool.run(2, continued, load, tmp_path / "run", kind, parallel)[0]
    assert losses == pytest.approx(torch.load(saved(f"{kind}.pt")), rel=1e-5)


def test_master_weights(tmp_path: Path) -> None:
    imported(saved("llama_bf16"), tmp_path / "checkpoint", run_file("llama", tmp_path))
    given = TorchDistCheckpoint(saved("llama_bf16"))
    own = given.tensors["embedding.word_embeddings.weight"]
    with Checkpoint(tmp_path / "checkpoint") as opened:
        masters = opened.read("model.embedding.weight")
    assert masters.dtype == torch.float32
    rounded = given.read(own, (0, 0), own.shape)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(masters.bfloat16(), rounded[:VOCAB])
    assert not torch.equal(masters, rounded[:VOCAB].float())


def refused(source: Path, to: Path, model: Path, *expected: str) -> None:
    """An error of one line with these words, and no checkpoint."""
    with pytest.raises(HexadError) as raised:
        imported(source, to / "checkpoint", model)
    message = str(raised.value)
    assert "\n" not in message
    for words in expected:
        assert words in message
    assert not [path for path in to.iterdir() if "checkpoint" in path.name]


class Evil:
    """Runs a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize("function", [os.system, eval])
def test_code_is_not_run(function: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copytree(saved("gpt2"), tmp_path / "given")
    mark, model = tmp_path / "run", run_file("gpt2", tmp_path)
    code = f"touch {mark}" if function is os.system else f"open({str(mark)!r}, 'w')"
    metadata, common = (tmp_path / "given" / ITERATION / name for name in (".metadata", "common.pt"))
    content = common.read_bytes()
    torch.save({"iteration": Evil(function, code)}, common)
    refused(tmp_path / "given", tmp_path, model, "common.pt", function.__name__, "could run code")
    common.write_bytes(content)
    metadata.write_bytes(pickle.dumps(Evil(function, code)))
    refused(tmp_path / "given", tmp_path, model, ".metadata", function.__name__, "could run code")
    assert not mark.exists()


def test_states_of_buckets(tmp_path: Path) -> None:
    shutil.copytree(saved("gpt2"), tmp_path / "given")
    path = tmp_path / "given" / ITERATION / "common.pt"
    torch.save({"iteration": STEPS, "optimizer": {"param_state_sharding_type": "dp_reshardable"}}, path)
    refused(tmp_path / "given", tmp_path, run_file("gpt2", tmp_path), "dp_reshardable", "--weights-only")


def test_damage(tmp_path: Path) -> None:
    shutil.copytree(saved("gpt2"), tmp_path / "given")
    folder, model = tmp_path / "given" / ITERATION, run_file("gpt2", tmp_path)
    path = next(iter(sorted(folder.glob("*.distcp"))))
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    refused(tmp_path / "given", tmp_path, model, path.name, "truncated")
    path.write_bytes(bytes(len(content)))
    refused(tmp_path / "given", tmp_path, model, path.name)
    path.unlink()
    refused(tmp_path / "given", tmp_path, model, path.name, "missing")
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:200])
    refused(tmp_path / "given", tmp_path, model, ".metadata")
    (folder / ".metadata").unlink()
    refused(tmp_path / "given", tmp_path, model, "holds no .metadata")


def test_other_models(tmp_path: Path) -> None:
    refused(saved("gpt2"), tmp_path, run_file("llama", tmp_path), "linear_qkv.weight has shape (48, 16)")
    refused(saved("llama"), tmp_path, run_file("gpt2", tmp_path), "position_embeddings.weight", "is missing")
    wide = run_file("gpt2", tmp_path, hidden=32)
    refused(saved("gpt2"), tmp_path, wide, "has shape (16, 16), expected (13, 32)")
    short = run_file("gpt2", tmp_path, layers=1)
    refused(saved("gpt2"), tmp_path, short, "has 2 layers, the model has 1")
    few = run_file("llama", tmp_path, layers=1)
    refused(saved("llama"), tmp_path, few, "found tensor decoder.layers.1", "does not have")


def test_commands(tmp_path: Path) -> None:
    to, source = str(tmp_path / "checkpoint"), f"megatron:{saved('llama')}"
    missing = call("checkpoint", "import", "--from", source, "--to", to)
    assert (missing.status, "--model: missing" in missing.err) == (2, True)
    model = str(run_file("llama", tmp_path))
    result = call("checkpoint", "import", "--from", source, "--to", to, "--model", model, "--json")
    assert result.status == 0, result.err
    document = json.loads(result.out)
    assert (document["family"], document["step"], document["optimizer"]) == ("llama", STEPS, True)
    published = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": SEQUENCE,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    others = ("--model", str(tmp_path / "config.json"), "--weights-only")
    again = call("checkpoint", "import", "--from", source, "--to", f"{to}-2", *others)
    assert again.status == 0, again.err
    assert "weights only, step 0" in again.out
    with Checkpoint(Path(to)) as one, Checkpoint(Path(f"{to}-2")) as two:
        for name in two.manifest.tensors:
            assert torch.equal(one.read(name), two.read(name))
