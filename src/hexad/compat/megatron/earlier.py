"""Attributes that ``get_args()`` has in earlier releases and in Megatron-DeepSpeed, and the settings of
Megatron-Core's ``TransformerConfig``, with their defaults. No torch."""

import json
from argparse import Namespace
from importlib.resources import files
from typing import Any

_SET_BY_SCRIPTS = {
    "curriculum_learning": False,
    "curriculum_learning_legacy": False,
    "curriculum_seqlen": 0,
    "deepspeed_config_dict": None,
    "teacher_model": None,
}
"""What these systems compute, for what Hexad does not have."""


def _read(name: str) -> dict[str, Any]:
    """The lines of a file, whose head describes the format."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name: json.loads(value) for name, _, value in lines}


EARLIER = _read("earlier_arguments.txt") | _SET_BY_SCRIPTS
"""Attribute of ``get_args()`` -> default."""
SETTINGS = _read("transformer_settings.txt")
"""Setting of ``TransformerConfig`` -> default; None where it is computed."""


def add_earlier(arguments: Namespace) -> None:
    """Add the attributes that scripts of these releases read, with their defaults."""
    for name, value in EARLIER.items():
        if not hasattr(arguments, name):
            setattr(arguments, name, list(value) if isinstance(value, list) else value)
