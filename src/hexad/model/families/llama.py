"""Llama, and what is common to the families that followed it."""

from .family import Family, ModelShape

Sizes = tuple[int, int, int, int, int]  # layers, hidden, heads, kv_heads, ffn_hidden


def llama_shape(
    sizes: Sizes,
    vocab: int,
    theta: float,
    *,
    eps: float = 1e-5,
    head_dim: int | None = None,
    tied: bool = False,
    scaling: float | None = None,
) -> ModelShape:
    """A preset; ``scaling`` is the factor of Llama 3.1's frequency scaling."""
    layers, hidden, heads, kv_heads, ffn_hidden = sizes
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "ffn_hidden": ffn_hidden,
        "vocab": vocab,
        "tied_embeddings": tied,
        "norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": {"factor": scaling, **llama3} if scaling else None,
    }


def _llama2(sizes: Sizes) -> ModelShape:
    """meta-llama/Llama-2-*-hf: arXiv 2307.09288."""
    return llama_shape(sizes, 32000, 10000.0)


def _llama3(sizes: Sizes, *, scaling: float | None = None, tied: bool = False) -> ModelShape:
    """meta-llama/Meta-Llama-3*, Llama-3.1-*, Llama-3.2-*: arXiv 2407.21783 and the model cards."""
    return llama_shape(sizes, 128256, 500000.0, scaling=scaling, tied=tied)


FAMILY = Family(
    name="llama",
    classes=("LlamaForCausalLM", "LlamaModel"),
    whole_heads=True,
    modules={
        "embedding": "embed_tokens",
        "norm": "norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    },
    keys={
        "vocab": "vocab_size",
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn_hidden": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
        "init_std": "initializer_range",
        "tied_embeddings": "tie_word_embeddings",
    },
    absent={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    },
    biases={"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)},
    fixed={"hidden_act": "silu"},
    contexts={"llama2": 4096, "llama3-": 8192, "llama3.1": 131072, "llama3.2": 131072},
    presets={
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
    },
)
