"""Mixtral: mistral with experts in every layer (arXiv 2401.04088)."""

from dataclasses import replace
from typing import Any

from hexad.config.model import ModelSettings

from .family import ConfigFile, ModelShape
from .llama import Sizes, llama_shape
from .mistral import FAMILY as MISTRAL
from .mixture import chosen_by_softmax, normalised, softmax_weights


def _read(keys: ConfigFile) -> dict[str, Any]:
    """The experts, as wide as ``intermediate_size``. The coefficient of the loss that balances them is a
    setting of the training, and of another loss: over the loads of all layers together."""
    if keys.number("router_jitter_noise"):
        raise keys.problem("router_jitter_noise", "which is not supported; expected 0")
    top_k = keys.count("num_experts_per_tok")
    moe = {
        "experts": keys.count("num_local_experts"),
        "top_k": top_k,
        "ffn_hidden": keys.count("intermediate_size"),
    }
    return {"moe": {**moe, **softmax_weights(True, top_k)}}


def _write(model: ModelSettings) -> dict[str, Any]:
    moe = model.moe
    assert moe is not None
    return {
        "intermediate_size": moe.ffn_hidden,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
    }


def _mixture(model: ModelSettings) -> bool:
    moe = model.moe
    every = len(model.expert_layers) == model.layers
    return moe is not None and every and chosen_by_softmax(model) and normalised(moe)


def _preset(sizes: Sizes) -> ModelShape:
    """mistralai/Mixtral-8x7B-v0.1, -8x22B-v0.1: arXiv 2401.04088."""
    return {
        **llama_shape(sizes, 32000, 1000000.0),
        "moe": {"experts": 8, "top_k": 2, "ffn_hidden": sizes[-1]},
    }


FAMILY = replace(
    MISTRAL,
    name="mixtral",
    classes=("MixtralForCausalLM", "MixtralModel"),
    modules={
        **{name: path for name, path in MISTRAL.modules.items() if not name.startswith("ffn.")},
        "ffn.router": "block_sparse_moe.gate",
        "ffn.experts.gate_up": "mlp.experts.gate_up_proj",
        "ffn.experts.down": "mlp.experts.down_proj",
    },
    in_memory={"ffn.router": "mlp.gate"},
    experts={
        "ffn.experts.gate_up": (
            "block_sparse_moe.experts.{}.w1.weight",
            "block_sparse_moe.experts.{}.w3.weight",
        ),
        "ffn.experts.down": ("block_sparse_moe.experts.{}.w2.weight",),
    },
    mixture=_mixture,
    theta=1000000.0,
    absent={
        **MISTRAL.absent,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "router_jitter_noise": 0.0,
    },
    aliases={"num_experts": "num_local_experts"},
    reads=("num_local_experts",),
    read=_read,
    write=_write,
    contexts={"mixtral-8x7b": 32768, "mixtral-8x22b": 65536},
    presets={
        "mixtral-8x7b": _preset((32, 4096, 32, 8, 14336)),
        "mixtral-8x22b": _preset((56, 6144, 48, 8, 16384)),
    },
)
