"""The forms to which texts conform, in the language of the ``llguidance`` package: JSON schemas, regular
expressions, choices. No torch, and not the package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hexad.config import ConfigError

_FORM = {"whitespace_flexible": False}
"""Form of JSON texts: with optional white space, a model may write nothing else."""


def schema_text(schema: object) -> str:
    """A JSON schema, given as an object or as JSON, as JSON.

    Raises:
        ConfigError: it is neither.
    """
    try:
        tree = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(tree, dict):
            raise ValueError(f"found {tree!r:.60}, expected an object")
        return json.dumps(tree)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError("schema", f"is not a JSON schema: {error}") from None


def of_schema(schema: Mapping[str, Any] | str) -> str:
    """The grammar of JSON texts that conform to a schema."""
    tree = json.loads(schema) if isinstance(schema, str) else schema
    return json.dumps({"grammars": [{"json_schema": formed(tree)}]})


def json_schema(grammar: str) -> dict[str, Any] | None:
    """The schema of a grammar that :func:`of_schema` has made; None of another."""
    tree: dict[str, Any] | None = json.loads(grammar)["grammars"][0].get("json_schema")
    return tree


def formed(schema: Mapping[str, Any], **form: Any) -> dict[str, Any]:
    """A schema with the form of its texts; ``form``: ``key_separator`` and ``item_separator``."""
    return {**schema, "x-guidance": {**_FORM, **form}}


def of_regex(pattern: str) -> str:
    """The grammar of texts that match a regular expression completely."""
    return of_lark(f"start: {regex(pattern)}")


def of_choices(texts: Sequence[str]) -> str:
    """The grammar that allows some texts only."""
    return of_lark("start: " + " | ".join(map(literal, texts)))


def of_lark(rules: str) -> str:
    """A grammar in Lark's language, with the extensions of the package."""
    return json.dumps({"grammars": [{"lark_grammar": rules}]})


def literal(text: str) -> str:
    """A text, as rules of a grammar have it."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regular expression, as rules of a grammar have it."""
    escaped, slashes = "", pattern.split("/")
    for number, part in enumerate(slashes):
        backslashes = len(part) - len(part.rstrip("\\"))
        escaped += part + ("" if number + 1 == len(slashes) else "/" if backslashes % 2 else "\\/")
    return "/" + escaped.replace("\n", "\\n") + "/"
