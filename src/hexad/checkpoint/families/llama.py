"""Names of llama, mistral, qwen2 and qwen3 tensors in Hugging Face checkpoints."""

from __future__ import annotations

from hexad.config.schema import ModelSettings

from .mapping import HuggingFaceTensor as Tensor

BASE = "model."
"""What the names begin with, but for the head's; files saved without the head lack it."""

BUFFERS = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
"""Rotary frequencies that older versions saved beside the weights."""


def tensors(model: ModelSettings) -> dict[str, Tensor]:
    """Our global tensor name -> where it stands in a Hugging Face state dict."""
    hidden, width, vocab = model.hidden, int(model.head_dim), int(model.vocab)
    queries, keys, inner = model.heads * width, int(model.kv_heads) * width, int(model.ffn_hidden)
    table = {
        "embedding.weight": Tensor(f"{BASE}embed_tokens.weight", (vocab, hidden)),
        "norm.weight": Tensor(f"{BASE}norm.weight", (hidden,)),
    }
    if not model.tied_embeddings:
        table["head.weight"] = Tensor("lm_head.weight", (vocab, hidden))
    linear = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for index in range(model.layers):
        ours, theirs = f"layers.{index}", f"{BASE}layers.{index}"
        attention = f"{theirs}.self_attn"
        table[f"{ours}.attention_norm.weight"] = Tensor(f"{theirs}.input_layernorm.weight", (hidden,))
        table[f"{ours}.ffn_norm.weight"] = Tensor(f"{theirs}.post_attention_layernorm.weight", (hidden,))
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            table[f"{ours}.attention.{name}.weight"] = Tensor(
                f"{attention}.{name}_proj.weight", (rows, hidden)
            )
            if model.qkv_bias:
                table[f"{ours}.attention.{name}.bias"] = Tensor(f"{attention}.{name}_proj.bias", (rows,))
        table[f"{ours}.attention.out.weight"] = Tensor(f"{attention}.o_proj.weight", (hidden, queries))
        if model.qk_norm:
            table[f"{ours}.attention.q_norm.weight"] = Tensor(f"{attention}.q_norm.weight", (width,))
            table[f"{ours}.attention.k_norm.weight"] = Tensor(f"{attention}.k_norm.weight", (width,))
        for name, shape in linear.items():
            table[f"{ours}.ffn.{name}.weight"] = Tensor(f"{theirs}.mlp.{name}_proj.weight", shape)
    return table
