"""Names of gpt2 tensors in Hugging Face checkpoints (whose linear layers are stored transposed)."""

from __future__ import annotations

from hexad.config.schema import ModelSettings

from .mapping import HuggingFaceTensor as Tensor


def tensors(model: ModelSettings) -> dict[str, Tensor]:
    """Our global tensor name -> where it stands in a Hugging Face state dict."""
    table = {
        "embedding.weight": Tensor("transformer.wte.weight"),
        "positions.weight": Tensor("transformer.wpe.weight"),
        "norm.weight": Tensor("transformer.ln_f.weight"),
        "norm.bias": Tensor("transformer.ln_f.bias"),
    }
    if not model.tied_embeddings:
        table["head.weight"] = Tensor("lm_head.weight")
    for index in range(model.layers):
        ours, theirs = f"layers.{index}", f"transformer.h.{index}"
        for kind in ("weight", "bias"):
            turned = kind == "weight"
            table[f"{ours}.attention_norm.{kind}"] = Tensor(f"{theirs}.ln_1.{kind}")
            table[f"{ours}.ffn_norm.{kind}"] = Tensor(f"{theirs}.ln_2.{kind}")
            for part, name in enumerate(("q", "k", "v")):
                table[f"{ours}.attention.{name}.{kind}"] = Tensor(
                    f"{theirs}.attn.c_attn.{kind}", turned, (part, 3)
                )
            table[f"{ours}.attention.out.{kind}"] = Tensor(f"{theirs}.attn.c_proj.{kind}", turned)
            table[f"{ours}.ffn.up.{kind}"] = Tensor(f"{theirs}.mlp.c_fc.{kind}", turned)
            table[f"{ours}.ffn.down.{kind}"] = Tensor(f"{theirs}.mlp.c_proj.{kind}", turned)
    return table
