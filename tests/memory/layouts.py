"""Layouts whose measured peak is compared with the plan."""

from typing import Any

Groups = dict[str, dict[str, Any]]

# tensor, pipeline, data | more of parallel | memory | precision | model. "seq": sequence parallel (else off),
# z: zero, r: replicas, c: context, u: context_ulysses, e: expert, t: expert_tensor; methods and schedules by
# name, "interleaved" with two stages per rank.
_TABLE = """
1 1 1 |                 | none              | fp32        | llama
1 1 1 |                 | selective         | bf16        | gpt2
1 1 1 |                 | none              | fp32        | window
1 1 1 |                 | full              | fp16        | llama
1 1 1 |                 | selective offload | bf16        | qwen3
2 1 1 | seq             | none              | fp32        | llama
2 1 1 | seq             | selective         | bf16        | gpt2
2 1 1 |                 | full              | bf16 reduce accumulate | tied
2 1 1 |                 | none              | fp32        | qwen3
2 1 1 | seq             | full              | fp16        | gpt2
4 1 1 | seq             | none              | fp32        | two kv heads
4 1 1 |                 | selective         | bf16        | two kv heads
2 1 2 | z3 seq          | selective         | fp32        | one kv head
2 2 1 | seq zb_h1       | none              | fp32        | one kv head
1 1 2 | z0              | selective         | fp32        | llama
1 1 2 | z1              | none              | bf16        | tied
1 1 2 | z1              | full              | fp32        | gpt2
1 1 2 | z1              | selective offload | bf16 reduce accumulate | llama
1 1 2 | z0              | none              | bf16 reduce | llama
1 1 2 | z2              | none              | fp32        | llama
1 1 2 | z2              | selective         | bf16 reduce accumulate | gpt2
1 1 2 | z2              | full offload      | fp16        | llama
1 1 2 | z3              | full              | bf16        | gpt2
1 1 2 | z3              | none              | fp32        | tied
1 1 2 | z3              | selective         | bf16 reduce | qwen3
1 1 2 | z3              | none offload      | bf16        | llama
1 1 4 | z3 r2           | selective         | fp32        | gpt2
1 1 4 | z1 r2           | none              | fp32        | llama
1 1 4 | z2 r2           | full              | fp32        | qwen3
1 1 4 | z3 r2           | selective         | bf16        | llama
1 1 4 | z3              | full              | fp32        | gpt2
2 1 2 | z3 seq          | none              | fp32        | llama
2 1 2 | z2              | full              | bf16 reduce | gpt2
2 1 2 | z1 seq          | selective         | fp32        | tied
1 2 1 | gpipe           | none              | fp32        | llama
1 2 1 | 1f1b            | selective         | bf16        | gpt2
1 2 1 | interleaved     | none              | fp32        | llama
1 2 1 | zb_h1           | full              | bf16 reduce | tied
1 2 1 | zb_v            | none              | fp32        | gpt2
1 2 1 | 1f1b            | none offload      | fp16        | llama
1 4 1 | 1f1b            | none              | fp32        | llama
1 4 1 | zb_h1           | selective         | fp32        | gpt2
2 2 1 | seq 1f1b        | none              | bf16        | gpt2
2 2 1 | seq zb_v        | selective         | fp32        | tied
2 2 1 | seq zb_h1       | none              | fp32        | llama
2 2 1 | interleaved     | full              | fp32        | gpt2
2 2 1 | z2 seq zb_h1    | none              | fp32        | llama
2 2 1 | zb_v            | none              | fp32        | gpt2
2 2 1 | seq zb_h1       | none              | fp32        | outputs frozen
2 2 1 | zb_h1           | none              | fp32        | outputs frozen
4 2 1 | seq zb_h1       | none              | bf16        | two kv heads
1 2 2 | z1 gpipe        | none              | bf16        | llama
1 2 2 | z2 1f1b         | selective         | fp32        | gpt2
1 2 2 | z3 1f1b         | none              | fp32        | llama
1 2 2 | z3 gpipe        | full              | bf16        | tied
1 2 2 | z3 zb_h1        | none              | fp32        | gpt2
1 2 2 | z3 zb_v         | none              | fp32        | tied
1 2 2 | z2 zb_v         | full              | bf16 reduce | llama
1 2 2 | z3 interleaved  | selective         | fp32        | llama
1 1 1 |                 | none              | fp32        | lora
2 1 1 | seq             | selective         | bf16        | lora of queries
1 1 2 | z3              | none              | bf16        | lora
1 1 2 | z2              | full              | fp32        | lora of queries
1 2 1 | zb_h1           | none              | fp32        | lora with dropout
1 1 1 |                 | none              | fp32        | lora with dropout
1 1 1 |                 | selective         | bf16        | lora with dropout
2 1 1 | seq             | none              | fp32        | lora with dropout
1 2 1 | zb_h1           | none              | fp32        | lora
1 1 2 | z1              | none              | fp32        | last layer
1 1 1 |                 | none              | fp32        | last layer
1 2 1 | 1f1b            | none              | fp32        | last layer
1 2 1 | zb_v            | none              | fp32        | last layer
1 2 2 | z3 interleaved  | full              | fp32        | last layer
1 1 1 | c2              | none              | fp32        | llama
1 1 1 | c4              | full              | bf16        | llama
1 1 1 | c2              | none              | fp32        | window
1 1 1 | c4 z3           | selective         | fp32        | qwen3
1 1 1 | c2 ulysses      | selective         | fp32        | qwen3
1 1 1 | c2 ulysses      | none              | bf16        | two kv heads
1 1 1 | c4 u2 ulysses_ring | none           | fp32        | gpt2
2 1 1 | c2 seq          | none              | fp32        | two kv heads
1 2 1 | c2 zb_h1        | none              | fp32        | gpt2
1 1 2 | c2 z1 all_gather | selective        | bf16        | llama
1 1 2 | c2 z2           | full              | fp32        | tied
1 1 1 | c2 ulysses      | selective         | bf16        | dropped
1 1 1 |                 | none              | fp32        | dropped
2 1 1 | seq             | full              | bf16        | dropped
1 1 1 |                 | none              | fp32        | experts
1 1 1 |                 | selective         | bf16        | experts
1 1 1 |                 | full              | fp32        | shared experts
1 1 1 |                 | none              | fp32        | dense and experts
1 1 2 | e2              | none              | fp32        | experts
1 1 2 | e2 z1           | selective         | bf16        | shared experts
1 1 2 | e2 z3           | none              | fp32        | dense and experts
2 1 1 | seq e2          | none              | fp32        | experts
2 1 1 | e2              | none              | fp32        | shared experts
2 1 1 | seq t2          | selective         | fp32        | experts
1 2 1 | zb_h1           | none              | fp32        | experts
1 2 1 | 1f1b            | full              | fp32        | experts
1 1 1 | c2 e2           | none              | fp32        | experts
1 1 4 | e4 z2           | none              | bf16        | shared experts
1 2 2 | e2 z2 zb_v      | none              | fp32        | experts
1 2 2 | e2 z3 interleaved | full            | bf16        | shared experts
1 1 1 |                 | none              | fp32        | experts with adapters
1 1 2 | e2 z3           | selective         | bf16        | experts with adapters
1 2 1 | zb_h1           | none              | fp32        | experts with adapters
1 1 1 |                 | none              | fp32        | latent
1 1 1 |                 | selective         | bf16        | latent
2 1 1 | seq             | none              | fp32        | latent
2 1 1 |                 | selective         | fp32        | latent, wide values
1 1 2 | z3              | full              | bf16        | latent
2 2 1 | seq zb_v        | selective         | fp32        | latent
1 2 1 | zb_h1           | none              | fp32        | latent, wide values
1 1 1 | c2              | none              | fp32        | latent
1 1 1 | c2 ulysses      | selective         | fp32        | latent
1 1 2 | c2 all_gather   | none              | fp32        | latent, wide values
2 1 1 | seq             | none              | fp32        | latent, lora with dropout
1 1 1 |                 | none mla_up       | fp32        | latent
1 1 1 |                 | selective mla_up  | bf16        | latent
1 1 1 |                 | none norms mla_up | fp32        | latent, wide values
2 1 1 | seq             | none mla_up       | fp32        | latent
2 1 1 |                 | selective mla_up  | fp32        | latent, wide values
1 2 1 | zb_h1           | none mla_up       | fp32        | latent
1 1 2 | z3              | selective mla_up  | fp32        | latent
1 1 1 | c2              | none mla_up       | fp32        | latent
1 1 1 | c2 ulysses      | none mla_up       | fp32        | latent
1 1 1 | c2 ulysses      | selective mla_up  | fp32        | latent, wide values
2 1 1 | seq             | none mla_up       | fp32        | latent, lora with dropout
1 1 1 |                 | none moe_act      | fp32        | experts
1 1 1 |                 | none moe_act norms | fp32       | shared experts
1 1 1 |                 | full moe_act norms | fp32       | dense and experts
1 1 2 | e2 z3           | none moe_act      | fp32        | experts with adapters
1 2 1 | zb_h1           | none moe_act norms | fp32       | experts
1 1 1 |                 | none norms        | fp32        | llama
1 1 1 |                 | none norms        | bf16        | gpt2
2 1 1 | seq             | none norms        | fp32        | qwen3
1 1 1 |                 | none norms        | fp32        | last layer
"""
_NUMBERS = {
    "z": "zero",
    "r": "replicas",
    "c": "context",
    "u": "context_ulysses",
    "e": "expert",
    "t": "expert_tensor",
}
_EVEN = {"experts": 8, "forced": True}
"""A load that is as even as the plan assumes."""
_MLA = {"q_rank": 64, "kv_rank": 48, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
_LATENT = {"family": "deepseek_v3", "kv_heads": 8, "mla": _MLA}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"family": "gpt2", "kv_heads": 8},
    "qwen3": {"family": "qwen3"},
    "tied": {"tied_embeddings": True},
    "two kv heads": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "lora": {"lora": {"rank": 8}},
    "lora of queries": {"lora": {"rank": 8, "targets": ["q", "v"]}},
    "lora with dropout": {"lora": {"rank": 8, "dropout": 0.1}},
    "last layer": {"train": ["layers.3", "norm", "head"]},
    "outputs frozen": {"train": ["*.ffn.*", "*.attention.[qkv].*", "embedding*", "head*"]},
    "latent": _LATENT,
    "latent, wide values": {**_LATENT, "mla": {**_MLA, "q_rank": None, "value_dim": 64}},
    "latent, lora with dropout": {**_LATENT, "lora": {"rank": 8, "dropout": 0.1}},
    "dropped": {"attention_dropout": 0.1},
    "window": {"family": "mistral", "sliding_window": 100},
    "experts": {"moe": {**_EVEN, "top_k": 2, "ffn_hidden": 176}},
    "experts with adapters": {
        "moe": {**_EVEN, "top_k": 2, "ffn_hidden": 176},
        "lora": {"rank": 8, "targets": ["q", "experts.gate_up", "experts.down"]},
    },
    "shared experts": {
        "moe": {**_EVEN, "top_k": 2, "ffn_hidden": 88, "shared_experts": 2, "score": "sigmoid"}
    },
    "dense and experts": {
        "moe": {
            **_EVEN,
            "top_k": 4,
            "ffn_hidden": 88,
            "first_dense": 2,
            "aux_loss": 0.1,
            "shared_experts": 1,
            "shared_gate": True,
        }
    },
}


def _parsed(line: str) -> tuple[int, Groups]:
    *settings_of, model = line.split("|")
    degrees, parallel, memory, precision = (part.split() for part in settings_of)
    tensor, pipeline, data = map(int, degrees)
    settings: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "data": data, "sequence": False}
    for word in parallel:
        if word == "seq":
            settings["sequence"] = True
        elif word[0] in _NUMBERS and word[1:].isdigit():
            settings[_NUMBERS[word[0]]] = int(word[1:])
        elif word in ("ulysses", "ulysses_ring", "all_gather"):
            settings["context_method"] = word
        else:
            settings["schedule"] = word
    if settings.get("schedule") == "interleaved":
        settings["virtual_stages"] = 2
    formats = {"dtype": precision[0]} | dict.fromkeys(precision[1:], "bf16")
    groups: Groups = {
        "parallel": settings,
        "memory": {
            "recompute": memory[0],
            "recompute_parts": [word for word in memory[1:] if word != "offload"],
            "offload": "optimizer" if "offload" in memory else "none",
        },
        "precision": formats,
        "model": _MODELS[model.strip()],
    }
    if precision[0] != "fp32":  # which a CPU multiplies many times faster
        groups["batch"] = {"micro": 2, "global": (8 if pipeline > 1 else 4) * data}
    return tensor * pipeline * data * settings.get("context", 1), groups


LAYOUTS = {" ".join(line.split()): _parsed(line) for line in _TABLE.strip().splitlines()}
