"""Qwen2 and Qwen2.5: llama with biases on queries, keys and values."""

from dataclasses import replace
from typing import Any

from hexad.config.model import ModelSettings

from .family import ConfigFile, ModelShape
from .llama import FAMILY as LLAMA
from .llama import Sizes, llama_shape

_SLIDING = "sliding_attention"


def _window(keys: ConfigFile) -> dict[str, Any]:
    """The window of all layers, or of none; layers from ``max_window_layers`` on have it, unless
    ``layer_types`` says which."""
    layers, first = keys.count("num_hidden_layers"), keys.number("max_window_layers")
    if not keys.raw["use_sliding_window"] or keys.raw.get("sliding_window") is None:
        return {"sliding_window": None}
    kinds = keys.raw.get("layer_types")
    windows = layers - min(first, layers) if kinds is None else kinds.count(_SLIDING)
    if 0 < windows < layers:
        raise keys.problem(
            "sliding_window",
            f"which {windows:.0f} of {layers} layers would use: all have to, or none; where no sequence is "
            "longer than the window, set it to null there",
        )
    return {"sliding_window": keys.count("sliding_window") if windows else None}


def _write(model: ModelSettings) -> dict[str, Any]:
    if model.sliding_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "max_window_layers": 0}


def _qwen25(sizes: Sizes, *, vocab: int = 152064, eps: float = 1e-6, tied: bool = False) -> ModelShape:
    """Qwen/Qwen2.5-*, the base models (some instruct models differ in ``norm_eps``): arXiv 2412.15115."""
    return llama_shape(sizes, vocab, 1000000.0, eps=eps, tied=tied)


_LACKED = ("attention_bias", "mlp_bias", "head_dim")

FAMILY = replace(
    LLAMA,
    name="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2Model"),
    whole_heads=False,
    qkv_bias=True,
    keys={**LLAMA.keys, "sliding_window": "sliding_window"},
    absent={
        **{key: value for key, value in LLAMA.absent.items() if key not in _LACKED},
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    biases={},
    fixed={"hidden_act": "silu"},
    also={"attention_bias": (True, False)},  # it has its biases whatever the key says
    layer_types=("full_attention", _SLIDING),
    read=_window,
    write=_write,
    contexts={"qwen2.5-": 32768} | dict.fromkeys([f"qwen2.5-{size}b" for size in (7, 14, 32, 72)], 131072),
    presets={
        "qwen2.5-0.5b": _qwen25((24, 896, 14, 2, 4864), vocab=151936, tied=True),
        "qwen2.5-1.5b": _qwen25((28, 1536, 12, 2, 8960), vocab=151936, tied=True),
        "qwen2.5-3b": _qwen25((36, 2048, 16, 2, 11008), vocab=151936, tied=True),
        "qwen2.5-7b": _qwen25((28, 3584, 28, 4, 18944)),
        "qwen2.5-14b": _qwen25((48, 5120, 40, 8, 13824), eps=1e-5),
        "qwen2.5-32b": _qwen25((64, 5120, 40, 8, 27648), eps=1e-5),
        "qwen2.5-72b": _qwen25((80, 8192, 64, 8, 29568), eps=1e-5),
    },
)
