"""Names of gpt2 tensors in Hugging Face checkpoints (whose linear layers are stored transposed)."""

from __future__ import annotations

from hexad.config.schema import ModelSettings

from .mapping import HuggingFaceTensor as Tensor

BASE = "transformer."
"""What the names begin with, but for the head's; files saved without the head lack it."""

BUFFERS = r"h\.\d+\.attn\.(bias|masked_bias)"
"""Causal masks that older versions saved beside the weights."""


def tensors(model: ModelSettings) -> dict[str, Tensor]:
    """Our global tensor name -> where it stands in a Hugging Face state dict."""
    hidden, inner = model.hidden, int(model.ffn_hidden)
    table = {
        "embedding.weight": Tensor(f"{BASE}wte.weight", (int(model.vocab), hidden)),
        "positions.weight": Tensor(f"{BASE}wpe.weight", (int(model.max_positions), hidden)),
        "norm.weight": Tensor(f"{BASE}ln_f.weight", (hidden,)),
        "norm.bias": Tensor(f"{BASE}ln_f.bias", (hidden,)),
    }
    if not model.tied_embeddings:
        table["head.weight"] = Tensor("lm_head.weight", (int(model.vocab), hidden))
    linear = {
        "attention.out": ("attn.c_proj", hidden, hidden),
        "ffn.up": ("mlp.c_fc", inner, hidden),
        "ffn.down": ("mlp.c_proj", hidden, inner),
    }
    for index in range(model.layers):
        ours, theirs = f"layers.{index}", f"{BASE}h.{index}"
        for kind in ("weight", "bias"):
            turned = kind == "weight"
            table[f"{ours}.attention_norm.{kind}"] = Tensor(f"{theirs}.ln_1.{kind}", (hidden,))
            table[f"{ours}.ffn_norm.{kind}"] = Tensor(f"{theirs}.ln_2.{kind}", (hidden,))
            for part, name in enumerate(("q", "k", "v")):
                table[f"{ours}.attention.{name}.{kind}"] = Tensor(
                    f"{theirs}.attn.c_attn.{kind}", (hidden, hidden)[: 1 + turned], turned, (part, 3)
                )
            for name, (their_name, *sizes) in linear.items():
                shape = tuple(sizes)[: 1 + turned]
                table[f"{ours}.{name}.{kind}"] = Tensor(f"{theirs}.{their_name}.{kind}", shape, turned)
    return table
