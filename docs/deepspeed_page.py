"""The table of DeepSpeed's keys, from the classes that read them."""

import json
from collections.abc import Iterator
from pathlib import Path

from hexad.compat.deepspeed.config import meaning_of, nested, spelling
from hexad.compat.deepspeed.keys import Keys, Section

DEEPSPEED_KEYS = Path(__file__).parent / "deepspeed-keys.md"

_HEAD = """\
<!-- Written by 'make docs' from src/hexad/compat/deepspeed/keys.py. Do not edit. -->

# DeepSpeed's keys

Every key of a DeepSpeed configuration, with DeepSpeed's default, and what it does in Hexad
([DeepSpeed](deepspeed.md) is the user's page). *No effect* is reported once if the key is given with another
value than its default. *Refused* is an error, unless the key has its default (a section: `enabled: false`).
Unknown keys have no effect, and are named in one warning; misspelt ones are refused, naming the key that was
meant. Older spellings are read as their successors: `bfloat16`, `fp16.type` of DeeperSpeed (GPT-NeoX), and in
`zero_optimization` `cpu_offload`, `cpu_offload_param` and `stage3_gather_fp16_weights_on_model_save`.

| Key | Default | In Hexad |
|---|---|---|
"""


def deepspeed_keys_page() -> str:
    """The whole page."""
    return _HEAD + "".join(_rows(Keys, ""))


def _rows(section: type[Section], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        key, inner = prefix + spelling(name, info), nested(info)
        meaning = meaning_of(info)
        summary = "" if meaning is None else meaning.summary[0].upper() + meaning.summary[1:]
        if inner is None or summary:
            default = "" if info.is_required() else f"`{json.dumps(info.default, default=lambda _: {})}`"
            yield f"| `{key}` | {default} | {summary.replace('|', chr(92) + '|')} |\n"
        if inner is not None and name != "offload_param":  # as offload_optimizer
            yield from _rows(inner, key + ".")
