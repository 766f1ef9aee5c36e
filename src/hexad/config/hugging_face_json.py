"""The ``config.json`` of a Hugging Face model from our model settings. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ConfigError
from .hugging_face import CLASSES, LLAMA3
from .schema import Family, ModelSettings


def architecture(model: ModelSettings) -> Family:
    """The family as which ``transformers`` computes what this model does: its own, or one that has the biases
    and norms which were switched on or off.

    Raises:
        ConfigError: there is none.
    """
    for family in (model.family, *(other for other in CLASSES if model.family != "gpt2")):
        if _fits(model, family):
            return family
    heads = f"model.heads {model.heads}, kv_heads {model.kv_heads}, head_dim {model.head_dim}"
    raise ConfigError(
        "model.family",
        f"found {model.family} with qkv_bias {model.qkv_bias}, qk_norm {model.qk_norm}, "
        f"hidden {model.hidden}, {heads}: none of {', '.join(name for name, _ in CLASSES.values())} is so",
    )


def _fits(model: ModelSettings, family: Family) -> bool:
    if family == "gpt2":
        whole = model.kv_heads == model.heads and model.head_dim == model.hidden / model.heads
        return model.family == "gpt2" and bool(model.qkv_bias) and whole
    if family == "llama" and model.hidden % model.heads:
        return False  # refused by its config class, though its layers could
    return model.family != "gpt2" and (model.qkv_bias, model.qk_norm) == (
        family == "qwen2",
        family == "qwen3",
    )


def config_json(
    model: ModelSettings, positions: int, dtype: str, special: Mapping[str, Any]
) -> dict[str, Any]:
    """The ``config.json`` of a model, in keys that transformers 4 and 5 read.

    Args:
        model: resolved.
        positions: the longest sequence it is made for; gpt2's is that of its table.
        dtype: of its weights, in torch's word.
        special: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.

    Raises:
        ConfigError: ``transformers`` has no such model.
    """
    family = architecture(model)
    return {
        "architectures": [CLASSES[family][0]],
        "model_type": family,
        **(_gpt2_json(model) if family == "gpt2" else _rotary_json(model, family, positions)),
        "vocab_size": model.vocab,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        **{key: special.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _gpt2_json(model: ModelSettings) -> dict[str, Any]:
    return {
        "n_positions": model.max_positions,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": None if model.ffn_hidden == 4 * model.hidden else model.ffn_hidden,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _rotary_json(model: ModelSettings, family: Family, positions: int) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if model.rope_scaling is not None:
        named = {theirs: getattr(model.rope_scaling, ours) for theirs, ours in LLAMA3.items()}
        scaling = {"rope_type": "llama3", **named}
    switches: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False},
    }
    if family != "qwen2" or model.head_dim != model.hidden / model.heads:  # no key of qwen2's, but heeded
        switches[family]["head_dim"] = model.head_dim
    return {
        "max_position_embeddings": positions,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "attention_dropout": model.attention_dropout,
        **switches[family],
    }
