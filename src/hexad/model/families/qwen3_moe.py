"""Qwen3-MoE: qwen3 with experts in all or some layers (arXiv 2505.09388)."""

from dataclasses import replace
from typing import Any

from hexad.config.model import ModelSettings

from .family import ConfigFile, ModelShape
from .llama import Sizes, llama_shape
from .mixture import chosen_by_softmax, normalised, softmax_weights, whole_numbers
from .qwen3 import FAMILY as QWEN3


def _read(keys: ConfigFile) -> dict[str, Any]:
    """The window, which all layers have or none, and the experts."""
    window = keys.switch("use_sliding_window") and keys.raw.get("sliding_window") is not None
    layers, step = keys.count("num_hidden_layers"), keys.count("decoder_sparse_step")
    top_k, dense = keys.count("num_experts_per_tok"), whole_numbers(keys, "mlp_only_layers")
    moe: dict[str, Any] = {
        "experts": keys.count("num_experts"),
        "top_k": top_k,
        "ffn_hidden": keys.count("moe_intermediate_size"),
        **softmax_weights(keys.switch("norm_topk_prob"), top_k),
    }
    having = [n for n in range(min(layers, 1024)) if n not in dense and (n + 1) % step == 0]
    if not having:
        raise keys.problem("decoder_sparse_step", f"so that none of {layers} layers has experts")
    if any(number < layers for number in dense):
        moe["layers"] = having
    else:
        moe["every"] = step
    sliding = keys.count("sliding_window") if window else None
    return {"sliding_window": sliding, "moe": moe}


def _write(model: ModelSettings) -> dict[str, Any]:
    moe = model.moe
    assert moe is not None
    having, stepped = model.expert_layers, moe.layers == "auto" and not moe.first_dense
    dense = [] if stepped else [number for number in range(model.layers) if number not in having]
    return {
        "use_sliding_window": model.sliding_window is not None,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden,
        "norm_topk_prob": normalised(moe),
        "decoder_sparse_step": moe.every if stepped else 1,
        "mlp_only_layers": dense,
    }


def _preset(sizes: Sizes, width: int) -> ModelShape:
    """Qwen/Qwen3-30B-A3B, -235B-A22B: arXiv 2505.09388."""
    shape = llama_shape(sizes, 151936, 1000000.0, eps=1e-6, head_dim=128)
    return {**shape, "moe": {"experts": 128, "top_k": 8, "ffn_hidden": width}}


_LACKED = ("max_window_layers", "head_dim")

FAMILY = replace(
    QWEN3,
    name="qwen3_moe",
    classes=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    modules={
        **QWEN3.modules,
        "ffn.router": "mlp.gate",
        "ffn.experts.gate_up": "mlp.experts.gate_up_proj",
        "ffn.experts.down": "mlp.experts.down_proj",
    },
    experts={
        "ffn.experts.gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        "ffn.experts.down": ("mlp.experts.{}.down_proj.weight",),
    },
    mixture=chosen_by_softmax,
    absent={
        **{key: value for key, value in QWEN3.absent.items() if key not in _LACKED},
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    aliases={"num_local_experts": "num_experts"},
    reads=("num_experts",),
    layer_types=("full_attention",),
    read=_read,
    write=_write,
    contexts={"qwen3-": 32768},
    presets={
        "qwen3-30b-a3b": _preset((48, 2048, 32, 4, 6144), 768),
        "qwen3-235b-a22b": _preset((94, 4096, 64, 4, 12288), 1536),
    },
)
