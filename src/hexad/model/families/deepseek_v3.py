"""DeepSeek-V3: llama with multi-head latent attention and experts that are chosen by sigmoids and biases
(arXiv 2412.19437). Kimi K2 and Moonlight are the same."""

from collections.abc import Callable
from math import log, sqrt
from typing import Any

from hexad.config import ConfigError
from hexad.config.model import ModelSettings, MoeSettings

from .family import ConfigFile, Family, ModelShape
from .llama import FAMILY as LLAMA
from .llama import Sizes, llama_shape
from .mixture import normalised
from .qwen3_moe import FAMILY as QWEN3_MOE

_MLA = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
"""Settings of ``model.mla`` -> keys of ``config.json``."""
_MOE = {
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn_hidden": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
}
"""Settings of ``model.moe`` -> keys of ``config.json``."""


def _read(keys: ConfigFile) -> dict[str, Any]:
    """Latent attention, and experts that are chosen by sigmoids."""
    return {**latent_settings(keys), "moe": shared_settings(keys, _chosen)}


def _chosen(keys: ConfigFile) -> dict[str, Any]:
    """How experts are chosen and weighted."""
    normalise = keys.switch("norm_topk_prob")
    if normalise and keys.count("num_experts_per_tok") == 1:
        problem = "which implementations understand differently; expected false with num_experts_per_tok 1"
        raise keys.problem("norm_topk_prob", problem)
    groups = {"groups": keys.count("n_group"), "top_groups": keys.count("topk_group")}
    return {"score": "sigmoid", "normalise": normalise, **groups}


def shared_settings(
    keys: ConfigFile, chosen: Callable[[ConfigFile], dict[str, Any]]
) -> dict[str, Any] | None:
    """Settings of experts in all layers but the first ones, of which some are shared; ``chosen``: how those
    of a token are. None where all layers are dense."""
    dense = keys.raw.get("first_k_dense_replace")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise keys.problem("first_k_dense_replace", "expected a whole number from 0")
    if dense >= keys.count("num_hidden_layers"):
        return None
    scale = keys.above_zero("routed_scaling_factor", keys.raw.get("routed_scaling_factor"))
    counts = {name: keys.count(key) for name, key in _MOE.items()}
    return {**counts, "first_dense": dense, "scale": float(scale), **chosen(keys)}


def shared_keys(model: ModelSettings) -> dict[str, Any]:
    """The keys of :func:`shared_settings`."""
    moe = model.moe
    if moe is None:
        return {"first_k_dense_replace": model.layers}
    written = {key: getattr(moe, name) for name, key in _MOE.items()}
    sizes = {"first_k_dense_replace": model.expert_layers[0], "moe_layer_freq": 1}
    groups = {"n_group": moe.groups, "topk_group": moe.top_groups}
    weights = {"norm_topk_prob": normalised(moe), "routed_scaling_factor": moe.scale}
    return {**written, **sizes, **groups, **weights}


def has_shared(model: ModelSettings) -> bool:
    """Whether a model with experts has them in all layers but the first ones, and shared ones beside."""
    moe, having = model.moe, model.expert_layers
    last = having == tuple(range(model.layers - len(having), model.layers))
    return moe is not None and bool(having) and last and not moe.forced and _with_shared(moe)


def _with_shared(moe: MoeSettings) -> bool:
    return moe.shared_experts > 0 and not moe.shared_gate


def _mixture(model: ModelSettings) -> bool:
    moe = model.moe
    # Groups count by their two largest scores.
    return moe is None or (has_shared(model) and moe.biased and moe.experts >= 2 * moe.groups)


def latent_settings(keys: ConfigFile) -> dict[str, Any]:
    """Latent attention, and the scale of its scores."""
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
    """YaRN's factor of complete queries and keys; ``mscale`` is for what of them is rotated."""
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
    chosen = {} if model.moe is None else {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return {**latent_keys(model), **shared_keys(model), **chosen, "num_nextn_predict_layers": 0}


def latent_keys(model: ModelSettings) -> dict[str, Any]:
    """The keys of :func:`latent_settings`."""
    assert model.mla is not None
    written: dict[str, Any] = {key: getattr(model.mla, name) for name, key in _MLA.items()}
    return {**written, **_magnitudes(model)}


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


def latent_shape(
    sizes: Sizes,
    vocab: int,
    moe: dict[str, Any],
    *,
    q_rank: int | None = 1536,
    theta: float = 10000.0,
    eps: float = 1e-6,
    scaling: dict[str, Any] | None = None,
    magnitude: float = 1.0,
) -> ModelShape:
    """A preset; ``scaling`` by YaRN, with ``magnitude`` for its ``mscale`` and ``mscale_all_dim``."""
    mla = {"q_rank": q_rank, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    shape = llama_shape(sizes, vocab, theta, eps=eps, head_dim=192)
    if scaling is None:
        return {**shape, "mla": mla, "moe": moe}
    scale = _magnitude(scaling["factor"], magnitude) ** 2 / sqrt(192)
    yarn = {"type": "yarn", "original_positions": 4096, "attention_factor": 1.0, **scaling}
    return {**shape, "mla": mla, "moe": moe, "rope_scaling": yarn, "attention_multiplier": scale}


def _sigmoid(
    experts: int, top_k: int, width: int, shared: int, scale: float, **others: int
) -> dict[str, Any]:
    """Experts of a preset, chosen by sigmoids."""
    sizes = {"experts": experts, "top_k": top_k, "ffn_hidden": width, "shared_experts": shared}
    return {**sizes, "score": "sigmoid", "scale": scale, "first_dense": 1, **others}


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
        "ffn.router": "mlp.gate",
        "ffn.router.bias": "mlp.gate.e_score_correction_bias",
        "ffn.experts.gate_up": "mlp.experts.gate_up_proj",
        "ffn.experts.down": "mlp.experts.down_proj",
        "ffn.shared.gate": "mlp.shared_experts.gate_proj",
        "ffn.shared.up": "mlp.shared_experts.up_proj",
        "ffn.shared.down": "mlp.shared_experts.down_proj",
    },
    experts=QWEN3_MOE.experts,
    mixture=_mixture,
    prediction_layers="num_nextn_predict_layers",
    types=("kimi_k2",),
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
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    fixed={"hidden_act": "silu", "rope_interleave": True},
    also={
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    reads=("n_routed_experts",),
    read=_read,
    write=_write,
    contexts={"deepseek-v3": 131072, "moonlight": 8192, "kimi-k2": 131072},
    presets={
        # deepseek-ai/DeepSeek-V3 (arXiv 2412.19437), without the layer that predicts a further token
        "deepseek-v3": latent_shape(
            (61, 7168, 128, 128, 18432),
            129280,
            _sigmoid(256, 8, 2048, 1, 2.5, groups=8, top_groups=4, first_dense=3),
            scaling={"factor": 40.0},
        ),
        # moonshotai/Moonlight-16B-A3B (arXiv 2502.16982)
        "moonlight-16b-a3b": latent_shape(
            (27, 2048, 16, 16, 11264),
            163840,
            _sigmoid(64, 6, 1408, 2, 2.446),
            q_rank=None,
            theta=50000.0,
            eps=1e-5,
        ),
        # moonshotai/Kimi-K2-Base (arXiv 2507.20534)
        "kimi-k2": latent_shape(
            (61, 7168, 64, 64, 18432),
            163840,
            _sigmoid(384, 8, 2048, 1, 2.827),
            theta=50000.0,
            scaling={"factor": 32.0, "beta_fast": 1.0},
        ),
    },
)
