"""NeMo 2's configurations of language models, with the sizes of published ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import functional

from .gpt_config import GPTConfig


@dataclass
class GPTConfig126M(GPTConfig):
    """The 126M model of NeMo's GPT."""

    seq_length: int = 2048
    num_layers: int = 12
    hidden_size: int = 768
    ffn_hidden_size: int | None = 3072
    num_attention_heads: int = 12


@dataclass
class GPTConfig5B(GPTConfig):
    """The 5B model of NeMo's GPT."""

    seq_length: int = 2048
    num_layers: int = 24
    hidden_size: int = 4096
    ffn_hidden_size: int | None = 16384
    num_attention_heads: int = 32


@dataclass
class GPTConfig7B(GPTConfig):
    """The 7B model of NeMo's GPT."""

    seq_length: int = 2048
    num_layers: int = 32
    hidden_size: int = 4096
    ffn_hidden_size: int | None = 10880
    num_attention_heads: int = 32


@dataclass
class GPTConfig20B(GPTConfig):
    """The 20B model of NeMo's GPT."""

    seq_length: int = 2048
    num_layers: int = 44
    hidden_size: int = 6144
    ffn_hidden_size: int | None = 24576
    num_attention_heads: int = 48


@dataclass
class GPTConfig40B(GPTConfig):
    """The 40B model of NeMo's GPT."""

    seq_length: int = 2048
    num_layers: int = 48
    hidden_size: int = 8192
    ffn_hidden_size: int | None = 32768
    num_attention_heads: int = 64


@dataclass
class GPTConfig175B(GPTConfig):
    """GPT-3 (Brown et al., arXiv 2005.14165)."""

    seq_length: int = 2048
    num_layers: int = 96
    hidden_size: int = 12288
    ffn_hidden_size: int | None = 49152
    num_attention_heads: int = 96
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    layernorm_zero_centered_gamma: bool = True


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
class Llama2Config7B(LlamaConfig):
    """Llama 2 7B."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_query_groups: int | None = 32
    ffn_hidden_size: int | None = 11008


@dataclass
class Llama2Config13B(LlamaConfig):
    """Llama 2 13B."""

    num_layers: int = 40
    hidden_size: int = 5120
    num_attention_heads: int = 40
    num_query_groups: int | None = 40
    ffn_hidden_size: int | None = 13824


@dataclass
class Llama2Config70B(LlamaConfig):
    """Llama 2 70B."""

    num_layers: int = 80
    hidden_size: int = 8192
    num_attention_heads: int = 64
    num_query_groups: int | None = 8
    ffn_hidden_size: int | None = 28672


@dataclass
class CodeLlamaConfig7B(Llama2Config7B):
    """Code Llama 7B."""

    rotary_base: float = 1_000_000
    seq_length: int = 16384


@dataclass
class CodeLlamaConfig13B(Llama2Config13B):
    """Code Llama 13B."""

    rotary_base: float = 1_000_000
    seq_length: int = 16384


@dataclass
class CodeLlamaConfig34B(LlamaConfig):
    """Code Llama 34B."""

    num_layers: int = 48
    hidden_size: int = 8192
    num_attention_heads: int = 64
    num_query_groups: int | None = 8
    ffn_hidden_size: int | None = 22016
    rotary_base: float = 1_000_000
    seq_length: int = 16384


@dataclass
class CodeLlamaConfig70B(Llama2Config70B):
    """Code Llama 70B."""


@dataclass
class Llama3Config(LlamaConfig):
    """What sizes of Llama 3 have in common."""

    num_query_groups: int | None = 8
    init_method_std: float = 0.01
    rotary_base: float = 500_000
    seq_length: int = 8192


@dataclass
class Llama3Config8B(Llama3Config):
    """Llama 3 8B."""

    num_layers: int = 32
    hidden_size: int = 4096
    ffn_hidden_size: int | None = 14336
    num_attention_heads: int = 32


@dataclass
class Llama3Config70B(Llama3Config):
    """Llama 3 70B."""

    num_layers: int = 80
    hidden_size: int = 8192
    ffn_hidden_size: int | None = 28672
    num_attention_heads: int = 64
    init_method_std: float = 0.008944


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
class Llama31Config8B(Llama31Config):
    """Llama 3.1 8B."""

    num_layers: int = 32
    hidden_size: int = 4096
    ffn_hidden_size: int | None = 14336
    num_attention_heads: int = 32


@dataclass
class Llama31Config70B(Llama31Config):
    """Llama 3.1 70B."""

    num_layers: int = 80
    hidden_size: int = 8192
    ffn_hidden_size: int | None = 28672
    num_attention_heads: int = 64


@dataclass
class Llama31Nemotron70BConfig(Llama31Config70B):
    """Llama 3.1 Nemotron 70B."""

    kv_channels: int | None = 128


@dataclass
class Llama31NemotronNano8BConfig(Llama31Config8B):
    """Llama 3.1 Nemotron Nano 8B."""

    kv_channels: int | None = 128


@dataclass
class Llama31Config405B(Llama31Config):
    """Llama 3.1 405B."""

    num_layers: int = 126
    hidden_size: int = 16384
    ffn_hidden_size: int | None = 53248
    num_attention_heads: int = 128


@dataclass
class Llama32Config1B(Llama31Config):
    """Llama 3.2 1B."""

    scale_factor: float = 32.0
    share_embeddings_and_output_weights: bool = True
    num_layers: int = 16
    hidden_size: int = 2048
    ffn_hidden_size: int | None = 8192
    num_attention_heads: int = 32


@dataclass
class Llama32Config3B(Llama31Config):
    """Llama 3.2 3B."""

    scale_factor: float = 32.0
    share_embeddings_and_output_weights: bool = True
    num_layers: int = 28
    hidden_size: int = 3072
    ffn_hidden_size: int | None = 8192
    num_attention_heads: int = 24


@dataclass
class MistralConfig7B(LlamaConfig):
    """Mistral 7B."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_query_groups: int | None = 8
    ffn_hidden_size: int | None = 14336
    seq_length: int = 32768
    window_size: Sequence[int] | None = (4096, 0)
    cp_comm_type: str | None = "a2a"


@dataclass
class MistralNeMoConfig12B(MistralConfig7B):
    """Mistral NeMo 12B."""

    num_layers: int = 40
    hidden_size: int = 5120
    kv_channels: int | None = 128
    seq_length: int = 4096
    window_size: Sequence[int] | None = None
    cp_comm_type: str | None = None
    rotary_base: float = 1_000_000


@dataclass
class Phi3Config(LlamaConfig):
    """What sizes of Phi 3 have in common."""


@dataclass
class Phi3ConfigMini(Phi3Config):
    """Phi 3 mini."""

    num_layers: int = 32
    hidden_size: int = 3072
    num_attention_heads: int = 32
    num_query_groups: int | None = 32
    ffn_hidden_size: int | None = 8192
    vocab_size: int | None = 32064


@dataclass
class Qwen2Config(LlamaConfig):
    """What sizes of Qwen 2 have in common."""

    add_qkv_bias: bool = True
    vocab_size: int | None = 151936
    layernorm_epsilon: float = 1e-6
    rotary_base: float = 1_000_000


@dataclass
class Qwen2Config500M(Qwen2Config):
    """Qwen 2 0.5B."""

    num_layers: int = 24
    hidden_size: int = 896
    num_attention_heads: int = 14
    num_query_groups: int | None = 2
    ffn_hidden_size: int | None = 4864


@dataclass
class Qwen25Config500M(Qwen2Config500M):
    """Qwen 2.5 0.5B."""

    seq_length: int = 32768


@dataclass
class Qwen2Config1P5B(Qwen2Config):
    """Qwen 2 1.5B."""

    num_layers: int = 28
    hidden_size: int = 1536
    num_attention_heads: int = 12
    num_query_groups: int | None = 2
    ffn_hidden_size: int | None = 8960


@dataclass
class Qwen25Config1P5B(Qwen2Config1P5B):
    """Qwen 2.5 1.5B."""

    seq_length: int = 131072


@dataclass
class Qwen25Config3B(Qwen2Config):
    """Qwen 2.5 3B."""

    num_layers: int = 36
    hidden_size: int = 2048
    num_attention_heads: int = 16
    num_query_groups: int | None = 2
    ffn_hidden_size: int | None = 11008
    share_embeddings_and_output_weights: bool = True


@dataclass
class Qwen2Config7B(Qwen2Config):
    """Qwen 2 7B."""

    num_layers: int = 28
    hidden_size: int = 3584
    num_attention_heads: int = 28
    num_query_groups: int | None = 4
    ffn_hidden_size: int | None = 18944
    vocab_size: int | None = 152064


@dataclass
class Qwen25Config7B(Qwen2Config7B):
    """Qwen 2.5 7B."""

    seq_length: int = 131072


@dataclass
class Qwen25Config14B(Qwen2Config):
    """Qwen 2.5 14B."""

    num_layers: int = 48
    hidden_size: int = 5120
    num_attention_heads: int = 40
    num_query_groups: int | None = 8
    ffn_hidden_size: int | None = 13824
    vocab_size: int | None = 152064
    layernorm_epsilon: float = 1e-5
    seq_length: int = 131072


@dataclass
class Qwen25Config32B(Qwen2Config):
    """Qwen 2.5 32B."""

    num_layers: int = 64
    hidden_size: int = 5120
    num_attention_heads: int = 40
    num_query_groups: int | None = 8
    ffn_hidden_size: int | None = 27648
    vocab_size: int | None = 152064
    layernorm_epsilon: float = 1e-5
    seq_length: int = 131072


@dataclass
class Qwen2Config72B(Qwen2Config):
    """Qwen 2 72B."""

    num_layers: int = 80
    hidden_size: int = 8192
    num_attention_heads: int = 64
    num_query_groups: int | None = 8
    ffn_hidden_size: int | None = 29568
    vocab_size: int | None = 152064
    layernorm_epsilon: float = 1e-5


@dataclass
class Qwen25Config72B(Qwen2Config72B):
    """Qwen 2.5 72B."""

    seq_length: int = 131072


@dataclass
class Qwen3Config(Qwen2Config):
    """What dense sizes of Qwen 3 have in common."""

    add_qkv_bias: bool = False
    qk_layernorm: bool = True
    kv_channels: int | None = 128
    num_query_groups: int | None = 8
    max_position_embeddings: int | None = 40960


@dataclass
class Qwen3Config600M(Qwen3Config):
    """Qwen 3 0.6B."""

    num_layers: int = 28
    hidden_size: int = 1024
    num_attention_heads: int = 16
    ffn_hidden_size: int | None = 3072
    share_embeddings_and_output_weights: bool = True


@dataclass
class Qwen3Config1P7B(Qwen3Config):
    """Qwen 3 1.7B."""

    num_layers: int = 28
    hidden_size: int = 2048
    num_attention_heads: int = 16
    ffn_hidden_size: int | None = 6144
    share_embeddings_and_output_weights: bool = True


@dataclass
class Qwen3Config4B(Qwen3Config):
    """Qwen 3 4B."""

    num_layers: int = 36
    hidden_size: int = 2560
    num_attention_heads: int = 32
    ffn_hidden_size: int | None = 9728
    share_embeddings_and_output_weights: bool = True


@dataclass
class Qwen3Config8B(Qwen3Config):
    """Qwen 3 8B."""

    num_layers: int = 36
    hidden_size: int = 4096
    num_attention_heads: int = 32
    ffn_hidden_size: int | None = 12288


@dataclass
class Qwen3Config14B(Qwen3Config):
    """Qwen 3 14B."""

    num_layers: int = 40
    hidden_size: int = 5120
    num_attention_heads: int = 40
    ffn_hidden_size: int | None = 17408


@dataclass
class Qwen3Config32B(Qwen3Config):
    """Qwen 3 32B."""

    num_layers: int = 64
    hidden_size: int = 5120
    num_attention_heads: int = 64
    ffn_hidden_size: int | None = 25600


@dataclass
class Qwen3Config30B_A3B(Qwen3Config):
    """Qwen 3 30B-A3B, whose experts are not supported yet."""

    num_moe_experts: int | None = 128


@dataclass
class Qwen3Config235B_A22B(Qwen3Config):
    """Qwen 3 235B-A22B, whose experts are not supported yet."""

    num_moe_experts: int | None = 128
