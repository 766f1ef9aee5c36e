"""Plans as users write them for models of ``transformers``, which carry none or another one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TINY = {"vocab_size": 62, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
LLAMA_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
QKV = {f"**.{name}_proj": "column" for name in "qkv"}
GATED = {"**.gate_proj": "column", "**.up_proj": "column", "**.down_proj": "row"}
FFN = {"**.fc1": "column", "**.fc2": "row"}
BERT = {f"**.self.{name}": "column" for name in ("query", "key", "value")}
T5 = {f"**.{name}": "column" for name in ("q", "k", "v", "wi")} | {"**.o": "row", "**.wo": "row"}


class Foreign(NamedTuple):
    """A model of ``transformers`` and a user's plan.

    Attributes:
        model: its class.
        sizes: of its configuration, besides :data:`TINY`.
        plan: the user's.
        refusal: a part of the message; empty for a plan that works.
    """

    model: str
    sizes: dict[str, Any]
    plan: dict[str, str]
    refusal: str = ""

    def build(self) -> nn.Module:
        """The model in float64, without dropout."""
        import transformers

        model_class = getattr(transformers, self.model)
        config = model_class.config_class(**(TINY | self.sizes))
        for key, value in vars(config).items():
            if ("dropout" in key or "pdrop" in key) and isinstance(value, float):
                setattr(config, key, 0.0)
        torch.manual_seed(0)
        model: nn.Module = model_class(config).double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(noise * 0.2 + (parameter.dim() == 1))
        return model.train()


OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"word_embed_proj_dim": 32, "max_position_embeddings": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
NEO |= {"max_position_embeddings": 64, "intermediate_size": 48}
GROUPED = LLAMA_SIZES | {"num_key_value_heads": 2, "head_dim": 8}
SEQ = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
SEQ |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
SEQ |= {"decoder_start_token_id": 1, "max_position_embeddings": 64}
MISFIT = "would not compute a rank's part"

FOREIGN: dict[str, Foreign] = {
    "opt": Foreign("OPTForCausalLM", OPT, {**QKV, "**.out_proj": "row", **FFN}),
    "opt, attention only": Foreign("OPTForCausalLM", OPT, {**QKV, "**.out_proj": "row"}),
    "stablelm": Foreign(
        "StableLmForCausalLM",
        LLAMA_SIZES | {"num_key_value_heads": 2},
        {**QKV, "**.o_proj": "row", **GATED},
    ),
    "bloom": Foreign(
        "BloomForCausalLM", BLOOM, {"**.query_key_value": "column", "**.self_attention.dense": "row"}, MISFIT
    ),
    "bloom, mlp": Foreign(
        "BloomForCausalLM", BLOOM, {"**.dense_h_to_4h": "column", "**.dense_4h_to_h": "row"}
    ),
    "gpt_bigcode": Foreign(
        "GPTBigCodeForCausalLM", GPT2, {"**.attn.c_attn": "column", "**.attn.c_proj": "row"}, MISFIT
    ),
    "gpt_bigcode, heads": Foreign(
        "GPTBigCodeForCausalLM",
        GPT2 | {"multi_query": False},
        {"**.attn.c_attn": "column", "**.attn.c_proj": "row"},
    ),
    "gpt_bigcode, mlp": Foreign("GPTBigCodeForCausalLM", GPT2, {"**.c_fc": "column", "**.mlp.c_proj": "row"}),
    "gpt2": Foreign(
        "GPT2LMHeadModel",
        GPT2,
        {"**.c_attn": "column", "**.c_proj": "row"},
        "found Conv1D; expected torch.nn.Linear",
    ),
    "gpt_neo": Foreign(
        "GPTNeoForCausalLM",
        NEO,
        {**QKV, "**.attention.out_proj": "row", "**.c_fc": "column", "**.c_proj": "row"},
    ),
    "llama, keys whole": Foreign(
        "LlamaForCausalLM", GROUPED, {"**.q_proj": "column", "**.o_proj": "row"}, MISFIT
    ),
    "llama, one key head": Foreign(
        "LlamaForCausalLM",
        GROUPED | {"num_key_value_heads": 1},
        {**QKV, "**.o_proj": "row"},
        "do not divide by 2",
    ),
    "llama, mlp only": Foreign("LlamaForCausalLM", GROUPED, GATED),
    "llama, embedding and head": Foreign(
        "LlamaForCausalLM", GROUPED, {"**.embed_tokens": "vocab", "lm_head": "column"}, MISFIT
    ),
    "qwen3, norms forgotten": Foreign(
        "Qwen3ForCausalLM", GROUPED, {**QKV, "**.o_proj": "row"}, "found a tensor of shape [8]"
    ),
    "olmo2, as llama": Foreign("Olmo2ForCausalLM", GROUPED, {**QKV, "**.o_proj": "row"}, MISFIT),
    "phi3, columns": Foreign(
        "Phi3ForCausalLM", GROUPED, {"**.gate_up_proj": "column", "**.down_proj": "row"}, MISFIT
    ),
    "phi3, packed": Foreign(
        "Phi3ForCausalLM", GROUPED, {"**.gate_up_proj": "packed_colwise", "**.down_proj": "row"}
    ),
    "falcon": Foreign(
        "FalconForCausalLM",
        LLAMA_SIZES | {"alibi": False},
        {"**.query_key_value": "column", "**.self_attention.dense": "row"},
        "found FalconLinear; expected torch.nn.Linear",
    ),
    "mpt": Foreign(
        "MptForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        {"**.Wqkv": "column", "**.attn.out_proj": "row"},
        MISFIT,
    ),
    "persimmon": Foreign(
        "PersimmonForCausalLM",
        LLAMA_SIZES,
        {"**.query_key_value": "column", "**.self_attn.dense": "row"},
        MISFIT,
    ),
    "bert": Foreign(
        "BertForMaskedLM",
        LLAMA_SIZES | {"max_position_embeddings": 64},
        {**BERT, "**.output.dense": "row", "**.intermediate.dense": "column"},
    ),
    "biogpt": Foreign(
        "BioGptForCausalLM",
        LLAMA_SIZES | {"max_position_embeddings": 64},
        {**QKV, "**.out_proj": "row", **FFN},
    ),
    "bart": Foreign("BartForConditionalGeneration", SEQ, {**QKV, "**.out_proj": "row", **FFN}),
    "t5": Foreign(
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1},
        T5,
        MISFIT,
    ),
    "gptj": Foreign("GPTJForCausalLM", GPT2 | {"rotary_dim": 4}, {**QKV, "**.out_proj": "row"}),
}


def loss_of(model: nn.Module, batch: int, length: int) -> Tensor:
    """Of token ids."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 60, (batch, length), generator=generator)
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    logits = model(**inputs).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
