"""NeMo 2's configuration of a language model, and what its settings mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
from torch.nn import functional

from hexad.config import HexadError

from ..facade.foreign_names import shown_value
from ..megatron.tables import FLAGS, meaning_of
from .tables import SETTINGS

_Further: Any = make_dataclass(
    "_Further",
    [(name, Any, field(default=setting.default, kw_only=True)) for name, setting in SETTINGS.items()],
)


@dataclass
class GPTConfig(_Further):
    """A transformer under Megatron-Core's names; the default is GPT-2's kind.

    Attributes:
        num_layers, hidden_size, num_attention_heads, num_query_groups, kv_channels, ffn_hidden_size: sizes.
        seq_length, max_position_embeddings: tokens of a sample, and of the longest one.
        vocab_size: None: the tokenizer's.
        normalization, activation_func, gated_linear_unit, position_embedding_type, add_bias_linear,
            add_qkv_bias, qk_layernorm: together those of GPT-2, Llama, Qwen 2 or Qwen 3.
        share_embeddings_and_output_weights: the head is the embedding.
        layernorm_epsilon, init_method_std, hidden_dropout, attention_dropout: of the layers.
        rotary_base, rotary_percent, window_size: of attention; the last (tokens to the left, 0).
        recompute_granularity, recompute_method, recompute_num_layers, cp_comm_type: of the run.
        num_moe_experts, mtp_num_layers: None.
        tensor_model_parallel_size, pipeline_model_parallel_size, virtual_pipeline_model_parallel_size,
            context_parallel_size, sequence_parallel: those of the strategy, which sets them.
        others: those of Megatron-Core's ``TransformerConfig``, as the flags of their names, see
            :func:`further_settings`; and NeMo's own.
    """

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    seq_length: int = 1024
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    normalization: str = "LayerNorm"
    activation_func: Callable[..., Any] = functional.gelu
    gated_linear_unit: bool = False
    position_embedding_type: str = "learned_absolute"
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    share_embeddings_and_output_weights: bool = True
    layernorm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    window_size: Sequence[int] | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    cp_comm_type: str | None = None
    num_moe_experts: int | None = None
    mtp_num_layers: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    make_vocab_size_divisible_by: int = 128
    params_dtype: torch.dtype = torch.float32
    bf16: bool = False
    fp16: bool = False
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    bias_dropout_add_fusion: bool = False
    masked_softmax_fusion: bool = True
    persist_layer_norm: bool = False
    apply_rope_fusion: bool = False
    cross_entropy_loss_fusion: bool = True
    cross_entropy_fusion_impl: str = "native"
    gradient_accumulation_fusion: bool = False
    attention_softmax_in_fp32: bool = False
    apply_query_key_layer_scaling: bool = False
    deallocate_pipeline_outputs: bool = True
    layernorm_zero_centered_gamma: bool = False
    use_transformer_engine_full_layer_spec: bool = False
    enable_cuda_graph: bool = False
    transformer_layer_spec: Any = None
    attention_backend: Any = None
    tp_comm_overlap: bool = False


_OF_GPT = frozenset(GPTConfig.__annotations__)
"""The settings that :class:`GPTConfig` names."""


def further_settings(config: GPTConfig) -> dict[str, Any]:
    """Attributes of Megatron-LM's flags -> values, of the settings whose values are not the defaults.

    Raises:
        HexadError: a setting that is not supported, or has no flag and would change the numbers.
    """
    attributes: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        value, meaning = getattr(config, name), meaning_of(setting)
        if name in _OF_GPT or value == setting.default:
            continue
        flag = FLAGS.get(setting.target)
        if meaning.effect == "refused" and (flag is None or value != flag.default):
            raise HexadError(f"GPTConfig.{name}: {meaning.problem(shown_value(value))}")
        if meaning.effect == "becomes" and flag is not None:
            attributes[flag.attribute] = value
    return attributes
