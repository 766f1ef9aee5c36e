"""DeepSeek-V2: the attention of DeepSeek-V3 (arXiv 2405.04434), here with dense layers only."""

from dataclasses import replace

from .deepseek_v3 import FAMILY as DEEPSEEK_V3

FAMILY = replace(
    DEEPSEEK_V3,
    name="deepseek_v2",
    classes=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    whole_heads=True,
    absent={
        **{key: value for key, value in DEEPSEEK_V3.absent.items() if key != "rope_interleave"},
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "mlp_bias": False,
    },
    fixed={"hidden_act": "silu"},
    also={},
)
