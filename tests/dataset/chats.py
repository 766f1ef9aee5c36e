"""Small tokenizers with chat templates, and conversations."""

import json
from pathlib import Path
from typing import Any

from hexad.dataset.text.tokenizer_training import train_bpe

CHATML = """\
{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
GENERATION = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": " Rayleigh. 🙂"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two\n\n"},
        {"role": "user", "content": "<three> & 'four'"},
        {"role": "assistant", "content": "größer"},
    ],
    [
        {"role": "user", "content": "call", "name": None},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": "<é>"}}]},
        {"role": "user", "content": "ends with the user"},
    ],
]
TEXT = [
    "Why is the sky blue? Rayleigh scattering, größer 🙂\n\n one two three four user assistant system"
] * 8


def chat_tokenizer(directory: Path, template: str | None = CHATML, *, inside: bool = False) -> str:
    """A tokenizer whose template is ``chat_template.jinja``, or ``inside`` tokenizer_config.json."""
    specials = ["<|im_start|>", "<|im_end|>", "<s>"]
    train_bpe(TEXT, 420, directory, special_tokens=specials, chat_template=None if inside else template)
    path = directory / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "bos_token": {"__type": "AddedToken", "content": "<s>"}}
    if inside:
        config["chat_template"] = template
    path.write_text(json.dumps(config))
    return str(directory)


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
