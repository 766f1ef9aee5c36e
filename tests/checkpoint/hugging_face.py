"""Small random models saved by transformers, the oracle of import, export and model.load."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file

from hexad.model.families import families, family

VOCAB, LENGTH = 307, 40

_GPT2 = {"n_positions": LENGTH, "n_embd": 36, "n_layer": 3, "n_head": 6, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
_ROTARY = {"hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 6,
           "num_key_value_heads": 2, "max_position_embeddings": LENGTH}  # fmt: skip
_LATENT = {**_ROTARY, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
           "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 3}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
_MIXTRAL = {"head_dim": 10, "num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN3_MOE = {"head_dim": 6, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_SIZES = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
          "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1}  # fmt: skip
_V3 = {**_LATENT, **_SIZES, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "scoring_func": "sigmoid",
       "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}  # fmt: skip
_V2 = {**_LATENT, **_SIZES, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "scoring_func": "softmax",
       "topk_method": "greedy", "routed_scaling_factor": 1.0}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2, untied, narrow": ("gpt2", {**_GPT2, "tie_word_embeddings": False, "n_inner": 52}),
    "llama": ("llama", _ROTARY),
    "llama, tied, llama3 rope": (
        "llama",
        {**_ROTARY, "tie_word_embeddings": True, "rope_parameters": _LLAMA3, "num_key_value_heads": 6},
    ),
    "qwen2, yarn": ("qwen2", {**_ROTARY, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3}}),
    "phi3, longrope": ("phi3", {**_ROTARY, "pad_token_id": None, "original_max_position_embeddings": 10,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.2],
                            "long_factor": [1.5, 2.5, 4.5]}}),
    "mistral": ("mistral", {**_ROTARY, "head_dim": 10, "sliding_window": None, "rms_norm_eps": 1e-5}),
    "mistral, window": ("mistral", {**_ROTARY, "sliding_window": 7}),
    "phi3, window": ("phi3", {**_ROTARY, "pad_token_id": None, "sliding_window": 13}),
    "llama, all biases, linear rope": ("llama", {**_ROTARY, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "llama, mlp biases, dynamic rope": ("llama", {**_ROTARY, "mlp_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}}),
    "granite, attention biases": ("granite", {**_ROTARY, "attention_bias": True}),
    "qwen3, attention biases": ("qwen3", {**_ROTARY, "head_dim": 6, "attention_bias": True}),
    "qwen2, window": ("qwen2", {**_ROTARY, "use_sliding_window": True, "max_window_layers": 0,
                                "sliding_window": 7}),
    "qwen3, window": ("qwen3", {**_ROTARY, "head_dim": 6, "use_sliding_window": True,
                                "max_window_layers": 0, "sliding_window": 5}),
    "qwen2": ("qwen2", _ROTARY),
    "qwen2, tied": ("qwen2", {**_ROTARY, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen3": ("qwen3", {**_ROTARY, "head_dim": 12}),
    "phi3": ("phi3", {**_ROTARY, "pad_token_id": None, "hidden_size": 48, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}}),
    "granite": ("granite", {**_ROTARY, "embedding_multiplier": 12.0, "attention_multiplier": 0.2,
                            "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "deepseek_v3": ("deepseek_v3", _V3),
    "deepseek_v3, dense": ("deepseek_v3", {**_LATENT, "num_nextn_predict_layers": 0}),
    "deepseek_v3, no groups, not normalised": ("deepseek_v3", {**_V3, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.5, "first_k_dense_replace": 0,
        "n_shared_experts": 1, "q_lora_rank": None}),
    "deepseek_v3, direct queries, yarn": ("deepseek_v3", {**_LATENT, "q_lora_rank": None,
        "num_nextn_predict_layers": 0, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 10,
        "beta_fast": 3.0, "beta_slow": 0.5, "mscale": 0.707, "mscale_all_dim": 1.3}}),
    "deepseek_v2": ("deepseek_v2", {**_V2, "q_lora_rank": None}),
    "deepseek_v2, dense": ("deepseek_v2", _LATENT),
    "deepseek_v2, groups": ("deepseek_v2", {**_V2, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 16.0}),
    "deepseek_v2, yarn": ("deepseek_v2", {**_LATENT, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 40.0, "original_max_position_embeddings": 4,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "mixtral": ("mixtral", {**_ROTARY, **_MIXTRAL}),
    "mixtral, one of three, window": ("mixtral", {**_ROTARY, "head_dim": 6, "sliding_window": 7,
        "num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {**_ROTARY, **_QWEN3_MOE}),
    "qwen3_moe, normalised, every second": ("qwen3_moe", {**_ROTARY, **_QWEN3_MOE, "norm_topk_prob": True,
        "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen3_moe, some dense, biases, window": ("qwen3_moe", {**_ROTARY, **_QWEN3_MOE, "mlp_only_layers": [0],
        "attention_bias": True, "use_sliding_window": True, "sliding_window": 7}),
    "qwen3_moe, one expert, tied": ("qwen3_moe", {**_ROTARY, **_QWEN3_MOE, "num_experts_per_tok": 1,
        "norm_topk_prob": True, "tie_word_embeddings": True}),
    "granite, tied": ("granite", {**_ROTARY, "tie_word_embeddings": True, "attention_multiplier": 0.1}),
    "qwen3, tied": ("qwen3", {**_ROTARY, "head_dim": 6, "tie_word_embeddings": True}),
}  # fmt: skip
"""Name -> (family, what its config class is given)."""


def published_config(name: str) -> Any:
    """The model's configuration."""
    kind, settings = MODELS[name]
    return transformers.AutoConfig.for_model(
        kind, vocab_size=VOCAB, bos_token_id=1, eos_token_id=[2, 5], **settings
    )


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32, shard: str = "60KB") -> Path:
    """A random model (biases and norms too) as transformers saves it, in several shards."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(published_config(name))
    randomise(model)
    transformers.utils.logging.disable_progress_bar()
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


def router_biases(model: torch.nn.Module) -> list[torch.Tensor]:
    """The biases by which experts are chosen, buffers in transformers."""
    return [bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")]


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Change all parameters, biases and norms too."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    for bias in router_biases(model):
        bias.normal_(std=0.1)


def parameters(model: Any) -> int:
    """Parameters as published models count them: with the routers' biases."""
    return model.num_parameters() + sum(bias.numel() for bias in router_biases(model))


def load(directory: Path) -> Any:
    """The model as transformers loads it, in the format it is stored in."""
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="eager"
    )


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Everything in a directory's safetensors files, by their names."""
    tensors_by_name: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors_by_name |= load_file(file)
    return tensors_by_name


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def assert_same_tensors(one: Path, other: Path) -> None:
    """Two directories hold the same names, formats, shapes and bits."""
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not same(first[name], second[name])] == []


@contextmanager
def exact_functions() -> Iterator[None]:
    """transformers computes RMSNorm, routers, DeepSeek-V2's rotation, and the sines and cosines of rotary
    positions in float32 whatever the format; here the first three as they stand, and those rounded from
    float64, as ours are."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    def rounded(function: Any) -> Any:
        return lambda x: function(x.double()).to(x.dtype)

    def routed(forward: Any) -> Any:
        double = {"float": torch.float64, "float32": torch.float64}

        def unrounded(self: Any, hidden: torch.Tensor) -> Any:
            with (
                mock.patch.multiple(torch.Tensor, float=torch.Tensor.double),
                mock.patch.multiple(torch, **double),
            ):
                return forward(self, hidden)

        return unrounded

    def rotated(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As theirs, but in the format of the tensors."""
        pairs = (torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns.unsqueeze(1) for x in (q, k))
        return tuple(torch.view_as_real(x).flatten(3) for x in pairs)

    polar, latent = torch.polar, import_module("transformers.models.deepseek_v2.modeling_deepseek_v2")
    cos, sin = (rounded(function) for function in (torch.Tensor.cos, torch.Tensor.sin))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.Tensor, cos=cos, sin=sin))
        stack.enter_context(
            mock.patch.object(torch, "polar", lambda x, y: polar(x.double(), y.double()).to(torch.cfloat))
        )
        stack.enter_context(mock.patch.object(latent, "apply_rotary_emb", rotated))
        for norm in rms_norms():
            stack.enter_context(mock.patch.multiple(norm, forward=forward))
        for router in _classes("TopkRouter", "TopKRouter"):
            stack.enter_context(mock.patch.multiple(router, forward=routed(router.forward)))
        yield


def rms_norms() -> Iterator[type]:
    """The RMSNorm of every family that has one."""
    return _classes("RMSNorm")


def _classes(*endings: str) -> Iterator[type]:
    """The modules of every family whose names end so, after the family's."""
    for name in families():
        prefix = family(name).classes[1].removesuffix("Model")
        module = import_module(f"transformers.models.{name}.modeling_{name}")
        for ending in endings:
            if hasattr(module, prefix + ending):
                yield getattr(module, prefix + ending)
