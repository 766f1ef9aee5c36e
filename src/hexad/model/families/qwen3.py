"""Qwen3: llama with norms of every query and key head."""

from dataclasses import replace

from .family import ModelShape
from .llama import Sizes, llama_shape
from .qwen2 import FAMILY as QWEN2


def _qwen3(sizes: Sizes, *, theta: float = 1000000.0, tied: bool = False) -> ModelShape:
    """Qwen/Qwen3-*: arXiv 2505.09388. Heads are 128 wide whatever the hidden width."""
    return llama_shape(sizes, 151936, theta, eps=1e-6, head_dim=128, tied=tied)


FAMILY = replace(
    QWEN2,
    name="qwen3",
    classes=("Qwen3ForCausalLM", "Qwen3Model"),
    qkv_bias=False,
    qk_norm=True,
    absent={**QWEN2.absent, "head_dim": 128, "attention_bias": False},
    biases={"attention_bias": ("qkv_bias", "out_bias")},
    also={},
    contexts={"qwen3-": 32768, "qwen3-4b-2507": 262144},
    presets={
        "qwen3-0.6b": _qwen3((28, 1024, 16, 8, 3072), tied=True),
        "qwen3-1.7b": _qwen3((28, 2048, 16, 8, 6144), tied=True),
        "qwen3-4b": _qwen3((36, 2560, 32, 8, 9728), tied=True),
        "qwen3-4b-2507": _qwen3((36, 2560, 32, 8, 9728), theta=5000000.0, tied=True),
        "qwen3-8b": _qwen3((36, 4096, 32, 8, 12288)),
        "qwen3-14b": _qwen3((40, 5120, 40, 8, 17408)),
        "qwen3-32b": _qwen3((64, 5120, 64, 8, 25600)),
    },
)
