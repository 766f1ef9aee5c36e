"""DeepSeek-V2: the attention of DeepSeek-V3, and experts that are chosen by a softmax (arXiv 2405.04434)."""

from dataclasses import replace
from typing import Any

from hexad.config.model import ModelSettings

from .deepseek_v3 import FAMILY as DEEPSEEK_V3
from .deepseek_v3 import has_shared, latent_keys, latent_settings, latent_shape, shared_keys, shared_settings
from .family import ConfigFile
from .mixture import normalised

_METHODS = ("greedy", "group_limited_greedy")


def _read(keys: ConfigFile) -> dict[str, Any]:
    """Latent attention, and experts that are chosen by a softmax."""
    return {**latent_settings(keys), "moe": shared_settings(keys, _chosen)}


def _chosen(keys: ConfigFile) -> dict[str, Any]:
    """How experts are chosen; their weights are not normalised, whatever ``norm_topk_prob`` says."""
    method = keys.raw.get("topk_method")
    if method not in _METHODS:
        raise keys.problem("topk_method", f"which is not supported; supported: {', '.join(_METHODS)}")
    weights = {"score": "softmax_topk", "normalise": False}
    if method == "greedy":
        return weights
    return {**weights, "groups": keys.count("n_group"), "top_groups": keys.count("topk_group")}


def _write(model: ModelSettings) -> dict[str, Any]:
    written = {**latent_keys(model), **shared_keys(model)}
    if model.moe is None:
        return written
    method = _METHODS[model.moe.groups != model.moe.top_groups]
    return {**written, "scoring_func": "softmax", "topk_method": method}


def _mixture(model: ModelSettings) -> bool:
    moe = model.moe
    return moe is None or (has_shared(model) and not moe.biased and not normalised(moe))


_LITE = {"experts": 64, "top_k": 6, "ffn_hidden": 1408, "shared_experts": 2}

FAMILY = replace(
    DEEPSEEK_V3,
    name="deepseek_v2",
    classes=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    whole_heads=True,
    absent={
        **{key: value for key, value in DEEPSEEK_V3.absent.items() if key != "rope_interleave"},
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "mlp_bias": False,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    mixture=_mixture,
    prediction_layers="",
    types=(),
    aliases={"num_experts": "n_routed_experts"},
    fixed={"hidden_act": "silu"},
    also={"scoring_func": ("softmax",), "norm_topk_prob": (False,), "moe_layer_freq": (1,)},
    read=_read,
    write=_write,
    contexts={"deepseek-v2-lite": 32768},
    presets={
        # deepseek-ai/DeepSeek-V2-Lite (arXiv 2405.04434, appendix B)
        "deepseek-v2-lite": latent_shape(
            (27, 2048, 16, 16, 10944),
            102400,
            {**_LITE, "score": "softmax_topk", "normalise": False, "first_dense": 1},
            q_rank=None,
            scaling={"factor": 40.0},
            magnitude=0.707,
        ),
    },
)
