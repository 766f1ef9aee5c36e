"""Checks of a group of DeepSpeed's keys, and the errors that name them. No torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hexad.config import ConfigError, did_you_mean, setting_names

from .keys import Section

log = logging.getLogger("hexad")

Checked = TypeVar("Checked", bound=Section)

_FORMS = {"betas": "[beta1, beta2]"}
"""Keys whose values have a special form."""

_BOUNDS = ("greater_than_equal", "less_than", "finite_number")

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "dict": "a section",
    "model": "a section",
}
"""First word of a pydantic error's type -> what to write."""


def nested(info: FieldInfo | None) -> type[Section] | None:
    """The class of a key's section; None if the key is unknown or no section."""
    kinds = (info.annotation, *get_args(info.annotation)) if info is not None else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def spelling(name: str, info: FieldInfo) -> str:
    """The name of a key in the file."""
    return info.alias or name


def field_of(section: type[Section] | None, key: str) -> FieldInfo | None:
    """The declaration of a section's key; None for an unknown one."""
    fields = section.model_fields.items() if section is not None else ()
    return next((info for name, info in fields if key in (name, info.alias)), None)


def given(section: Section, key: str) -> Any:
    """The value of a dotted key in what was read; None if it has none."""
    value: Any = section
    for part in key.split("."):
        if value is None or part not in value.model_fields_set:
            return None
        value = getattr(value, part)
    return value


def checked(
    tree: Mapping[str, Any], section: type[Checked], prefix: str = "", strict: bool = True
) -> Checked:
    """Check a section and return its values.

    Args:
        tree: what was read.
        section: what it should be.
        prefix: of its keys' names in errors, with a dot at the end.
        strict: refuse unknown keys; otherwise warn about them.

    Raises:
        ConfigError: the first unknown or malformed key.
    """
    try:
        return section.model_validate(tree if strict else known(tree, section, prefix))
    except ValidationError as error:
        raise _readable(error, section, prefix) from None


def known(tree: Mapping[str, Any], section: type[Section], prefix: str = "") -> dict[str, Any]:
    """The tree without unknown keys, about which it warns."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        info = field_of(section, key)
        if info is None and key not in section.older:
            log.warning("%s%s: unknown key%s; ignored", prefix, key, did_you_mean(key, _names(section)))
            continue
        inner = nested(info)
        kept[key] = known(value, inner, f"{prefix}{key}.") if inner and isinstance(value, Mapping) else value
    return kept


def _names(section: type[Section]) -> list[str]:
    return [spelling(name, info) for name, info in section.model_fields.items()]


def _readable(error: ValidationError, root: type[Section], prefix: str) -> ConfigError:
    """The first problem of a pydantic error as key, value found, and fix."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    parts, section = _located(problem["loc"], root)
    name = prefix + ".".join(parts)
    if problem["type"] == "extra_forbidden":
        return ConfigError(name, f"unknown key{_hint(parts[-1], section, root)}")
    if problem["type"] == "missing" and len(parts) == len(problem["loc"]):
        return ConfigError(name, "is missing; give it")
    # pydantic reports one problem per alternative that a key allows.
    same = [alternative for alternative in problems if _located(alternative["loc"], root)[0] == parts]
    expected = " or ".join(
        dict.fromkeys(_expectation(alternative["type"], alternative["msg"]) for alternative in same)
    )
    form = None if problem["type"] in _BOUNDS else _FORMS.get(parts[-1])
    value = problem["input"]
    written = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return ConfigError(name, f"found {written}, expected {form or expected}")


def _located(location: tuple[int | str, ...], root: type[Section]) -> tuple[list[str], type[Section]]:
    """The key of a pydantic error's location, which names tried alternatives too, and its section."""
    section, parts = root, list[str]()
    for part in location:
        parts.append(str(part))
        inner = nested(field_of(section, str(part)))
        if inner is None:
            break
        section = inner
    return parts, section


def _expectation(kind: str, message: str) -> str:
    if kind == "finite_number":
        return "a finite number"
    name, _, rest = kind.partition("_")
    if name in _KINDS and rest in ("parsing", "type", "from_float", "attributes_type"):
        return _KINDS[name]
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def _hint(key: str, section: type[Section], root: type[Section]) -> str:
    """A hint at the key that an unknown one may mean, in any section."""
    elsewhere = next((name for name in setting_names(root) if name.rpartition(".")[2] == key), None)
    if elsewhere is not None:
        return f" (did you mean '{elsewhere}'?)"
    return did_you_mean(key, _names(section)) or f"; known here: {', '.join(_names(section))}"
