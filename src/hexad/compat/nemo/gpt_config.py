"""NeMo 2's configuration of a language model, and what its settings mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
from torch.nn import functional

from hexad.config import HexadError

from ..megatron.earlier import SETTINGS
from ..megatron.flags import FLAGS

_OF_NEMO = {
    "data_step_fn": None,
    "disable_parameter_transpose_cache": False,
    "forward_step_fn": None,
    "fp16_lm_cross_entropy": False,
    "generation_config": None,
    "parallel_output": True,
    "scatter_embedding_sequence_parallel": True,
    "seq_len_interpolation_factor": None,
    "should_pad_vocab": False,
    "tp_comm_overlap_cfg": None,
}
"""Settings of NeMo's class beside those of Megatron-Core's -> defaults."""
FURTHER = {name: value for name, value in (SETTINGS | _OF_NEMO).items() if not name.startswith("_")}
"""Settings of Megatron-Core's and NeMo's classes -> defaults."""

_Further: Any = make_dataclass(
    "_Further", [(name, Any, field(default=value, kw_only=True)) for name, value in FURTHER.items()]
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


_OTHER_FLAGS = {
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
"""Settings that are not called like the attribute of their flag."""

_OF_GPT = frozenset(GPTConfig.__annotations__)
"""The settings that :class:`GPTConfig` names."""

_NO_EFFECT = frozenset(
    """
    autocast_dtype batch_p2p_comm batch_p2p_sync cpu_offloading_activations cpu_offloading_double_buffering
    cpu_offloading_weights cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool
    disable_parameter_transpose_cache enable_autocast expert_gtp_weight_remat_size fused_single_qkv_rope
    generation_config gtp_weight_remat_size hetereogenous_dist_checkpoint memory_efficient_layer_norm
    moe_ncclep_static_shape num_microbatches_with_partial_activation_checkpoints parallel_output
    pipeline_dtype scatter_embedding_sequence_parallel should_pad_vocab timers tp_comm_atomic_ag
    tp_comm_atomic_rs tp_comm_overlap_cfg tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv
    tp_only_amax_red use_te_rng_tracker
    """.split()
)
"""Settings without flag that only concern speed or memory, or that a trainer sets."""


def further_settings(config: GPTConfig) -> dict[str, Any]:
    """Attributes of Megatron-LM's flags -> values, of the settings whose values are not the defaults.

    Raises:
        HexadError: a setting that is not supported, or has no flag and would change the numbers.
    """
    flags = {flag.attribute: flag for flag in FLAGS.values()}
    attributes: dict[str, Any] = {}
    for name, default in FURTHER.items():
        value = getattr(config, name)
        if name in _OF_GPT or name in _NO_EFFECT or value == default:
            continue
        attribute = _OTHER_FLAGS.get(name, name)
        flag = flags.get(attribute)
        if flag is None or (flag.effect == "refused" and value != flag.default):
            shown = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
            raise HexadError(f"GPTConfig.{name}: found {shown}; it is not supported: leave it out")
        if flag.effect == "sets":
            attributes[attribute] = value
    return attributes
