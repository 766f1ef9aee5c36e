"""Granite 3: llama with four multipliers, of embeddings, attention scores, residual branches and logits."""

from dataclasses import replace

from .family import ModelShape
from .llama import FAMILY as LLAMA
from .llama import Sizes, llama_shape

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _granite(sizes: Sizes, multipliers: tuple[float, float, float, float], theta: float) -> ModelShape:
    """ibm-granite/granite-3.1-*-base: the model cards."""
    return llama_shape(sizes, 49155, theta, tied=True) | dict(zip(_MULTIPLIERS, multipliers))


FAMILY = replace(
    LLAMA,
    name="granite",
    classes=("GraniteForCausalLM", "GraniteModel"),
    keys={**LLAMA.keys, **{name: name for name in _MULTIPLIERS}},
    absent={
        **{key: value for key, value in LLAMA.absent.items() if key != "head_dim"},
        **dict.fromkeys(_MULTIPLIERS, 1.0),
    },
    contexts={"granite3.1": 131072},
    presets={
        "granite3.1-2b": _granite((40, 2048, 32, 8, 8192), (12.0, 0.015625, 0.22, 8.0), 5000000.0),
        "granite3.1-8b": _granite((40, 4096, 32, 8, 12800), (12.0, 0.0078125, 0.22, 16.0), 10000000.0),
    },
)
