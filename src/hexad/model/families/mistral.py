"""Mistral: llama with sliding windows, which its versions from 0.2 on do not use."""

from dataclasses import replace

from .llama import FAMILY as LLAMA
from .llama import llama_shape

FAMILY = replace(
    LLAMA,
    name="mistral",
    classes=("MistralForCausalLM", "MistralModel"),
    whole_heads=False,
    keys={**LLAMA.keys, "sliding_window": "sliding_window"},
    absent={
        **{key: value for key, value in LLAMA.absent.items() if not key.endswith("_bias")},
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    biases={},
    fixed={"hidden_act": "silu"},
    contexts={"mistral-7b": 32768},
    presets={
        # mistralai/Mistral-7B-v0.3 and -v0.1 (arXiv 2310.06825)
        "mistral-7b": llama_shape((32, 4096, 32, 8, 14336), 32768, 1000000.0),
        "mistral-7b-v0.1": {
            **llama_shape((32, 4096, 32, 8, 14336), 32000, 10000.0),
            "sliding_window": 4096,
        },
    },
)
