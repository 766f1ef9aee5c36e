"""Published model shapes, by name.

Every entry states the checkpoint whose ``config.json`` (Hugging Face) it was taken from; the tests hold each
one to the checkpoint's exact number of parameters. Keys are those of ``ModelSettings``.
"""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]
Sizes = tuple[int, int, int, int, int]  # layers, hidden, heads, kv_heads, ffn_hidden


def _gpt2(layers: int, hidden: int, heads: int) -> Shape:
    """openai-community/gpt2*: Radford et al. 2019, table 2."""
    return {
        "family": "gpt2",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_hidden": 4 * hidden,
        "vocab": 50257,
        "max_positions": 1024,
        "tied_embeddings": True,
        "qkv_bias": True,
        "qk_norm": False,
        "norm_eps": 1e-5,
    }


def _rotary(
    family: str,
    sizes: Sizes,
    vocab: int,
    theta: float,
    *,
    eps: float = 1e-5,
    head_dim: int | None = None,
    tied: bool = False,
    scaling: float | None = None,
) -> Shape:
    """A llama-like model; ``scaling`` is the factor of Llama 3.1's frequency scaling."""
    layers, hidden, heads, kv_heads, ffn_hidden = sizes
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
    return {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "ffn_hidden": ffn_hidden,
        "vocab": vocab,
        "tied_embeddings": tied,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": {"factor": scaling, **llama3} if scaling else None,
    }


def _llama2(sizes: Sizes) -> Shape:
    """meta-llama/Llama-2-*-hf: arXiv 2307.09288."""
    return _rotary("llama", sizes, 32000, 10000.0)


def _llama3(sizes: Sizes, *, scaling: float | None = None, tied: bool = False) -> Shape:
    """meta-llama/Meta-Llama-3*, Llama-3.1-*, Llama-3.2-*: arXiv 2407.21783 and the model cards."""
    return _rotary("llama", sizes, 128256, 500000.0, scaling=scaling, tied=tied)


def _qwen25(sizes: Sizes, *, vocab: int = 152064, eps: float = 1e-6, tied: bool = False) -> Shape:
    """Qwen/Qwen2.5-*, the base models (some instruct models differ in ``norm_eps``): arXiv 2412.15115."""
    return _rotary("qwen2", sizes, vocab, 1000000.0, eps=eps, tied=tied)


def _qwen3(sizes: Sizes, *, tied: bool = False) -> Shape:
    """Qwen/Qwen3-*: arXiv 2505.09388. Heads are 128 wide whatever the hidden width."""
    return _rotary("qwen3", sizes, 151936, 1000000.0, eps=1e-6, head_dim=128, tied=tied)


PRESETS: dict[str, Shape] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama2-7b": _llama2((32, 4096, 32, 32, 11008)),
    "llama2-13b": _llama2((40, 5120, 40, 40, 13824)),
    "llama2-70b": _llama2((80, 8192, 64, 8, 28672)),
    "llama3-8b": _llama3((32, 4096, 32, 8, 14336)),
    "llama3-70b": _llama3((80, 8192, 64, 8, 28672)),
    "llama3.1-8b": _llama3((32, 4096, 32, 8, 14336), scaling=8.0),
    "llama3.1-70b": _llama3((80, 8192, 64, 8, 28672), scaling=8.0),
    "llama3.1-405b": _llama3((126, 16384, 128, 8, 53248), scaling=8.0),
    "llama3.2-1b": _llama3((16, 2048, 32, 8, 8192), scaling=32.0, tied=True),
    "llama3.2-3b": _llama3((28, 3072, 24, 8, 8192), scaling=32.0, tied=True),
    # mistralai/Mistral-7B-v0.3: no sliding window (v0.1 has one, which is not supported).
    "mistral-7b": _rotary("mistral", (32, 4096, 32, 8, 14336), 32768, 1000000.0),
    "qwen2.5-0.5b": _qwen25((24, 896, 14, 2, 4864), vocab=151936, tied=True),
    "qwen2.5-1.5b": _qwen25((28, 1536, 12, 2, 8960), vocab=151936, tied=True),
    "qwen2.5-3b": _qwen25((36, 2048, 16, 2, 11008), vocab=151936, tied=True),
    "qwen2.5-7b": _qwen25((28, 3584, 28, 4, 18944)),
    "qwen2.5-14b": _qwen25((48, 5120, 40, 8, 13824), eps=1e-5),
    "qwen2.5-32b": _qwen25((64, 5120, 40, 8, 27648), eps=1e-5),
    "qwen2.5-72b": _qwen25((80, 8192, 64, 8, 29568), eps=1e-5),
    "qwen3-0.6b": _qwen3((28, 1024, 16, 8, 3072), tied=True),
    "qwen3-1.7b": _qwen3((28, 2048, 16, 8, 6144), tied=True),
    "qwen3-4b": _qwen3((36, 2560, 32, 8, 9728), tied=True),
    "qwen3-8b": _qwen3((36, 4096, 32, 8, 12288)),
    "qwen3-14b": _qwen3((40, 5120, 40, 8, 17408)),
    "qwen3-32b": _qwen3((64, 5120, 64, 8, 25600)),
}
