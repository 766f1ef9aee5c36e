"""``model.load``: training begins with given weights, in any layout, and goes on without their source."""

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hexad.checkpoint.hugging_face.names import published_tensors
from hexad.checkpoint.hugging_face.weights import opened_model
from hexad.config import Config, ConfigError, dump_config
from hexad.dataset.load.microbatch import Microbatch
from hexad.model.configuration import build_config, load_config
from hexad.model.pretrained import FREE, hugging_face_directory
from hexad.topology.layout import Layout

from ..pool import Pool
from ..training.command import RunFile, call, free_port, write_run
from ..training.command import _rank as train_rank
from . import hugging_face as theirs
from .test_hugging_face import convert, small_run

LAYOUTS: dict[str, dict[str, int]] = {
    "tensor 2": {"tensor": 2},
    "pipeline 2, zero 1": {"pipeline": 2, "zero": 1},
    "data 3, zero 3": {"data": 3, "zero": 3},
    "data 2, tensor 2, zero 2": {"data": 2, "tensor": 2, "zero": 2},
}
EXPERT_LAYOUTS = {
    "expert 2": {"data": 2, "expert": 2},
    "expert 2, expert tensor 2, zero 3": {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2, "zero": 3},
    "expert 2, pipeline 2": {"data": 2, "pipeline": 2, "expert": 2},
}
_EXPERTS = [n for n in theirs.MODELS if any("experts" in key for key in theirs.MODELS[n][1])]
GRID = [
    *itertools.product(LAYOUTS, theirs.MODELS),
    *((layout, name) for layout in EXPERT_LAYOUTS for name in _EXPERTS if "of three" not in name),
]
COVERING = [
    ("tensor 2", "llama, tied, llama3 rope"),
    ("tensor 2", "gpt2, untied, narrow"),
    ("pipeline 2, zero 1", "gpt2"),
    ("pipeline 2, zero 1", "qwen2"),
    ("data 3, zero 3", "qwen3, tied"),
    ("data 3, zero 3", "mistral"),
    ("data 2, tensor 2, zero 2", "qwen2, tied"),
    ("tensor 2", "qwen3_moe"),
    ("expert 2", "mixtral"),
    ("expert 2, pipeline 2", "qwen3_moe, one expert, tied"),
    ("expert 2, expert tensor 2, zero 3", "deepseek_v3"),
]
"""Every layout and family, tied and untied."""


def config_for(load: str, **parallel: int) -> Config:
    return build_config(
        {
            "model": {"load": load},
            "data": {"sequence": 12},
            "batch": {"micro": 1, "global": 6},
            "parallel": {"bucket_mb": 0.01, **parallel},
            "precision": {"dtype": "fp64"},
            "lr_schedule": {"warmup": 0},
        }
    )


Pieces = list[tuple[str, tuple[int, ...], np.ndarray]]


def loaded(load: str, parallel: dict[str, int]) -> tuple[Pieces, list[float]]:
    """This rank's weights after loading, and the losses of two steps."""
    from hexad.engine.engine import Engine
    from hexad.topology.mesh import Mesh

    config = config_for(load, **parallel)
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("data", 1)
    layout = Layout.from_settings(config.parallel, world)
    mesh = Mesh.create(layout, torch.device("cpu"))
    engine = Engine(config, mesh)
    directory = hugging_face_directory(str(config.model.load))
    assert directory is not None
    with opened_model(directory, config.model) as (source, _):
        engine.load_weights(source)
    pieces = [
        (chunk.name, chunk.rectangle.offset, chunk.tensor.detach().numpy().copy())
        for chunk in engine.chunks()
        if chunk.name.startswith("model.")
    ]
    size = 6 // int(layout.data)
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, theirs.VOCAB, (6, 13), generator=generator)
        rows = [index * int(layout.data) + mesh.data.rank for index in range(size)]
        batch = [Microbatch(tokens[[row], :-1].contiguous(), tokens[[row], 1:].contiguous()) for row in rows]
        losses.append(engine.train_step(batch).loss)
    return pieces, losses


def check(directory: Path, parallel: dict[str, int], pool: Pool) -> None:
    """The files' values on every rank to the last bit, all of them on some rank; one process's losses."""
    load = f"hf:{directory}"
    content = theirs.tensors(directory)
    wanted = {
        f"model.{ours}": place.read(content).double().numpy()
        for ours, place in published_tensors(config_for(load).model).items()
    }
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("data", 1)
    results = pool.run(world, loaded, load, parallel)
    seen = {name: np.zeros(values.shape, bool) for name, values in wanted.items()}
    for pieces, _ in results:
        for name, offset, values in pieces:
            place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape))
            np.testing.assert_array_equal(values, wanted[name][place], err_msg=name)
            seen[name][place] = True
    assert [name for name, values in seen.items() if not values.all()] == []
    reference = loaded(load, {})[1]
    for _, losses in results:
        np.testing.assert_allclose(losses, reference, rtol=1e-9)
    assert 1 < reference[0] < 30


@pytest.mark.parametrize(("layout", "name"), COVERING)
def test_every_rank_reads_its_share(layout: str, name: str, tmp_path: Path, pool: Pool) -> None:
    check(theirs.save(name, tmp_path / "hf", torch.bfloat16), (LAYOUTS | EXPERT_LAYOUTS)[layout], pool)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), [case for case in GRID if case not in COVERING])
def test_every_rank_of_any_layout(layout: str, name: str, tmp_path: Path, pool: Pool) -> None:
    check(theirs.save(name, tmp_path / "hf", torch.float32), (LAYOUTS | EXPERT_LAYOUTS)[layout], pool)


def test_kv_heads_on_several_ranks_are_exported_and_loaded(tmp_path: Path, pool: Pool) -> None:
    run = small_run(tmp_path, "qwen2", vocab=theirs.VOCAB)
    assert run.world(pool, 4, "parallel.tensor=4") == [(0, "")] * 4
    convert("export", run.directory, tmp_path / "hf")
    check(tmp_path / "hf", {"tensor": 4}, pool)


def test_settings_of_experts_beside_a_loaded_model(tmp_path: Path) -> None:
    """Those of training are taken; others must be the model's, which a dense one has none of."""
    experts, dense = (theirs.save(name, tmp_path / name) for name in ("qwen3_moe", "qwen3"))

    def loading(directory: Path, moe: dict[str, Any] | None) -> Config:
        return build_config({"model": {"load": f"hf:{directory}", "moe": moe}, "data": {"sequence": 12}})

    free = {"aux_loss": 0.01, "balance": "sequence", "dispatcher": "alltoall", "capacity_factor": 1.5}
    moe = loading(experts, {**free, "experts": 6}).model.moe
    assert moe is not None and {name: getattr(moe, name) for name in free} == free
    assert (moe.experts, moe.top_k, moe.ffn_hidden, moe.normalise) == (6, 3, 20, False)
    for directory, given, message in (
        (experts, {"top_k": 2}, "model.moe.top_k: found 2, but hf:.* has 3; remove one of the two"),
        (experts, {"normalise": True}, "model.moe.normalise: found True"),
        (experts, None, "model.moe: found None, but hf:.* has {'experts': 6"),
        (dense, {"experts": 4}, "model.moe: found {'experts': 4.* has None.*hexad checkpoint upcycle"),
    ):
        with pytest.raises(ConfigError, match=message):
            loading(directory, given)


def test_a_run_resumes_with_other_settings_of_its_experts_training(tmp_path: Path) -> None:
    run = small_run(tmp_path, "mixtral", moe={"experts": 4, "top_k": 2})
    assert run.train().status == 0
    result = run.train("run.steps=3", "model.moe.aux_loss=0.1", "model.moe.dispatcher=alltoall")
    assert result.status == 0, result.err
    error = run.train("run.steps=4", "model.moe.top_k=3").error
    assert error.startswith("model.moe.top_k: found 3, but checkpoint ") and " has 2" in error


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    directory = theirs.save("qwen3, tied", tmp_path / "hf", torch.float64)
    tokens = torch.randint(0, theirs.VOCAB, (6, 13), generator=torch.Generator().manual_seed(0))
    model = theirs.load(directory)
    with theirs.exact_functions(), torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loaded(f"hf:{directory}", {})[1][0] - float(wanted)) < 1e-10


def run_on(tmp_path: Path, load: str, **groups: Any) -> RunFile:
    """A run on bytes that begins with the weights of a model with enough ids for them."""
    if not (tmp_path / "data.idx").exists():
        (tmp_path / "text.txt").write_text("\n".join(f"line {n}: {n * n}" for n in range(200)))
        options = ("--output", str(tmp_path / "data"), "--tokenizer", "byte", "--workers", "1")
        assert call("data", "build", "--input", str(tmp_path / "text.txt"), *options).status == 0
    count = len(list(tmp_path.glob("run*")))
    run = write_run(tmp_path / f"run{count}", str(tmp_path / "data"), run={"steps": 3}, **groups)
    tree = yaml.safe_load(run.path.read_text())
    tree["model"] = {"load": load}
    run.path.write_text(yaml.safe_dump(tree))
    return run


def test_a_run_needs_its_source_once(tmp_path: Path, pool: Pool) -> None:
    """Fine-tuning in two layouts; going on in a third after the source is gone; generating and exporting."""
    directory = theirs.save("gpt2", tmp_path / "hf", torch.float64)
    run = run_on(tmp_path, f"hf:{directory}")
    assert run.train().status == 0
    other = run_on(tmp_path, f"hf:{directory}")
    assert other.world(pool, 2, "parallel.tensor=2") == [(0, "")] * 2
    np.testing.assert_allclose(other.losses, run.losses, rtol=1e-9)
    assert call("config", "check", str(run.path)).status == 0
    document = json.loads(call("train", str(run.path), "--dry-run", "--json").out)
    assert (document["config"]["model"]["hidden"], document["config"]["model"]["vocab"]) == (36, 307)
    # The weights of the directory were the first step's: the loss is not that of random ones.
    anew = run_on(tmp_path, f"hf:{directory}")
    tree = yaml.safe_load(dump_config(load_config(anew.path)))
    tree["model"]["load"] = None
    anew.path.write_text(yaml.safe_dump(tree))
    assert anew.train().status == 0
    assert anew.losses[0] != run.losses[0]
    # Resume wins, and the resolved configuration is enough.
    shutil.rmtree(directory)
    resolved = run.directory / "config.yaml"
    assert load_config(resolved).model.load == f"hf:{directory}"
    assert call("train", str(resolved), "run.steps=5").status == 0
    assert len(run.losses) == 5
    for options in ((), ("parallel.tensor=1",)):
        result = call("generate", str(run.directory), "--prompt", "line 1", "--tokens", "4", *options)
        assert result.status == 0, result.err
    convert("export", run.directory, tmp_path / "out")
    error = call("train", str(run.path)).error
    assert error.startswith(f"model.load: {directory}: no such directory")
    fresh = call("train", str(resolved), f"run.dir={tmp_path / 'fresh'}")
    assert fresh.error.startswith(f"model.load: {directory}: ")


def test_fine_tuning_from_our_own(tmp_path: Path, pool: Pool) -> None:
    """Weights of a run: a fresh optimizer, step 0; of an imported model: as the model itself."""
    directory = theirs.save("llama, tied, llama3 rope", tmp_path / "hf", torch.float64)
    first = run_on(tmp_path, f"hf:{directory}")
    assert first.world(pool, 2, "parallel.data=2", "parallel.zero=3") == [(0, "")] * 2
    second = run_on(tmp_path, str(first.directory))
    assert second.train().status == 0
    assert [line["samples"] for line in second.metrics] == [4, 8, 12]
    assert second.losses[0] < first.losses[0]
    assert load_config(second.path).model.rope_scaling == load_config(first.path).model.rope_scaling
    divided = run_on(tmp_path, str(first.directory))
    assert divided.world(pool, 2, "parallel.tensor=2") == [(0, "")] * 2
    np.testing.assert_allclose(divided.losses, second.losses, rtol=1e-9)
    third = run_on(tmp_path, str(first.newest))
    assert third.train("parallel.data=1").status == 0
    assert third.losses == second.losses
    convert("import", directory, tmp_path / "ours")
    imported = run_on(tmp_path, str(tmp_path / "ours"))
    assert imported.train().status == 0
    np.testing.assert_allclose(imported.losses, first.losses, rtol=1e-9)
    # checkpoint.load of an imported model: the same.
    tree = yaml.safe_load(dump_config(load_config(imported.path)))
    tree["model"]["load"], tree["checkpoint"]["load"] = None, str(tmp_path / "ours")
    tree["run"]["dir"] = str(tmp_path / "loaded")
    imported.path.write_text(yaml.safe_dump(tree))
    assert imported.train().status == 0
    again = [
        json.loads(line)["loss"] for line in (tmp_path / "loaded/metrics.jsonl").read_text().splitlines()
    ]
    assert again == imported.losses


def test_tuning_on_shorter_samples_keeps_the_models_length(tmp_path: Path) -> None:
    """On export: of a model that was loaded, imported before, or tuned twice; of merged adapters."""
    directory = theirs.save("llama", tmp_path / "hf")
    convert("import", directory, tmp_path / "ours")
    first = run_on(tmp_path, f"hf:{directory}")
    adapted = run_on(tmp_path, f"hf:{directory}")
    tree = yaml.safe_load(adapted.path.read_text())
    tree["model"]["lora"] = {"rank": 2}
    adapted.path.write_text(yaml.safe_dump(tree))
    runs = [first, adapted, run_on(tmp_path, str(tmp_path / "ours")), run_on(tmp_path, str(first.directory))]
    for number, run in enumerate(runs):
        assert run.train("run.steps=1", "precision.dtype=fp32").status == 0
        assert yaml.safe_load(run.path.read_text())["data"]["sequence"] == 16 < theirs.LENGTH
        convert("export", run.directory, tmp_path / f"out{number}")
        exported = json.loads((tmp_path / f"out{number}" / "config.json").read_text())
        assert exported["max_position_embeddings"] == theirs.LENGTH, number
    result = call("train", str(runs[-1].path), f"data.sequence={theirs.LENGTH + 1}")
    assert result.error.startswith(
        f"data.sequence: found {theirs.LENGTH + 1}, more than the model's {theirs.LENGTH}"
    )


def test_only_a_complete_model_needs_no_source() -> None:
    """Every setting counts on which weights of the family depend. A file from before there was a multiplier
    is still complete."""
    multipliers = {"attention_multiplier", "residual_multiplier", "rotary_fraction"}
    for family, unused, others in (
        ("llama", ["max_positions"], multipliers),
        ("gpt2", ["rope_theta", "rope_scaling"], multipliers),
        ("granite", ["max_positions"], {"rotary_fraction"}),
        ("phi3", ["max_positions"], multipliers - {"rotary_fraction"}),
    ):
        model = load_config({"model": {"family": family, "vocab": 307}}).model
        tree = model.model_dump(exclude={*unused, "preset", *FREE}) | {"load": "hf:nowhere"}
        older = {key: value for key, value in tree.items() if key not in others}
        assert load_config({"model": tree}).model == load_config({"model": older}).model
        for name in ("qk_norm", *(multipliers - others)):
            with pytest.raises(ConfigError, match=r"model\.load: nowhere: no such directory"):
                load_config({"model": {key: value for key, value in tree.items() if key != name}})


def test_settings_given_beside_the_weights(tmp_path: Path) -> None:
    directory = theirs.save("mistral", tmp_path / "hf")
    load = f"hf:{directory}"
    good = build_config({"model": {"load": load, "hidden": 36, "kv_heads": "auto", "dropout": 0.1}})
    assert (good.model.kv_heads, good.model.head_dim, good.model.dropout) == (2, 10, 0.1)
    assert build_config(yaml.safe_load(dump_config(good))) == good
    run = run_on(tmp_path, load)
    for setting, given in (("model.hidden", "40"), ("model.norm_eps", "0.1"), ("model.family", "llama")):
        result = call("train", str(run.path), f"{setting}={given}")
        assert result.status == 2
        assert result.error.startswith(f"{setting}: found ")
        assert load in result.error
        assert given in result.error
    error = call("train", str(run.path), "model.preset=gpt2").error
    assert error.startswith("model.")
    error = call("config", "check", str(run.path), "checkpoint.load=elsewhere").error
    assert error.startswith(f"model.load: found '{load}' beside checkpoint.load 'elsewhere'")
    error = call("config", "check", str(run.path), f"model.load={directory}").error
    assert error.startswith(f"model.load: {directory}: neither a run nor a checkpoint")
    assert f"hf:{directory}" in error
    error = call("show", "memory", str(run.path), "model.load=hf:nowhere").error
    assert error.startswith("model.load: nowhere: no such directory")
    assert call("show", "memory", str(run.path)).status == 0


def test_weights_that_would_be_rounded(tmp_path: Path, pool: Pool) -> None:
    run = run_on(tmp_path, f"hf:{theirs.save('qwen2', tmp_path / 'hf', torch.float64)}")
    outcomes = run.world(pool, 2, "precision.dtype=bf16", "parallel.data=2")
    assert {status for status, _ in outcomes} == {2}
    assert len({message for _, message in outcomes}) == 1
    assert (
        "model.embed_tokens.weight in float64, which does not fit into this run's float32" in outcomes[0][1]
    )


def test_files_that_differ_between_ranks(tmp_path: Path, pool: Pool) -> None:
    """As on hosts without a common file system: reported before the first step."""
    run = run_on(tmp_path, "hf:model")
    for rank in range(2):
        theirs.save("gpt2", tmp_path / str(rank) / "model", torch.bfloat16, shard="1GB" if rank else "60KB")
    outcomes = pool.apart(2, in_own_directory, str(run.path), str(tmp_path), free_port())
    assert {status for status, _ in outcomes} == {2}
    assert all("what model.load names" in message for _, message in outcomes)


def in_own_directory(rank: int, world: int, path: str, where: str, port: int) -> tuple[int, str]:
    """Train where a relative path leads each rank to another directory."""
    before = os.getcwd()
    os.chdir(Path(where) / str(rank))
    try:
        return train_rank(rank, world, [path, "parallel.data=2"], port)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("ours", [False, True], ids=["hf", "imported"])
def test_what_the_source_says_beside_its_weights_is_exported(tmp_path: Path, ours: bool) -> None:
    """Also after the source is gone, of a model that was tuned twice, and with adapters."""
    directory = theirs.save("llama", tmp_path / "hf")
    generation = {"eos_token_id": [0, 2], "pad_token_id": 3, "temperature": 0.6, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    settings = json.loads((directory / "config.json").read_text())
    changed = {**settings, "pretraining_tp": 2, "pad_token_id": 3, "eos_token_id": [0, 2]}
    (directory / "config.json").write_text(json.dumps(changed))
    load = f"hf:{directory}"
    if ours:
        convert("import", directory, tmp_path / "ours")
        load = str(tmp_path / "ours")
    first = run_on(tmp_path, load)
    assert first.train("run.steps=1", "precision.dtype=fp32").status == 0
    second = run_on(tmp_path, str(first.directory))
    tree = yaml.safe_load(second.path.read_text())
    tree["model"]["lora"] = {"rank": 2}
    second.path.write_text(yaml.safe_dump(tree))
    assert second.train("run.steps=1", "precision.dtype=fp32").status == 0
    shutil.rmtree(directory)
    for number, run in enumerate((first, second)):
        convert("export", run.directory, tmp_path / f"out{number}")
        exported = json.loads((tmp_path / f"out{number}" / "config.json").read_text())
        kept = {name: exported[name] for name in ("pretraining_tp", "pad_token_id", "eos_token_id")}
        assert kept == {"pretraining_tp": 2, "pad_token_id": 3, "eos_token_id": [0, 2]}
        written = json.loads((tmp_path / f"out{number}" / "generation_config.json").read_text())
        # The runs' documents end with the tokenizer's token.
        assert written == {**generation, "eos_token_id": [0, 2, 256]}
