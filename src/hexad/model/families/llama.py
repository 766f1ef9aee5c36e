"""Names of llama, mistral, qwen2 and qwen3 tensors in Hugging Face checkpoints."""

from __future__ import annotations

from hexad.config.schema import ModelSettings

from .mapping import HuggingFaceTensor as Tensor


def tensors(model: ModelSettings) -> dict[str, Tensor]:
    """Our global tensor name -> where it stands in a Hugging Face state dict."""
    table = {
        "embedding.weight": Tensor("model.embed_tokens.weight"),
        "norm.weight": Tensor("model.norm.weight"),
    }
    if not model.tied_embeddings:
        table["head.weight"] = Tensor("lm_head.weight")
    for index in range(model.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        table[f"{ours}.attention_norm.weight"] = Tensor(f"{theirs}.input_layernorm.weight")
        table[f"{ours}.ffn_norm.weight"] = Tensor(f"{theirs}.post_attention_layernorm.weight")
        for name in ("q", "k", "v"):
            table[f"{ours}.attention.{name}.weight"] = Tensor(f"{theirs}.self_attn.{name}_proj.weight")
            if model.qkv_bias:
                table[f"{ours}.attention.{name}.bias"] = Tensor(f"{theirs}.self_attn.{name}_proj.bias")
        table[f"{ours}.attention.out.weight"] = Tensor(f"{theirs}.self_attn.o_proj.weight")
        if model.qk_norm:
            table[f"{ours}.attention.q_norm.weight"] = Tensor(f"{theirs}.self_attn.q_norm.weight")
            table[f"{ours}.attention.k_norm.weight"] = Tensor(f"{theirs}.self_attn.k_norm.weight")
        for name in ("gate", "up", "down"):
            table[f"{ours}.ffn.{name}.weight"] = Tensor(f"{theirs}.mlp.{name}_proj.weight")
    return table
