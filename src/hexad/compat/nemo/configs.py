"""NeMo 2's configurations of language models: what families have in common, and the sizes of published
models, which ``configs.txt`` lists."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from importlib.resources import files
from typing import Any

from torch.nn import functional

from .gpt_config import GPTConfig


@dataclass
class LlamaConfig(GPTConfig):
    """Llama's kind: RMSNorm, rotary positions, SwiGLU, no biases."""

    normalization: str = "RMSNorm"
    activation_func: Callable[..., Any] = functional.silu
    gated_linear_unit: bool = True
    position_embedding_type: str = "rope"
    add_bias_linear: bool = False
    seq_length: int = 4096
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    share_embeddings_and_output_weights: bool = False


@dataclass
class Llama3Config(LlamaConfig):
    """What sizes of Llama 3 have in common."""

    num_query_groups: int | None = 8
    init_method_std: float = 0.01
    rotary_base: float = 500_000
    seq_length: int = 8192


@dataclass
class Llama31Config(Llama3Config):
    """What sizes of Llama 3.1 have in common: rotary frequencies scaled for longer sequences."""

    scale_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    old_context_len: int = 8192
    init_method_std: float = 0.02
    seq_length: int = 131072


@dataclass
class Phi3Config(LlamaConfig):
    """What sizes of Phi 3 have in common."""


@dataclass
class Qwen2Config(LlamaConfig):
    """What sizes of Qwen 2 have in common."""

    add_qkv_bias: bool = True
    vocab_size: int | None = 151936
    layernorm_epsilon: float = 1e-6
    rotary_base: float = 1_000_000


@dataclass
class Qwen3Config(Qwen2Config):
    """What dense sizes of Qwen 3 have in common."""

    add_qkv_bias: bool = False
    qk_layernorm: bool = True
    kv_channels: int | None = 128
    num_query_groups: int | None = 8
    max_position_embeddings: int | None = 40960


def _sizes() -> dict[str, type[GPTConfig]]:
    """The classes of ``configs.txt``, whose head describes the format."""
    classes: dict[str, type[GPTConfig]] = {}
    text = files(__package__).joinpath("configs.txt").read_text(encoding="utf-8")
    for row in re.split(r"\n(?=\w)", text)[1:]:
        head, *lines = row.splitlines()
        name, _, rest = head.partition(" of ")
        base, _, what = rest.partition(": ")
        values = (word.partition("=") for line in lines for word in line.split())
        fields = [(key, Any, field(default=literal_eval(value))) for key, _, value in values]
        parent = classes.get(base) or globals()[base]
        body = {"__doc__": f"{what}.", "__module__": __name__}
        classes[name] = make_dataclass(name, fields, bases=(parent,), namespace=body)
    return classes


SIZES = _sizes()
"""Classes of published sizes, by name; each is an attribute of this module too."""
globals().update(SIZES)
