"""Phi-3 and Phi-4-mini: llama with fused published weights and, where the configuration says so, partial
rotary positions and LongRoPE."""

from dataclasses import replace

from .family import one_dropout
from .llama import FAMILY as LLAMA
from .llama import llama_shape

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
    keys={
        **LLAMA.keys,
        "rotary_fraction": "partial_rotary_factor",
        "dropout": "resid_pdrop",
        "sliding_window": "sliding_window",
    },
    absent={
        **{key: value for key, value in LLAMA.absent.items() if not key.endswith(("_bias", "head_dim"))},
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "sliding_window": None,
    },
    fixed={"hidden_act": "silu"},
    scalings=("longrope",),
    biases={},
    read=one_dropout,
    write=lambda model: {"embd_pdrop": model.dropout},
    contexts={"phi3-mini-4k": 4096, "phi3-medium-4k": 4096},
    presets={
        # microsoft/Phi-3-mini-4k-instruct, -medium-4k-instruct (arXiv 2404.14219)
        "phi3-mini-4k": {**llama_shape((32, 3072, 32, 32, 8192), 32064, 10000.0), "sliding_window": 2047},
        "phi3-medium-4k": {**llama_shape((40, 5120, 40, 10, 17920), 32064, 10000.0), "sliding_window": 2047},
    },
)
