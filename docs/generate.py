"""Rewrites the generated pages: ``python -m docs.generate`` (``make docs``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hexad.config import Config
from hexad.model.families import families
from hexad.resolve.checks import SUPPORTED

PAGE = Path(__file__).parent / "configuration.md"

_HEAD = """\
<!-- Written by 'make docs' from src/hexad/config/schema.py. Do not edit. -->

# Configuration

One YAML file holds every setting; all have defaults. Settings can be overridden on the command line, as in
`hexad train run.yaml parallel.tensor=2 optimizer.lr=1e-3`; the value is YAML. An unknown key is an error that
names the nearest known one. `hexad config show run.yaml` prints all settings, with those that preset and
family determine filled in; `hexad config check run.yaml` says whether they would be accepted. What depends on
the number of ranks or the tokenizer stays `auto` until a run resolves it: `hexad train run.yaml --dry-run`
prints the result.

Values marked † are part of the format, but refused by this version.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        group = field.annotation
        assert isinstance(group, type) and issubclass(group, BaseModel)
        parts += _group(field.alias or name, group)
    return "\n".join(parts)


def _group(name: str, group: type[BaseModel]) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{_tidy(group.__doc__)}\n"
    yield "| Setting | Values | Default | Meaning |\n|---|---|---|---|"
    nested: list[tuple[str, type[BaseModel]]] = []
    for key, field in group.model_fields.items():
        setting = f"{name}.{field.alias or key}"
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if _is_group(t)]
        nested += [(setting, model) for model in inner]
        cells = (f"`{setting}`", _values(setting, field), _default(field), _tidy(field.description))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    for setting, model in nested:
        yield from _group(setting, model)


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _tidy(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


def _default(field: FieldInfo) -> str:
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return f"`{text}`"


def _values(setting: str, field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if field.metadata:  # pydantic has taken Annotated apart
        annotation = Annotated[(annotation, *field.metadata)]
    supported = families() if setting == "model.family" else SUPPORTED.get(setting)
    shown = [
        text + ("" if supported is None or value is _OPEN or value in supported else " †")
        for text, value in _choices(annotation)
    ]
    note = ""
    if supported is not None and any(value is _OPEN for _, value in _choices(annotation)):
        allowed = ", ".join(f"`{value}`" for value in supported)
        note = f" († all but {allowed})"
    return ", ".join(shown) + note


_OPEN = object()  # any value of a type, not one of a few


def _choices(annotation: Any) -> Iterator[tuple[str, object]]:
    """(as shown, value) of what an annotation allows."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from ((f"`{value}`", value) for value in inner)
    elif origin in (Union, UnionType):
        for part in inner:
            yield from _choices(part)
    elif annotation in (None, NoneType):
        yield "`null`", None
    elif annotation is bool:
        yield from (("`true`", True), ("`false`", False))
    elif origin is Annotated and inner[0] is str:
        yield next(part.func.__doc__ for part in inner[1:] if hasattr(part, "func")), _OPEN
    elif origin is Annotated:
        low, high, strict = _bounds(inner[1:])
        if inner[0] is int and high is not None:
            yield from ((f"`{value}`", value) for value in range(int(low or 0), int(high) + 1))
        else:
            yield _number(inner[0], low, high, strict), _OPEN
    elif origin in (list, tuple):
        members = ", ".join(text for part in inner for text, _ in _choices(part))
        yield f"[{members}{', ...' if origin is list else ''}]", _OPEN
    elif _is_group(annotation):
        yield "group, see below", _OPEN
    else:
        yield {str: "text", int: "integer", float: "number"}.get(annotation, "mapping"), _OPEN


def _bounds(metadata: tuple[Any, ...]) -> tuple[float | None, float | None, bool]:
    """(lowest, highest or below, whether the lowest itself is excluded)."""
    low = high = None
    strict = False
    for entry in metadata:
        for part in getattr(entry, "metadata", None) or [entry]:
            low = getattr(part, "ge", getattr(part, "gt", low))
            high = getattr(part, "le", getattr(part, "lt", high))
            strict = strict or hasattr(part, "gt")
    return low, high, strict


def _number(kind: Any, low: float | None, high: float | None, strict: bool) -> str:
    name = "integer" if kind is int else "number"
    if high is not None:
        return f"{name} from {low:g}, below {high:g}"
    return f"{name} above {low:g}" if strict else f"{name} from {low:g}"


if __name__ == "__main__":
    text = page()
    assert not re.search(r"\n\n\n", text)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
