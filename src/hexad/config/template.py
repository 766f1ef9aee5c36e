"""A configuration file with a comment before every setting, from the settings' docstrings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

import yaml
from pydantic import BaseModel

from .schema import Config

_WIDTH = 100


def commented(tree: Mapping[str, Mapping[str, Any]], head: str) -> str:
    """YAML of some settings, each after its docstring.

    Args:
        tree: group -> setting -> value, in the order to write.
        head: a comment above all.
    """
    lines = list(_comment(head, ""))
    groups = {field.alias or name: field for name, field in Config.model_fields.items()}
    for name, values in tree.items():
        group = groups[name].annotation
        assert isinstance(group, type) and issubclass(group, BaseModel)
        described = {field.alias or key: field.description for key, field in group.model_fields.items()}
        lines += ["", f"{name}:"]
        for key, value in values.items():
            lines += _comment(described[key] or "", "  ")
            lines.append(f"  {key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in wrap(" ".join(text.replace("``", "").split()), _WIDTH - len(indent) - 2):
        yield f"{indent}# {line}"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").strip()
