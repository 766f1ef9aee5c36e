"""GPT-2: LayerNorm, GELU, biases everywhere, learned positions, published weights stored transposed."""

from typing import Any

from hexad.config.model import ModelSettings

from .family import Family, ModelShape, one_dropout


def _write(model: ModelSettings) -> dict[str, Any]:
    inner = None if model.ffn_hidden == 4 * model.hidden else model.ffn_hidden
    return {"embd_pdrop": model.dropout, "n_inner": inner}


def _preset(layers: int, hidden: int, heads: int) -> ModelShape:
    """openai-community/gpt2*: Radford et al. 2019, table 2."""
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_hidden": 4 * hidden,
        "vocab": 50257,
        "max_positions": 1024,
        "tied_embeddings": True,
        "norm_eps": 1e-5,
    }


FAMILY = Family(
    name="gpt2",
    classes=("GPT2LMHeadModel", "GPT2Model"),
    norm="layer",
    rotary=False,
    gated=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tied=True,
    grouped=False,
    modules={
        "embedding": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "head": "lm_head",
        "attention_norm": "ln_1",
        "attention.q": "attn.c_attn",
        "attention.k": "attn.c_attn",
        "attention.v": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    },
    base="transformer.",
    layer="h.{}.",
    transposed=True,
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",  # causal masks that older versions saved
    keys={
        "vocab": "vocab_size",
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "ffn_hidden": "n_inner",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "init_std": "initializer_range",
        "tied_embeddings": "tie_word_embeddings",
    },
    absent={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    aliases={  # the general names, which gpt2 understands too
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    fixed={"activation_function": "gelu_new"},
    read=one_dropout,
    write=_write,
    contexts={"gpt2": 1024},
    presets={
        "gpt2": _preset(12, 768, 12),
        "gpt2-medium": _preset(24, 1024, 16),
        "gpt2-large": _preset(36, 1280, 20),
        "gpt2-xl": _preset(48, 1600, 25),
    },
)
