"""DeepSeek-V3: llama with multi-head latent attention (arXiv 2412.19437), here with dense layers only."""

from math import log, sqrt
from typing import Any

from hexad.config import ConfigError
from hexad.config.model import ModelSettings

from .family import ConfigFile, Family
from .llama import FAMILY as LLAMA

_MLA = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
"""Settings of ``model.mla`` -> keys of ``config.json``."""
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def _read(keys: ConfigFile) -> dict[str, Any]:
    """Latent attention, and the scale of its scores."""
    layers, dense = keys.count("num_hidden_layers"), keys.raw.get("first_k_dense_replace")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < layers:
        problem = f"expected num_hidden_layers {layers}: layers with mixtures of experts (model.moe)"
        raise keys.problem("first_k_dense_replace", f"{problem} are not supported")
    heads = keys.count("num_attention_heads")
    if keys.count("num_key_value_heads", heads) != heads:
        raise keys.problem("num_key_value_heads", f"expected num_attention_heads {heads}")
    mla = {name: keys.count(key) for name, key in _MLA.items() if name != "q_rank"}
    queries = keys.raw.get("q_lora_rank")
    mla["q_rank"] = None if queries is None else keys.count("q_lora_rank")  # type: ignore[assignment]
    width = mla["nope_dim"] + mla["rope_dim"]
    scale = _score_magnitude(keys) ** 2 / sqrt(width)
    return {"mla": mla, "head_dim": width, "kv_heads": heads, "attention_multiplier": scale}


def _score_magnitude(keys: ConfigFile) -> float:
    """What YaRN multiplies queries and keys by as a whole; ``mscale`` is for what of them is rotated."""
    name = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
    rope = keys.raw.get(name)
    if not isinstance(rope, dict) or not rope.get("mscale_all_dim"):
        return 1.0
    factor = keys.above_zero(f"{name}.factor", rope.get("factor"))
    return _magnitude(factor, keys.above_zero(f"{name}.mscale_all_dim", rope["mscale_all_dim"]))


def _magnitude(factor: float, scale: float) -> float:
    """YaRN's attention factor (arXiv 2309.00071, section 3.4)."""
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0


def _write(model: ModelSettings) -> dict[str, Any]:
    assert model.mla is not None
    written: dict[str, Any] = {key: getattr(model.mla, name) for name, key in _MLA.items()}
    return {**written, "first_k_dense_replace": model.layers, **_magnitudes(model)}


def _magnitudes(model: ModelSettings) -> dict[str, Any]:
    """``rope_scaling`` with YaRN's magnitudes, of which the scale of the scores is one."""
    scaling, width = model.rope_scaling, int(model.head_dim)
    plain, scale = 1 / sqrt(width), float(model.attention_multiplier)
    if scaling is None or scaling.type != "yarn" or scaling.factor <= 1:
        if scale != plain:
            raise ConfigError(
                "model.attention_multiplier",
                f"found {scale}, but transformers multiplies scores by {plain} without yarn; remove it",
            )
        return {}
    every, growth = sqrt(scale / plain), 0.1 * log(scaling.factor)
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        **({} if scaling.truncate else {"truncate": False}),
    }
    factor, all_dim = scaling.attention_factor, round((every - 1) / growth, 12)
    if not all_dim:
        rope |= {} if factor == "auto" else {"attention_factor": factor}
        return {"rope_scaling": rope}
    if all_dim < 0:
        raise ConfigError(
            "model.attention_multiplier",
            f"found {scale}, but transformers multiplies scores by {plain} at least; raise it, or remove it",
        )
    rope["mscale_all_dim"] = all_dim
    if factor != "auto":
        # Their ratio is the attention factor.
        rope["mscale"] = round((factor * _magnitude(scaling.factor, all_dim) - 1) / growth, 12)
        if rope["mscale"] <= 0:
            rope["attention_factor"] = factor
            del rope["mscale"]
    return {"rope_scaling": rope}


FAMILY = Family(
    name="deepseek_v3",
    classes=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    latent=True,
    modules={
        **{name: path for name, path in LLAMA.modules.items() if not name.startswith("attention.")},
        "attention.q": "self_attn.q_proj",
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_down_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_down_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "attention.out": "self_attn.o_proj",
    },
    keys={name: key for name, key in LLAMA.keys.items() if name != "head_dim"},
    absent={
        **{key: value for key, value in LLAMA.absent.items() if key not in ("mlp_bias", "head_dim")},
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "rope_interleave": True,
    },
    fixed={"hidden_act": "silu", "rope_interleave": True},
    also={"rope_interleave": (True,)},
    reads=_EXPERTS,
    read=_read,
    write=_write,
)
