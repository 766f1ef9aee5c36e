"""Rewrites the generated pages: ``python -m docs.generate`` (``make docs``)."""

import re
from collections.abc import Iterator
from math import log
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hexad.config import Config
from hexad.model.families import families
from hexad.planning.costs import preset_table

from .deepspeed_page import DEEPSPEED_KEYS, deepspeed_keys_page
from .megatron_flags import MEGATRON, megatron_page
from .recipes_page import FILES, RECIPES_PAGE, recipe, recipes_page

PAGE = Path(__file__).parent / "configuration.md"
PRESETS = Path(__file__).parent / "presets.md"

_PRESETS_HEAD = """\
<!-- Written by 'make docs' from src/hexad/model/families. Do not edit. -->

# Presets

`model.preset` fills in the architecture of a published model; keys of `model` that are given too override it.
Weights are not loaded: `model.load: hf:DIR` does that and needs no preset ([Hugging Face](hugging-face.md)).
`hexad config presets` prints this table, `hexad config init --preset NAME` writes a run.yaml for one.
[Recipes](recipes.md) are complete run files of some of them, for stated clusters.

<!-- tested -->
```bash
hexad config presets
hexad config init small.yaml --preset gpt2 --data data/train --tokenizer byte
hexad config check small.yaml
```

*Parameters* are exact, with the published vocabulary, a tied embedding counted once; *active* are those that
one token is computed with: of each layer's experts only the *top k*. *Feed-forward* is the width of dense
layers, *expert* that of one expert. *Context* is the longest sequence, in tokens, that the model was
published for, without extensions (as YaRN) that the preset lacks.

"""
_PRESET_COLUMNS = (
    *("Preset", "Family", "Parameters", "Active", "Layers", "Hidden", "Heads", "KV heads", "Feed-forward"),
    *("Vocabulary", "Experts", "Top k", "Expert", "Context"),
)

_HEAD = """\
<!-- Written by 'make docs' from src/hexad/config/schema.py and model.py. Do not edit. -->

# Configuration

One YAML file has all settings of a run. Every setting has a default.

```bash
hexad train run.yaml parallel.tensor=2 optimizer.lr=1e-3
```

Arguments after the file override it. Their values are YAML.

| Command | Prints |
|---|---|
| `hexad config check run.yaml` | whether the settings would be accepted |
| `hexad config show run.yaml` | all settings, including those that preset and family determine |
| `hexad train run.yaml --dry-run` | all settings, as the run resolves them |

- **Unknown keys** are errors that name the nearest known key.
- **Numbers** are those of YAML 1.2: `010` is ten, and `2024-01-31` is a text. Digits may be grouped
  (`1_000`). Integers without another limit end at 10^9.
- **Quotes.** A quoted number is accepted as a number. A number that is meant as a text needs quotes:
  `run.dir='"2024"'`.
- **Colons** need a space after them: `model.lora='{rank: 4}'`.
- **Paths** are relative to the working directory of the command, not to the file. A run saves them as
  absolute paths, in `run.dir/config.yaml` and in checkpoints. From Python they may be `pathlib.Path`.
- **`auto`** stays in settings that depend on the number of ranks or the tokenizer, until a run resolves
  them.
- **†** marks values that are part of the format, but that this version refuses.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        group = field.annotation
        assert isinstance(group, type) and issubclass(group, BaseModel)
        parts += _group(field.alias or name, group)
    return "\n".join(parts)


def presets_page() -> str:
    """The page of presets."""
    rows = [f"| {' | '.join(_PRESET_COLUMNS)} |\n", f"|{'---|' * len(_PRESET_COLUMNS)}\n"]
    for name, family, *numbers in (row.values() for row in preset_table()):
        cells = [f"{number:,}" if number else "" for number in numbers]
        rows.append(f"| `{name}` | {family} | {' | '.join(cells)} |\n")
    return _PRESETS_HEAD + "".join(rows)


PAGES = {
    PAGE: page,
    PRESETS: presets_page,
    DEEPSPEED_KEYS: deepspeed_keys_page,
    MEGATRON: megatron_page,
    RECIPES_PAGE: recipes_page,
}
"""What is generated, and by what."""


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
    supported = families() if setting == "model.family" else None
    shown = [
        text + ("" if supported is None or value is _OPEN or value in supported else " †")
        for text, value in _choices(annotation)
    ]
    return ", ".join(shown)


NO_LIMIT = 10**9
"""Where integers end that have no limit of their own; said once, above the tables."""
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
        bounds = _bounds(inner[1:])
        if inner[0] is int and "le" in bounds and bounds["le"] < 10:
            yield from ((f"`{value}`", value) for value in range(bounds["ge"], bounds["le"] + 1))
        else:
            yield _number(inner[0], bounds), _OPEN
    elif origin in (list, tuple):
        members = ", ".join(text for part in inner if part is not ... for text, _ in _choices(part))
        yield f"[{members}{', ...' if origin is list or ... in inner else ''}]", _OPEN
    elif _is_group(annotation):
        yield "group, see below", _OPEN
    else:
        yield {str: "text", int: "integer", float: "number"}.get(annotation, "mapping"), _OPEN


def _bounds(metadata: tuple[Any, ...]) -> dict[str, Any]:
    """``ge``, ``gt``, ``le`` and ``lt``, as far as given."""
    return {
        name: getattr(part, name)
        for entry in metadata
        for part in getattr(entry, "metadata", None) or [entry]
        for name in ("ge", "gt", "le", "lt")
        if hasattr(part, name)
    }


def _number(kind: Any, bounds: dict[str, Any]) -> str:
    name = "integer" if kind is int else "number"
    low = f"above {bounds['gt']:g}" if "gt" in bounds else f"from {bounds['ge']:g}"
    if bounds.get("le", NO_LIMIT) != NO_LIMIT:
        return f"{name} {low} to {_plainly(bounds['le'])}"
    return f"{name} {low}" + (f", below {_plainly(bounds['lt'])}" if "lt" in bounds else "")


def _plainly(number: float) -> str:
    """``4,096``; large powers as such."""
    for base in (10, 2):
        power = round(log(number, base)) if number > 1 else 0
        if power >= 16 and base**power == number:
            return f"{base}^{power}"
    return f"{number:,g}" if number < 1e5 else f"{number:,}"


if __name__ == "__main__":
    for path in FILES:  # their predictions, which the page repeats
        path.write_text(recipe(path), encoding="utf-8")
    for path, make in PAGES.items():
        text = make()
        assert path == MEGATRON or not re.search(r"\n\n\n", text)  # its code has empty lines
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
