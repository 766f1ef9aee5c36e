"""Small models with random weights whose chat templates write calls of functions, each as a family does."""

import json
from pathlib import Path

HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
        {%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """\
{{- bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}
    {%- else %}{{ m.content | trim }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{{- bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('identifiers have 9 letters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' }}
        {%- endfor %}{{ eos_token }}
    {%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}
"""
MISTRAL_11 = """\
{{- bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}{{ eos_token }}
    {%- else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}
"""
DEEPSEEK = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
    {%- elif m.tool_calls %}{{ '<|Assistant|><|calls|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|call|>function<|sep|>' + call.function.name + '\\n```json\\n' }}
            {{- (call.function.arguments | tojson) + '\\n```<|end_call|>' }}
            {{- '' if loop.last else '\\n' }}
        {%- endfor %}{{ '<|end_calls|></s>' }}
    {%- else %}{{ '<|Assistant|>' + m.content + '</s>' }}{% endif %}
{%- endfor %}
"""
XML = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ m.role + ': ' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}{{ '<function=' + call.function.name + '>' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<parameter=' + name + '>' + value + '</parameter>' }}
        {%- endfor %}{{ '</function>' }}
    {%- endfor %}{{ '</s>' }}
{%- endfor %}
"""
TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral 11": MISTRAL_11,
    "deepseek": DEEPSEEK,
}
"""By the family that writes calls in this way."""
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>")
SPECIALS = [
    *("<s>", *ENDS, "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]"),
    *("[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
]


def tool_model(directory: Path, template: str, end: str) -> str:
    """A model of bytes and special tokens that may follow the template; returns how commands name it."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    vocab = backend.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 32,
        "max_position_embeddings": 2048,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    torch.manual_seed(1)
    layer = {f"self_attn.{name}_proj": (16, 16) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (32, 16), "mlp.up_proj": (32, 16), "mlp.down_proj": (16, 32)}
    shapes = {"model.embed_tokens": (vocab, 16), "lm_head": (vocab, 16)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    tensors = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    tensors |= {f"model.{name}.weight": torch.ones(16) for name in norms}
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": end, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return f"hf:{directory}"
