"""The architecture of a launch line. No torch."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from hexad.config import ConfigError


def model_settings(arguments: Namespace) -> dict[str, Any]:
    """The settings of the group ``model``.

    Raises:
        ConfigError: an architecture that no family has, or experts.
    """
    refuse_experts(arguments)
    found = {
        "family": _family(arguments),
        "layers": arguments.num_layers,
        "hidden": arguments.hidden_size,
        "heads": arguments.num_attention_heads,
        "kv_heads": arguments.num_query_groups,
        "head_dim": arguments.kv_channels,
        "ffn_hidden": arguments.ffn_hidden_size,
        "max_positions": arguments.max_position_embeddings,
        "tied_embeddings": not arguments.untie_embeddings_and_output_weights,
        "norm_eps": arguments.norm_epsilon,
        "dropout": arguments.hidden_dropout,
        "attention_dropout": arguments.attention_dropout,
        "init_std": arguments.init_method_std,
    }
    if found["family"] != "gpt2":
        found |= _rotary(arguments)
    if arguments.window_size is not None:
        found["sliding_window"] = _window(arguments.window_size)
    return found


def refuse_experts(arguments: Namespace) -> None:
    """Refuse layouts of experts without experts, as Megatron-LM does.

    Raises:
        ConfigError: ``--expert-...`` without ``--num-experts``.
    """
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if (getattr(arguments, name) or 1) > 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, f"found {getattr(arguments, name)} without --num-experts; leave it out")


def _family(arguments: Namespace) -> str:
    """The family of this architecture.

    Megatron-LM combines norms, positions, activations and biases freely; families are the combinations that
    have a name.
    """
    traits = {
        "--normalization": (arguments.normalization, "LayerNorm", "RMSNorm"),
        "--position-embedding-type": (arguments.position_embedding_type, "learned_absolute", "rope"),
        "--swiglu": (arguments.swiglu, False, True),
        "--disable-bias-linear": (not arguments.add_bias_linear, False, True),
    }
    if not arguments.add_position_embedding and arguments.position_embedding_type != "rope":
        raise ConfigError("--no-position-embedding", "found without rope; leave it out, or use rope")
    gpt2 = [flag for flag, (found, one, _) in traits.items() if found != one]
    llama = [flag for flag, (found, _, other) in traits.items() if found != other]
    if not gpt2:
        if arguments.qk_layernorm:
            raise ConfigError("--qk-layernorm", "found with LayerNorm; it needs RMSNorm: leave it out")
        return "gpt2"
    if not llama:
        return "qwen3" if arguments.qk_layernorm else "qwen2" if arguments.add_qkv_bias else "llama"
    wrong = gpt2 if len(gpt2) <= len(llama) else llama
    found = traits[wrong[0]][0]
    what = f"found {found}" if isinstance(found, str) else "is set" if found else "is missing"
    raise ConfigError(
        wrong[0],
        f"{what}: the flags fit neither GPT-2 (LayerNorm, learned_absolute, GELU, biases) nor Llama "
        "(--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear); use all of "
        "one of them",
    )


def _rotary(arguments: Namespace) -> dict[str, Any]:
    found = {
        "qkv_bias": arguments.add_qkv_bias,
        "qk_norm": arguments.qk_layernorm,
        "rope_theta": arguments.rotary_base,
        "rotary_fraction": arguments.rotary_percent,
    }
    if arguments.use_rope_scaling:
        # Megatron-LM has a flag for the factor only.
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
        found["rope_scaling"] = {"factor": arguments.rope_scaling_factor, **fixed}
    return found


def _window(text: str) -> int | None:
    """``sliding_window`` of Megatron-LM's (tokens to the left, tokens to the right); -1 is no limit."""
    try:
        left, right = (int(each) for each in text.strip("()").split(","))
    except ValueError:
        left, right = -2, 0
    if left < -1 or right not in (0, -1):
        raise ConfigError("--window-size", f"found {text!r}, expected LEFT,0")
    return None if left == -1 else left + 1
