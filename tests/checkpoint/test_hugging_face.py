"""Import and export: what transformers saves, and what it loads of ours."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hexad.checkpoint.directory import find_checkpoint
from hexad.checkpoint.reader import Checkpoint
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.dataset.text.tokenizer_training import train_bpe
from hexad.generation.loading import load_model
from hexad.generation.requests import Request
from hexad.generation.sampling import Sampling
from hexad.model.configuration import build_config
from hexad.model.families import families
from hexad.model.transformer import Transformer
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..generation.replicas import Room, replica_of, results_of
from ..pool import Pool
from ..small import random_tokens
from ..training.command import call, write_run
from . import hugging_face as theirs

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
CASES = [(name, ("fp32", "bf16", "fp64", "fp16")[index % 4]) for index, name in enumerate(theirs.MODELS)]
OTHERS = [(name, dtype) for name in theirs.MODELS for dtype in FORMATS if (name, dtype) not in CASES]


def convert(command: str, source: Path, to: Path, *options: str) -> dict[str, Any]:
    """``hexad checkpoint import`` or ``export``; its JSON."""
    result = call("checkpoint", command, "--from", str(source), "--to", str(to), "--json", *options)
    assert result.status == 0, result.err
    document: dict[str, Any] = json.loads(result.out)
    return document


def refused(command: str, source: Path, to: Path, *options: str) -> str:
    """The error of an import or export, which leaves nothing behind."""
    before = sorted(to.parent.iterdir()) if to.parent.is_dir() else None
    result = call("checkpoint", command, "--from", str(source), "--to", str(to), *options)
    assert result.status == 2
    assert before is None or sorted(to.parent.iterdir()) == before
    return result.error


def loaded(path: Path, dtype: str) -> Transformer:
    """Our model of a checkpoint."""
    path = find_checkpoint(path)
    with Checkpoint(path) as checkpoint:
        tree = dict(checkpoint.manifest.config)
    config = build_config({**tree, "precision": {"dtype": dtype}, "parallel": {}})
    mesh = Mesh.create(Layout(world=1), torch.device("cpu"))
    return load_model(config, path, mesh, [range(config.model.layers)])


def logits(path: Path, tokens: torch.Tensor, dtype: str = "fp64") -> torch.Tensor:
    """``[sequences, length, vocab]`` of the model in a checkpoint, computed by ours."""
    model = loaded(path, dtype)
    with torch.no_grad():
        values = model.logits(model(tokens))
    return values.view(*tokens.shape, -1)[..., : model.vocab]


def sequences(vocab: int = theirs.VOCAB) -> torch.Tensor:
    """Three sequences of 17 random tokens."""
    return random_tokens(vocab, 3, 16, seed=3)


def plain(directory: Path) -> dict[str, Any]:
    """A directory's config.json as transformers understands it."""
    tree: dict[str, Any] = transformers.AutoConfig.from_pretrained(directory).to_dict()
    # The last is in rope_parameters, and beside them where transformers 4 looks for it.
    spare = ("_name_or_path", "transformers_version", "partial_rotary_factor")
    (tree.get("rope_parameters") or {}).pop("type", None)  # the older name of rope_type, beside it
    return {key: value for key, value in tree.items() if key not in spare}


def round_trip(name: str, dtype: str, where: Path) -> None:
    source = theirs.save(name, where / "hf", FORMATS[dtype])
    assert len(list(source.glob("*.safetensors"))) > 1
    document = convert("import", source, where / "ours")
    assert (document["dtype"], document["family"]) == (dtype, theirs.MODELS[name][0])
    assert document["parameters"] == theirs.parameters(theirs.load(source))
    assert call("checkpoint", "verify", str(where / "ours")).status == 0
    exported = convert("export", where / "ours", where / "out", "--shard-size", "50KB")
    assert len(exported["files"]) > 1
    assert not any("rounded" in note for note in exported["notes"])
    theirs.assert_same_tensors(source, where / "out")
    assert plain(where / "out") == plain(source)
    assert (where / "out" / "generation_config.json").read_text() == (
        source / "generation_config.json"
    ).read_text()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_round_trip_is_bit_identical(name: str, dtype: str, tmp_path: Path) -> None:
    round_trip(name, dtype, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), OTHERS)
def test_every_round_trip_is_bit_identical(name: str, dtype: str, tmp_path: Path) -> None:
    round_trip(name, dtype, tmp_path)


@pytest.mark.parametrize("name", theirs.MODELS)
def test_an_imported_model_computes_the_same(name: str, tmp_path: Path) -> None:
    source = theirs.save(name, tmp_path / "hf", torch.float64)
    convert("import", source, tmp_path / "ours")
    model = theirs.load(source)
    with theirs.exact_functions(), torch.no_grad():
        wanted = model(sequences()).logits
    assert wanted.dtype == torch.float64
    ours = logits(tmp_path / "ours", sequences())
    assert float((ours - wanted).abs().max() / wanted.abs().max()) < 1e-10


@pytest.mark.parametrize("name", theirs.MODELS)
def test_log_probabilities_of_generation_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of prompts in parts and of the tokens that follow, in float64, in one pass of theirs over all of it."""
    source = theirs.save(name, tmp_path / "hf", torch.float64)
    convert("import", source, tmp_path / "ours")
    ours, model = loaded(tmp_path / "ours", "fp64"), theirs.load(source)
    config = build_config({"model": ours.model.model_dump(), "inference": {"cache_tokens": 256, "block": 3}})
    mesh = Mesh.create(Layout(world=1), torch.device("cpu"))
    prompts = [[7, 30, 11, 2, 9], list(range(20, 41))]  # on either side of LongRoPE's original length
    requests = [
        Request(tuple(prompt), Sampling(tokens=4, logprobs=0, prompt_logprobs=0)) for prompt in prompts
    ]
    replica = replica_of(ours, config, mesh, Room(batch_tokens=6))
    results = results_of(replica, requests, {0: [1], 1: [2]})
    for prompt, result in zip(prompts, results.values(), strict=True):
        ids = torch.tensor([prompt + result.tokens])
        with theirs.exact_functions(), torch.no_grad():
            wanted = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = wanted.gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        values = [logprob.value for logprob in (*(result.scores or ()), *result.logprobs)]
        assert values == pytest.approx(expected, rel=1e-9)


def test_a_bf16_model_generates_as_transformers_does(tmp_path: Path) -> None:
    """Greedily, the bf16 weights computed with in fp32."""
    source = theirs.save("llama", tmp_path / "hf", torch.bfloat16)
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 280, source)
    convert("import", source, tmp_path / "ours")
    options = ("--prompt", "the quick", "--tokens", "9", "--json", "precision.dtype=fp32")
    result = call("generate", str(tmp_path / "ours"), *options)
    assert result.status == 0, result.err
    prompt = torch.tensor([load_tokenizer(str(source)).encode("the quick")])
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wanted = model.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert json.loads(result.out)["tokens"] == wanted[0, prompt.shape[1] :].tolist()


def test_texts_that_grow_beyond_the_original_length_of_longrope(tmp_path: Path) -> None:
    """Their keys are computed again, as in transformers, whatever the other texts of the batch are."""
    model = theirs.load(theirs.save("phi3, longrope", tmp_path / "hf", torch.float64))
    for parameter in model.parameters():
        parameter.data *= 6 if parameter.dim() > 1 else 1  # positions count
    model.save_pretrained(tmp_path / "large")
    convert("import", tmp_path / "large", tmp_path / "ours")
    prompts = [[7, 30, 11], [5] * 10, list(range(20, 33))]  # the length is 10
    ours = loaded(tmp_path / "ours", "fp64")
    config = build_config({"model": ours.model.model_dump(), "inference": {"cache_tokens": 128}})
    mesh = Mesh.create(Layout(world=1), torch.device("cpu"))
    requests = [Request(tuple(prompt), Sampling(tokens=12)) for prompt in prompts]
    results = results_of(replica_of(ours, config, mesh, Room()), requests, {0: [1, 2, 3]})
    for prompt, text in zip(prompts, results.values(), strict=True):
        ids = list(prompt)
        with theirs.exact_functions(), torch.no_grad():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert text.tokens == ids[len(prompt) :]


def test_documents_beyond_the_original_length_of_dynamic_rope(tmp_path: Path) -> None:
    """Their base grows with their length; texts that would grow are refused."""
    settings = theirs.MODELS["llama, mlp biases, dynamic rope"][1]
    config = {**settings, "max_position_embeddings": 11}
    with mock.patch.dict(theirs.MODELS, {"dynamic": ("llama", config)}):
        source = theirs.save("dynamic", tmp_path / "hf", torch.float64)
    convert("import", source, tmp_path / "ours")
    for length in (9, 11, 12, 17):
        tokens = sequences()[:, :length]
        with theirs.exact_functions(), torch.no_grad():
            wanted = theirs.load(source)(tokens).logits
        ours = logits(tmp_path / "ours", tokens)
        assert float((ours - wanted).abs().max() / wanted.abs().max()) < (1e-10 if length < 12 else 1e-6)
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 280, tmp_path / "tok")
    options = ("--prompt", "the", f"data.tokenizer={tmp_path / 'tok'}", "--tokens")
    result = call("generate", str(tmp_path / "ours"), *options, "30")
    assert "new ones exceed the model's 11 positions" in result.error
    assert call("generate", str(tmp_path / "ours"), *options, "3").status == 0


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_matrix_has_either_name(kept: str, tmp_path: Path) -> None:
    source = theirs.save("llama, tied, llama3 rope", tmp_path / "hf", torch.float64, "1GB")
    file = source / "model.safetensors"
    tensors = load_file(file)
    values = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, kept: values}, file, metadata={"format": "pt"})
    convert("import", source, tmp_path / "ours")
    with Checkpoint(find_checkpoint(tmp_path / "ours")) as checkpoint:
        assert theirs.same(checkpoint.read("model.embedding.weight"), values)


_SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_positions": 8}
_HEADS = {"kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": _SCALING},
    "phi3": {"rotary_fraction": 0.67},
    "deepseek_v2": {"mla": {"q_rank": None, **_HEADS}, "kv_heads": 4},
    "deepseek_v3": {"mla": {"q_rank": 12, **_HEADS}, "kv_heads": 4},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "mixtral": {"moe": {"experts": 6, "top_k": 2}},
    "qwen3_moe": {"moe": {"experts": 4, "top_k": 2, "ffn_hidden": 20, "every": 2, "normalise": False}},
}


def small_run(where: Path, family: str, **model: Any) -> Any:
    """A run of two steps on bytes."""
    (where / "text.txt").write_text("\n".join(f"line {n}: {n * n}" for n in range(200)))
    options = ("--output", str(where / "data"), "--tokenizer", "byte", "--workers", "1")
    assert call("data", "build", "--input", str(where / "text.txt"), *options).status == 0
    sizes = {
        "family": family,
        "layers": 3,
        "hidden": 24,
        "heads": 4,
        "kv_heads": 4 if family == "gpt2" else 2,
    }
    return write_run(
        where / "run", str(where / "data"), run={"steps": 2}, model={**sizes, "init_std": 0.3} | model
    )


@pytest.mark.parametrize("family", families())
def test_an_exported_run_computes_the_same_in_transformers(family: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, family, **OPTIONS.get(family, {}))
    assert run.train().status == 0
    document = convert("export", run.directory, tmp_path / "out")
    assert (document["dtype"], document["files"]) == ("float64", ["model.safetensors"])
    model = theirs.load(tmp_path / "out")
    assert model.config.model_type == family
    with theirs.exact_functions(), torch.no_grad():
        wanted = model(sequences(257)[:, :16]).logits
    ours = logits(run.directory, sequences(257)[:, :16])
    assert float((ours - wanted).abs().max() / wanted.abs().max()) < 1e-10
    # And back again.
    convert("import", tmp_path / "out", tmp_path / "back")
    with Checkpoint(find_checkpoint(run.directory)) as one, Checkpoint(tmp_path / "back") as other:
        for name in other.manifest.tensors:
            assert theirs.same(one.read(name), other.read(name)), name
        saved = (one.manifest.config["model"], other.manifest.config["model"])
        assert {k: v for k, v in saved[0].items() if saved[1][k] != v} in ({}, {"max_positions": 16})


def test_biases_and_frequencies_do_not_depend_on_the_layout(tmp_path: Path, pool: Pool) -> None:
    """In float64: weights after two steps on four ranks are those of one process."""
    scaling = {"type": "dynamic", "factor": 2.0, "original_positions": 5}
    model = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "rope_scaling": scaling}
    run = small_run(tmp_path, "llama", **model)
    assert run.train("precision.dtype=fp64").status == 0
    layout = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true")
    there = ("precision.dtype=fp64", f"run.dir={tmp_path / 'other'}")
    assert run.world(pool, 4, *layout, *there) == [(0, "")] * 4
    with (
        Checkpoint(find_checkpoint(run.directory)) as one,
        Checkpoint(find_checkpoint(tmp_path / "other")) as two,
    ):
        names = [name for name in one.manifest.tensors if name.startswith("model.")]
        assert "model.layers.1.ffn.gate.bias" in names and "model.layers.1.attention.out.bias" in names
        for name in names:
            torch.testing.assert_close(one.read(name), two.read(name), rtol=1e-9, atol=1e-12)
            assert float(one.read(name).abs().max()) > 0


def test_a_model_of_its_own_shape_with_a_published_tokenizer(tmp_path: Path) -> None:
    """What the published model's configuration says of its layers is not true of these."""
    run = small_run(tmp_path, "qwen3")
    published = theirs.save("qwen3", tmp_path / "published")
    assert len(plain(published)["layer_types"]) == 3
    train_bpe(["the lazy dog jumps"] * 9, 280, published)
    built = ("--output", str(tmp_path / "bpe"), "--tokenizer", str(published))
    assert call("data", "build", "--input", str(tmp_path / "text.txt"), *built).status == 0
    data = (f"data.tokenizer={published}", f"data.train={tmp_path / 'bpe'}")
    result = run.train("model.layers=2", *data)
    assert result.status == 0, result.err
    convert("export", run.directory, tmp_path / "out")
    assert theirs.load(tmp_path / "out").config.layer_types == ["full_attention"] * 2


def test_any_layout_exports_the_same(tmp_path: Path, pool: Pool) -> None:
    """Shares of matrices, a model on two stages, bf16 weights rounded from their fp32 masters."""
    run = small_run(tmp_path, "gpt2")
    layout = ("parallel.pipeline=2", "parallel.zero=2", "parallel.data=2")
    assert run.world(pool, 4, *layout, "precision.dtype=bf16") == [(0, "")] * 4
    document = convert("export", run.directory, tmp_path / "out")
    assert (document["dtype"], document["notes"]) == (
        "bfloat16", ["weights are rounded from float32 to bfloat16"]
    )  # fmt: skip
    convert("export", run.directory, tmp_path / "wide", "--dtype", "fp32")
    wide, narrow = theirs.tensors(tmp_path / "wide"), theirs.tensors(tmp_path / "out")
    assert all(theirs.same(values.bfloat16(), narrow[name]) for name, values in wide.items())
    with Checkpoint(find_checkpoint(run.directory)) as checkpoint:
        q = checkpoint.read("model.layers.1.attention.k.weight")
    assert theirs.same(wide["transformer.h.1.attn.c_attn.weight"][:, 24:48].t(), q)
    assert float(wide["transformer.wte.weight"].std()) > 0.1


def test_the_byte_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    run = small_run(tmp_path, "llama")
    assert run.train().status == 0
    convert("export", run.directory, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "  Grüße,\tworld — 漢字 🙂\n\n  don't\x00\x7f" + "".join(map(chr, range(256)))
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)
    assert load_tokenizer(str(tmp_path / "out")).encode(text) == list(text.encode())
    assert plain(tmp_path / "out")["eos_token_id"] == 256
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 256


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    source = theirs.save("llama", tmp_path / "hf")
    train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 280, source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    document = convert("import", source, tmp_path / "deep" / "ours")
    assert document["tokenizer"] == str(tmp_path / "deep" / "ours" / "tokenizer")
    convert("export", tmp_path / "deep" / "ours", tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    # They are under the checkpoint's checksums.
    (tmp_path / "deep" / "ours" / "tokenizer" / "tokenizer.json").write_text("{}")
    assert "tokenizer/tokenizer.json" in call("checkpoint", "verify", str(tmp_path / "deep" / "ours")).out


def test_names_without_a_head_and_old_buffers(tmp_path: Path) -> None:
    """gpt2 as the hub has it: no prefix, causal masks among the weights, a tied head written out."""
    source = theirs.save("gpt2", tmp_path / "hf")
    content = {name.removeprefix("transformer."): values for name, values in theirs.tensors(source).items()}
    content["h.0.attn.bias"] = torch.ones(1, 1, 9, 9)
    content["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    content["lm_head.weight"] = content["wte.weight"].clone()
    save_file(content, tmp_path / "old.safetensors")
    for file in source.glob("model*"):
        file.unlink()
    (tmp_path / "old.safetensors").rename(source / "model.safetensors")
    convert("import", source, tmp_path / "ours")
    convert("export", tmp_path / "ours", tmp_path / "out")
    kept = {n.removeprefix("transformer."): values for n, values in theirs.tensors(tmp_path / "out").items()}
    assert set(content) - set(kept) == {"h.0.attn.bias", "h.0.attn.masked_bias", "lm_head.weight"}
    assert all(theirs.same(content[name], values) for name, values in kept.items())
    content["lm_head.weight"][5, 3] += 1
    save_file(content, source / "model.safetensors")
    assert "lm_head.weight and wte.weight differ" in refused("import", source, tmp_path / "other")


def test_rotary_buffers_are_passed_over(tmp_path: Path) -> None:
    source = theirs.save("llama", tmp_path / "hf", shard="1GB")
    wanted = load_file(source / "model.safetensors")
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(3) for n in range(3)}
    save_file(wanted | old, source / "model.safetensors", {"format": "pt"})
    convert("import", source, tmp_path / "ours")
    convert("export", tmp_path / "ours", tmp_path / "out")
    assert theirs.tensors(tmp_path / "out").keys() == wanted.keys()


def test_values_that_are_no_numbers_pass(tmp_path: Path) -> None:
    source = theirs.save("llama", tmp_path / "hf", torch.bfloat16, shard="1GB")
    content = load_file(source / "model.safetensors")
    content["model.norm.weight"][:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    save_file(content, source / "model.safetensors", {"format": "pt"})
    convert("import", source, tmp_path / "ours")
    convert("export", tmp_path / "ours", tmp_path / "out")
    theirs.assert_same_tensors(source, tmp_path / "out")


def test_mixed_formats_stay(tmp_path: Path) -> None:
    source = theirs.save("qwen2", tmp_path / "hf", torch.bfloat16, shard="1GB")
    content = load_file(source / "model.safetensors")
    content["model.norm.weight"] = content["model.norm.weight"].float()
    save_file(content, source / "model.safetensors", {"format": "pt"})
    assert convert("import", source, tmp_path / "ours")["dtype"] == "bf16"
    convert("export", tmp_path / "ours", tmp_path / "out")
    theirs.assert_same_tensors(source, tmp_path / "out")


def test_slices_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix is ever whole in memory, and the slices make up the same."""
    for name in ("gpt2", "llama"):
        source = theirs.save(name, tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr("hexad.checkpoint.hugging_face.weights.SLICE_BYTES", 1000)
            convert("import", source, tmp_path / f"{name}-ours")
            convert("export", tmp_path / f"{name}-ours", tmp_path / f"{name}-out")
        theirs.assert_same_tensors(source, tmp_path / f"{name}-out")


_SWITCHED = [
    ("llama", {"qkv_bias": True}, "qwen2"),
    ("llama", {"hidden": 22, "head_dim": 6}, "mistral"),
    ("llama", {"head_dim": 8, "rotary_fraction": 0.5}, "phi3"),
    ("phi3", {"qkv_bias": True}, "qwen2"),
    ("phi3", {"qk_norm": True}, "qwen3"),
]


@pytest.mark.parametrize(("ours", "options", "family"), _SWITCHED)
def test_switches_choose_the_architecture(
    ours: str, options: dict[str, Any], family: str, tmp_path: Path
) -> None:
    """A llama with biases is what transformers calls qwen2, one with odd widths a mistral.

    Tensors have the names, and are fused as, in the family that is written.
    """
    run = small_run(tmp_path, ours, **options)
    assert run.train().status == 0
    document = convert("export", run.directory, tmp_path / "out")
    assert document["family"] == family
    assert document["notes"][0].startswith(f"written as {family}")
    with theirs.exact_functions(), torch.no_grad():
        wanted = theirs.load(tmp_path / "out")(sequences(257)[:, :16]).logits
    values = logits(run.directory, sequences(257)[:, :16])
    assert float((values - wanted).abs().max() / wanted.abs().max()) < 1e-10


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    run = small_run(tmp_path, "llama", qkv_bias=True, qk_norm=True)
    assert run.train("run.steps=1").status == 0
    assert "none of LlamaForCausalLM, " in refused("export", run.directory, tmp_path / "out")
    error = refused("export", run.directory, tmp_path / "out", "--shard-size", "five")
    assert error.startswith("--shard-size: found 'five', expected a size such as 5GB")
    assert "neither a checkpoint nor a run" in refused("export", tmp_path / "none", tmp_path / "out")


def test_values_beyond_a_format(tmp_path: Path) -> None:
    source = theirs.save("llama", tmp_path / "hf", shard="1GB")
    content = load_file(source / "model.safetensors")
    content["model.layers.1.mlp.up_proj.weight"][7, 3] = -1e6
    save_file(content, source / "model.safetensors", {"format": "pt"})
    convert("import", source, tmp_path / "ours")
    error = refused("export", tmp_path / "ours", tmp_path / "out", "--dtype", "fp16")
    assert "model.layers.1.mlp.up_proj.weight has values up to 1e+06, beyond the range of float16" in error
    document = convert("export", tmp_path / "ours", tmp_path / "out", "--dtype", "bf16")
    assert document["notes"][0] == "weights are rounded from float32 to bfloat16"
    wide = convert("export", tmp_path / "ours", tmp_path / "wide", "--dtype", "fp64")
    assert wide["notes"] == ["no tokenizer found in data.tokenizer " + str(tmp_path / "ours" / "tokenizer")]


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    source = theirs.save("llama", tmp_path / "hf")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("mine")
    assert "exists and is not empty" in refused("import", source, tmp_path / "used")
    (tmp_path / "empty").mkdir()
    convert("import", source, tmp_path / "empty")
    assert "exists and is not empty" in refused("export", tmp_path / "empty", tmp_path / "used")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["mine"]
    assert "cannot be written" in refused("import", source, Path("/proc/none/ours"))
