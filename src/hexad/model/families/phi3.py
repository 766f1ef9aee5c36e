"""Phi-3 and Phi-4-mini: llama with fused published weights and, where the configuration says so, partial
rotary positions. LongRoPE and sliding windows are not supported."""

from __future__ import annotations

from dataclasses import replace

from .keys import Keys, one_dropout, without_window
from .llama import FAMILY as LLAMA


def _read(keys: Keys) -> dict[str, object]:
    return {**one_dropout(keys), **without_window(keys)}


FAMILY = replace(
    LLAMA,
    name="phi3",
    classes=("Phi3ForCausalLM", "Phi3Model"),
    whole_heads=False,
    modules={
        **LLAMA.modules,
        **dict.fromkeys(("attention.q", "attention.k", "attention.v"), "self_attn.qkv_proj"),
        **dict.fromkeys(("ffn.gate", "ffn.up"), "mlp.gate_up_proj"),
    },
    keys={**LLAMA.keys, "rotary_fraction": "partial_rotary_factor", "dropout": "resid_pdrop"},
    absent={
        **{key: value for key, value in LLAMA.absent.items() if not key.endswith(("_bias", "head_dim"))},
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "sliding_window": None,
    },
    fixed={"hidden_act": "silu"},
    read=_read,
    write=lambda model: {"embd_pdrop": model.dropout, "sliding_window": None},
    presets={},  # of the published ones, 4k models have a sliding window and longer ones LongRoPE
)
