"""Mistral: llama without sliding windows, which are not supported."""

from __future__ import annotations

from dataclasses import replace

from .keys import without_window
from .llama import FAMILY as LLAMA
from .llama import llama_shape

FAMILY = replace(
    LLAMA,
    name="mistral",
    classes=("MistralForCausalLM", "MistralModel"),
    whole_heads=False,
    absent={
        **{key: value for key, value in LLAMA.absent.items() if not key.endswith("_bias")},
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    fixed={"hidden_act": "silu"},
    read=without_window,
    write=lambda model: {"sliding_window": None},
    # mistralai/Mistral-7B-v0.3: v0.1 has a sliding window.
    presets={"mistral-7b": llama_shape((32, 4096, 32, 8, 14336), 32768, 1000000.0)},
)
