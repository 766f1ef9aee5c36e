"""Hugging Face directories that cannot be used: one line that names the file and the key or tensor."""

import dataclasses
import json
from math import log
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hexad.config import HexadError
from hexad.config.model import ModelSettings
from hexad.model.families import families, family
from hexad.model.hugging_face import model_settings, read_config

from ..pool import Pool
from . import hugging_face as theirs
from .test_hugging_face import refused
from .test_hugging_face_load import run_on


@pytest.mark.parametrize("name", families())
def test_missing_keys_mean_what_they_mean_to_transformers(name: str) -> None:
    config, kind = transformers.AutoConfig.for_model(name), family(name)
    plain = {"head_dim": None} | {field.name: field.default for field in dataclasses.fields(config)}
    assert {key: value for key, value in kind.absent.items() if plain[key] != value} == {}
    bare: dict[str, Any] = {"model_type": name, "sliding_window": None}
    if name == "deepseek_v2":  # without which its layers cannot be computed
        config.num_experts_per_tok = bare["num_experts_per_tok"] = 6
    ours = model_settings(bare, Path("config.json"))
    full = config.to_dict() | {"sliding_window": None, "architectures": [kind.classes[0]]}
    assert model_settings(json.loads(json.dumps(full, default=str)), Path("config.json")) == ours


SPELLINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0}, "rope_theta": 5e5, "max_position_embeddings": 77},
     {"rope_scaling": {"type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_positions": 77}}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
     {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_positions": 32768, "truncate": True}}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 40.0, "truncate": False, "mscale": 2.0,
                                "mscale_all_dim": 1.0, "original_max_position_embeddings": 512}},
     {"rope_scaling": {"type": "yarn", "factor": 40.0, "original_positions": 512, "truncate": False,
                       "attention_factor": (0.2 * log(40) + 1) / (0.1 * log(40) + 1)}}),
    ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
              "original_max_position_embeddings": 4096, "max_position_embeddings": 131072},
     {"rope_scaling": {"type": "longrope", "factor": 32.0, "original_positions": 4096,
                       "short_factors": [1.0] * 48, "long_factors": [2.0] * 48}}),
    ("llama", {"num_attention_heads": 8, "hidden_size": 80}, {"head_dim": 10, "kv_heads": 8}),
    ("llama", {"torch_dtype": "bfloat16", "pretraining_tp": 2, "_name_or_path": "x"}, {"family": "llama"}),
    ("mistral", {"sliding_window": None, "hidden_size": 64}, {"head_dim": 2, "sliding_window": None}),
    ("mistral", {}, {"sliding_window": 4096}),
    ("phi3", {"sliding_window": 2047}, {"sliding_window": 2047}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 9}, {"qkv_bias": True, "qk_norm": False}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 32}, {"layers": 32}),
    ("qwen2", {"layer_types": ["full_attention"] * 32}, {"layers": 32}),
    ("qwen3", {}, {"head_dim": 128, "qk_norm": True, "qkv_bias": False}),
    ("mixtral", {"num_experts": 5}, {"moe": {"experts": 5, "top_k": 2, "ffn_hidden": 14336,
                                             "score": "softmax_topk", "normalise": True}}),
    ("mixtral", {"num_experts_per_tok": 1, "rope_theta": 7.0}, {"moe": {
        "experts": 8, "top_k": 1, "ffn_hidden": 14336, "score": "topk_softmax"}}),
    ("qwen3_moe", {"num_local_experts": 6, "decoder_sparse_step": 3, "output_router_logits": True},
     {"moe": {"experts": 6, "top_k": 8, "ffn_hidden": 768, "score": "softmax_topk", "normalise": False,
              "every": 3}}),
    ("qwen3_moe", {"mlp_only_layers": [1, 2, 99], "num_hidden_layers": 5, "norm_topk_prob": True}, {"moe": {
        "experts": 128, "top_k": 8, "ffn_hidden": 768, "score": "softmax_topk", "normalise": True,
        "layers": [0, 3, 4]}}),
    ("gpt2", {"hidden_size": 48, "num_attention_heads": 4}, {"head_dim": 12, "ffn_hidden": 192}),
    ("gpt2", {"n_inner": 7, "attn_pdrop": 0.0}, {"ffn_hidden": 7, "dropout": 0.1, "attention_dropout": 0.0}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "wanted"), SPELLINGS)
def test_spellings(family: str, keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    ours = model_settings({"model_type": family, **keys}, Path("config.json"))
    assert {name: ours[name] for name in wanted} == wanted
    # transformers understands the same, as far as it says so.
    config = transformers.AutoConfig.for_model(family, **json.loads(json.dumps(keys)))
    if family != "gpt2":
        rope = config.rope_parameters
        assert rope["rope_theta"] == ours["rope_theta"]
        scaling = ours["rope_scaling"]
        assert rope["rope_type"] == ("default" if scaling is None else scaling.get("type", "llama3"))
        if scaling is not None:
            assert rope["original_max_position_embeddings"] == scaling["original_positions"]
        if scaling is not None and "attention_factor" in scaling:
            assert ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)[1] == scaling["attention_factor"]
        assert config.num_key_value_heads == ours["kv_heads"]


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]},
     'model_type: found "olmoe", not supported (OlmoeForCausalLM); supported: LlamaForCausalLM, Mistral'),
    ("llama", {"model_type": None}, "model_type: found null, not supported"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]},
     'architectures: found "LlamaForSequenceClassification", not supported; supported: LlamaForCausalLM'),
    ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, 'architectures: found "GPT2DoubleHeadsModel"'),
    ("mistral", {"sliding_window": 0}, "sliding_window: found 0, expected a whole number from 1"),
    ("qwen2", {"use_sliding_window": True}, "sliding_window: found 4096, which 4 of 32 layers would use"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 31, "sliding_window": 8},
     "sliding_window: found 8"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: found "),
    ("llama", {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
     'rope_scaling.rope_type: found "proportional", which is not supported; supported: default, llama3'),
    ("llama", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.factor: found null"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0}},
     "rope_scaling.beta_fast: found 0, expected a number above 0"),
    ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
     "rope_scaling.short_factor: found null, expected a list of numbers"),
    ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0, "2"]}},
     'rope_scaling.short_factor[1]: found "2", expected a number above 0'),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: found null, expected"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3.0}},
     "rope_scaling.beta_fast: found 3.0, which is not supported with rope_type linear"),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}},
     "rope_parameters.mrope_section: found [1, 2]"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
     "rope_parameters.high_freq_factor: found null"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention"),
    ("llama", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "rope_scaling.partial_rotary_factor: found 0.5"),
    ("llama", {"partial_rotary_factor": 0.25}, "partial_rotary_factor: found 0.25"),
    ("llama", {"rope_theta": -1}, "rope_theta: found -1"),
    ("llama", {"hidden_act": "gelu"}, 'hidden_act: found "gelu", which is not supported; expected "silu"'),
    ("gpt2", {"activation_function": "gelu"}, 'activation_function: found "gelu"'),
    ("gpt2", {"activation_function": "relu"}, 'activation_function: found "relu"'),
    ("mistral", {"attention_bias": True}, "attention_bias: found true"),
    ("qwen3", {"attention_bias": 1}, "attention_bias: found 1, expected true or false"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias: found true"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: found {"),
    ("llama", {"num_experts": 8}, "num_experts: found 8"),
    ("qwen3_moe", {"n_routed_experts": 8}, "n_routed_experts: found 8, which is not supported; expected 0"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts: found 0, expected a whole number from 1"),
    ("qwen3_moe", {"num_experts": 8, "num_local_experts": 9}, "num_local_experts: found 9, but num_experts"),
    ("qwen3_moe", {"mlp_only_layers": [0, -1]}, "mlp_only_layers: found [0, -1], expected a list of whole"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers: found 3, expected a list of whole"),
    ("qwen3_moe", {"decoder_sparse_step": 99}, "decoder_sparse_step: found 99, so that none of 24 layers"),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob: found null, expected true or false"),
    ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise: found 0.01, which is not supported"),
    ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok: found null, expected a whole number"),
    ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func: found "softmax", which is not supported'),
    ("deepseek_v3", {"topk_method": "greedy"}, 'topk_method: found "greedy", which is not supported'),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: found 2, which is not supported; expected 1"),
    ("deepseek_v3", {"n_group": None}, "n_group: found null, expected a whole number from 1"),
    ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts: found 0, expected a whole number from 1"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace: found -1, expected a whole"),
    ("deepseek_v3", {"num_experts_per_tok": 1}, "norm_topk_prob: found true, which implementations under"),
    ("deepseek_v3", {"routed_scaling_factor": 0}, "routed_scaling_factor: found 0, expected a number above"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob: found true, which"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "topk_method": "noaux_tc"}, 'topk_method: found "noaux_tc"'),
    ("deepseek_v2", {}, "num_experts_per_tok: found null, expected a whole number from 1"),
    ("llama", {"is_causal": False}, "is_causal: found false"),
    ("llama", {"per_layer_config": {"1": {"hidden_act": "relu"}}}, "per_layer_config: found {"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: found false"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: found true"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention: found true"),
    ("gpt2", {"embd_pdrop": 0.2}, "embd_pdrop: found 0.2, expected that of resid_pdrop, 0.1"),
    ("gpt2", {"n_embd": 770}, "n_embd: found 770, not divisible by n_head 12"),
    ("llama", {"hidden_size": 4000.5}, "hidden_size: found 4000.5, expected a whole number from 1"),
    ("llama", {"vocab_size": True}, "vocab_size: found true"),
    ("llama", {"num_hidden_layers": None}, "num_hidden_layers: found null"),
    ("llama", {"tie_word_embeddings": "yes"}, 'tie_word_embeddings: found "yes"'),
    ("llama", {"rms_norm_eps": "1e-5"}, 'rms_norm_eps: found "1e-5"'),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps: found 1000000"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: found NaN, expected a number from 0"),
    ("llama", {"initializer_range": 10**400}, "initializer_range: found 1000000"),
    ("llama", {"rope_theta": 10**400}, "rope_theta: found 1000000"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "message"), UNSUPPORTED)
def test_what_is_not_supported(family: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(HexadError) as caught:
        model_settings({"model_type": family, **keys}, Path("some/config.json"))
    assert str(caught.value).startswith(f"some/config.json: {message}")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return theirs.save("llama", tmp_path_factory.mktemp("errors") / "hf")


def copied(saved: Path, where: Path) -> Path:
    """The model in one file, to be damaged."""
    where.mkdir()
    (where / "config.json").write_text((saved / "config.json").read_text())
    save_file(theirs.tensors(saved), where / "model.safetensors", {"format": "pt"})
    return where


def change(directory: Path, name: str, values: torch.Tensor | None) -> None:
    """Replace a tensor of a single file, add one, or remove it."""
    content = load_file(directory / "model.safetensors")
    if values is None:
        del content[name]
    else:
        content[name] = values
    save_file(content, directory / "model.safetensors", {"format": "pt"})


Q = "model.layers.1.self_attn.q_proj.weight"


ODD: list[Any] = [
    *(None, True, 0, -1, 7, 2**64, 10**400, 1.5, 1e308, float("nan"), "", "\ud800", "a" * 3000, "llama"),
    *([], [None], [0] * 500, ["x"] * 30, {}, {"a": None}, {"rope_type": []}, {"rope_type": "yarn"}),
    {"type": "longrope", "short_factor": [1.0], "long_factor": ["a"]},
    {"rope_type": "llama3", "factor": 0},
    {"rope_type": "dynamic", "factor": -1, "rope_theta": "a"},
]
MORE = (
    "rope_scaling rope_parameters layer_types original_max_position_embeddings architectures head_dim".split()
)


@pytest.mark.parametrize("name", families())
def test_random_values_are_taken_or_refused_in_one_line(name: str) -> None:
    chance, published = (
        Random(name),
        json.loads(transformers.AutoConfig.for_model(name).to_json_string(False)),
    )
    for _ in range(400):
        keys = dict(published)
        for key in chance.choices([*keys, *MORE], k=chance.choice([1, 2, 3])):
            keys[key] = chance.choice(ODD)
            if isinstance(keys[key], dict) and chance.random() < 0.5:
                keys[key] = keys[key] | {chance.choice(["factor", *MORE]): chance.choice(ODD)}
        try:
            ModelSettings.model_validate(model_settings(keys, Path("config.json")))
        except ValidationError:
            pass  # which whoever reads a model words
        except HexadError as error:
            assert "\n" not in str(error) and len(str(error)) < 600, keys


def test_tensors_that_do_not_fit(saved: Path, tmp_path: Path) -> None:
    for number, (name, values, message) in enumerate(
        [
            (Q, None, f"tensor {Q} (model.layers.1.attention.q.weight) is missing"),
            (Q, torch.zeros(36, 35), f"tensor {Q} has shape (36, 35), the model has (36, 36)"),
            (Q, torch.zeros(36, 36, dtype=torch.int8), f"tensor {Q} is I8, which is not supported"),
            ("lm_head.weight", None, "tensor lm_head.weight (model.head.weight) is missing"),
            ("model.layers.3.mlp.up_proj.weight", torch.zeros(44, 36),
             "found tensor model.layers.3.mlp.up_proj.weight, which a llama model with the settings of"),
            ("model.layers.0.self_attn.q_proj.bias", torch.zeros(36), "found tensor model.layers.0.self"),
            ("score.weight", torch.zeros(2, 36), "found tensor score.weight"),
        ]
    ):  # fmt: skip
        source = copied(saved, tmp_path / str(number))
        change(source, name, values)
        assert refused("import", source, tmp_path / "ours").startswith(f"{source}: {message}")


def test_files_that_cannot_be_read(saved: Path, tmp_path: Path) -> None:
    source = copied(saved, tmp_path / "hf")
    file, to = source / "model.safetensors", tmp_path / "ours"
    whole = file.read_bytes()
    for damage in (whole[:-1], whole[:1000], b"", whole[:4] + b"\xff" + whole[5:], whole + b"more"):
        file.write_bytes(damage)
        assert refused("import", source, to).startswith(f"{file}: cannot be read: ")
    file.unlink()
    assert f"{source}: neither model.safetensors nor model.safetensors.index.json" in refused(
        "import", source, to
    )
    torch.save({}, source / "pytorch_model.bin")
    assert "pytorch_model.bin holds pickled objects" in refused("import", source, to)
    (source / "config.json").write_text("{")
    assert refused("import", source, to).startswith(f"{source}/config.json: cannot be read")
    (source / "config.json").write_text("[]")
    assert "found a list, expected an object" in refused("import", source, to)
    (source / "config.json").unlink()
    assert "not a Hugging Face model: config.json is missing" in refused("import", source, to)
    assert "no such directory" in refused("import", tmp_path / "none", to)
    with pytest.raises(HexadError, match="no such directory"):
        read_config(tmp_path / "none")


def test_shards_that_do_not_fit_their_index(saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    for file in saved.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = index["weight_map"]["lm_head.weight"]
    good = dict(index["weight_map"])
    for places, message in (
        ({**good, "model.norm.bias": first}, f"{source / first}: model.norm.bias is missing"),
        ({**good, "x": "../x.safetensors"}, f"{path}: not an index of tensors"),
        ({**good, "x": 3}, f"{path}: not an index of tensors"),
        ({**good, "x": "model-9.safetensors"}, f"{source}/model-9.safetensors: missing, but"),
        ({}, f"{path}: not an index of tensors"),
    ):
        path.write_text(json.dumps({"weight_map": places}))
        assert refused("import", source, tmp_path / "ours").startswith(message)
    path.write_text("no")
    assert refused("import", source, tmp_path / "ours").startswith(f"{path}: not an index of tensors")


def test_every_rank_says_the_same(saved: Path, tmp_path: Path, pool: Pool) -> None:
    """A tensor that only one pipeline stage would read, found by all before the first step."""
    source = copied(saved, tmp_path / "hf")
    change(source, Q, torch.zeros(36, 35))
    run = run_on(tmp_path, f"hf:{source}")
    outcomes = run.world(pool, 2, "parallel.pipeline=2")
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == (2, f"model.load: {source}: tensor {Q} has shape (36, 35), the model has (36, 36)")
    assert not run.metrics
