"""``hexad checkpoint upcycle``: a model with experts that computes what the dense one does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hexad.checkpoint.directory import find_checkpoint
from hexad.checkpoint.hugging_face import weights as reading
from hexad.checkpoint.reader import Checkpoint
from hexad.model.inventory import ModelInventory
from hexad.parallel.rectangle import Rectangle
from hexad.parallel.sharding import fill_initial

from ..training.command import call
from . import hugging_face as theirs
from .test_hugging_face import convert, loaded, logits, sequences, small_run

EXPERTS = ("model.moe.experts=5", "model.moe.top_k=2")


def upcycle(source: object, to: Path, *settings: str) -> dict[str, Any]:
    """The command's JSON."""
    options = ("--from", str(source), "--to", str(to), "--json")
    result = call("checkpoint", "upcycle", *options, *settings)
    assert result.status == 0, result.err
    document: dict[str, Any] = json.loads(result.out)
    return document


def refused(source: object, to: Path, *settings: str) -> str:
    result = call("checkpoint", "upcycle", "--from", str(source), "--to", str(to), *settings)
    assert result.status == 2 and not to.exists()
    return result.error


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(find_checkpoint(path)) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.manifest.tensors}


def difference(one: Path, other: Path, vocab: int = theirs.VOCAB) -> float:
    """Of the logits in float64, relative to the largest."""
    first, second = (logits(path, sequences(vocab)) for path in (one, other))
    return float((first - second).abs().max() / first.abs().max())


@pytest.mark.parametrize(
    ("name", "settings", "family"),
    [
        ("llama", (), "mixtral"),
        ("llama, tied, llama3 rope", ("model.moe.top_k=1", "model.moe.score=topk_softmax"), "mixtral"),
        ("mistral, window", ("model.moe.top_k=4",), "mixtral"),
        ("qwen3", ("model.moe.every=2",), "qwen3_moe"),
        ("qwen2", ("model.moe.score=sigmoid", "model.moe.first_dense=1"), "qwen2"),
        ("deepseek_v3, dense", ("model.moe.score=sigmoid",), "deepseek_v3"),
    ],
)
def test_a_published_model_computes_the_same(
    name: str, settings: tuple[str, ...], family: str, tmp_path: Path
) -> None:
    source = theirs.save(name, tmp_path / "hf", torch.float64)
    convert("import", source, tmp_path / "dense")
    document = upcycle(f"hf:{source}", tmp_path / "moe", *EXPERTS, *settings)
    assert (document["family"], document["same_function"]) == (family, True)
    assert document["active"] < document["parameters"]
    assert call("checkpoint", "verify", str(tmp_path / "moe")).status == 0
    assert difference(tmp_path / "dense", tmp_path / "moe") < 1e-12


def test_a_run_computes_the_same_and_trains_on(tmp_path: Path) -> None:
    """Its tokenizer goes along, transformers loads what is exported, and a run starts from it."""
    run = small_run(tmp_path, "llama")
    assert run.train("precision.dtype=fp64").status == 0
    upcycle(run.directory, tmp_path / "moe", *EXPERTS, "run.seed=5")
    assert difference(run.directory, tmp_path / "moe", 257) < 1e-12
    convert("export", tmp_path / "moe", tmp_path / "out")
    model = theirs.load(tmp_path / "out")
    assert (model.config.model_type, model.config.num_local_experts) == ("mixtral", 5)
    with theirs.exact_functions(), torch.no_grad():
        wanted = model(sequences(257)).logits
    ours = logits(run.directory, sequences(257))
    assert float((ours - wanted).abs().max() / wanted.abs().max()) < 1e-10
    again = call(
        "train", str(run.path), f"run.dir={tmp_path / 'again'}", f"model={{load: {tmp_path / 'moe'}}}",
        "model.moe={aux_loss: 0.01}", "precision.dtype=fp64",
    )  # fmt: skip
    assert again.status == 0, again.err
    wrong = call("train", str(run.path), f"model={{load: {tmp_path / 'moe'}, moe: {{experts: 4}}}}")
    assert "model.moe.experts: found 4, but" in wrong.error


def test_what_is_copied_and_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert from its layer, routers from the seed as a run draws them, biases of routers 0; in small
    slices too."""
    source = theirs.save("qwen2", tmp_path / "hf", torch.bfloat16)
    convert("import", source, tmp_path / "dense")
    settings = (*EXPERTS, "model.moe.score=sigmoid", "model.moe.layers=[0, 2]", "run.seed=9")
    upcycle(f"hf:{source}", tmp_path / "one", *settings)
    monkeypatch.setattr(reading, "SLICE_BYTES", 1000)
    upcycle(tmp_path / "dense", tmp_path / "two", *settings)
    dense, moe, other = (tensors_of(tmp_path / name) for name in ("dense", "one", "two"))
    assert moe.keys() == other.keys()
    assert [name for name in moe if not theirs.same(moe[name], other[name])] == []
    experts = set[str]()
    for layer in (0, 2):
        before = f"model.layers.{layer}.ffn"
        gate, up, down = (dense[f"{before}.{part}.weight"] for part in ("gate", "up", "down"))
        for expert in range(5):
            assert theirs.same(moe[f"{before}.experts.gate_up"][expert], torch.stack((gate, up)))
            assert theirs.same(moe[f"{before}.experts.down"][expert], down)
        assert not moe[f"{before}.router.bias"].any()
        assert moe[f"{before}.router.bias"].dtype == torch.float32
        experts |= {name for name in moe if name.startswith(f"{before}.")}
    others = moe.keys() - experts
    assert all(theirs.same(moe[name], dense[name]) for name in others)
    assert {name for name in dense if name not in others} == {
        f"model.layers.{layer}.ffn.{part}.weight" for layer in (0, 2) for part in ("gate", "up", "down")
    }
    model = loaded(tmp_path / "one", "fp32").model
    weight = ModelInventory(model).weights()["layers.2.ffn.router.weight"]
    drawn = torch.empty(weight.shape, dtype=torch.bfloat16)
    fill_initial(drawn, Rectangle.whole(weight.name, weight.shape), weight, 9)
    assert theirs.same(moe[f"model.{weight.name}"], drawn)
    assert float(drawn.float().std()) == pytest.approx(model.init_std, rel=0.2)


def test_adapters_are_merged(tmp_path: Path) -> None:
    run = small_run(tmp_path, "llama", vocab=257)
    assert run.train("precision.dtype=fp64").status == 0
    options = (f"model.load={run.directory}", "model.lora={rank: 2}", "precision.dtype=fp64")
    tuned = call("train", str(run.path), f"run.dir={tmp_path / 'lora'}", *options)
    assert tuned.status == 0, tuned.err
    upcycle(tmp_path / "lora", tmp_path / "moe", *EXPERTS)
    convert("export", tmp_path / "lora", tmp_path / "merged")
    convert("import", tmp_path / "merged", tmp_path / "dense")
    assert difference(tmp_path / "dense", tmp_path / "moe", 257) < 1e-12


def test_what_cannot_be_upcycled(tmp_path: Path) -> None:
    llama, gpt2, moe = (theirs.save(name, tmp_path / name) for name in ("llama", "gpt2", "mixtral"))
    to = tmp_path / "to"
    for source, settings, message in (
        (llama, ("model.layers=2",), "found model.layers: upcycle sets model.moe and run.seed only"),
        (llama, ("model.moe.exprts=2",), "model.moe.exprts: unknown key"),
        (llama, ("model.moe=null",), "model.moe: found null"),
        (llama, ("model.moe.top_k=9",), "model.moe.top_k: found 9, more than the 8 experts"),
        (llama, ("model.moe.ffn_hidden=20",), "model.moe.ffn_hidden: found 20, but experts are copies of"),
        (llama, ("model.moe.shared_experts=1",), "model.moe.shared_experts: found 1, which no layer of"),
        (gpt2, (), "model.mlp_bias: found true with model.moe"),
        (moe, (), f"--from: hf:{moe} has experts"),
        (tmp_path / "none", (), f"{tmp_path}/none: no such directory"),
    ):
        assert message in refused(f"hf:{source}", to, *settings)
    assert "neither a checkpoint nor a run" in refused(tmp_path / "none", to)
    to.mkdir()
    (to / "mine").write_text("mine")
    result = call("checkpoint", "upcycle", "--from", f"hf:{llama}", "--to", str(to))
    assert "exists and is not empty" in result.error


def test_a_note_where_the_function_changes(tmp_path: Path) -> None:
    source = theirs.save("llama", tmp_path / "hf")
    for number, setting in enumerate(("normalise=false", "scale=2.0", "capacity_factor=1.0", "top_k=1")):
        options = ("--from", f"hf:{source}", "--to", str(tmp_path / str(number)), f"model.moe.{setting}")
        result = call("checkpoint", "upcycle", *options)
        assert result.status == 0, result.err
        assert "note: computes another function" in result.out
