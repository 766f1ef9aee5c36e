"""Configurations of megatron-core's ``GPTModel`` that run on CPUs."""

from typing import Any

from torch.nn import functional as F


def core_config(llama: bool, **sizes: Any) -> Any:
    """A ``TransformerConfig`` like Llama's or GPT-2's, without dropout and fused kernels."""
    from megatron.core.transformer import TransformerConfig

    fusions = ("bias_activation", "masked_softmax", "bias_dropout", "gradient_accumulation")
    return TransformerConfig(
        num_attention_heads=4,
        num_query_groups=2 if llama else 4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        activation_func=F.silu if llama else lambda x: F.gelu(x, approximate="tanh"),
        apply_rope_fusion=False,
        **dict.fromkeys((f"{name}_fusion" for name in fusions), False),
        **{"add_bias_linear": not llama, **sizes},
    )
