"""Griffe extension of the site: docstrings as written here become what mkdocstrings reads."""

import re

from griffe import Extension, Object

ROLE = re.compile(r":\w+:`~?([^`]+)`")
SHARED_ENTRY = re.compile(r"^([ ]{4})(\w+(?:, \w+)+): (.*(?:\n[ ]{5,}.*)*)", re.MULTILINE)
"""An entry of ``Args`` that is about several parameters."""


def converted(docstring: str) -> str:
    """Roles as code, and one entry per parameter."""
    docstring = ROLE.sub(r"`\1`", docstring)
    return SHARED_ENTRY.sub(
        lambda match: "\n".join(f"{match[1]}{name}: {match[3]}" for name in match[2].split(", ")), docstring
    )


class Docstrings(Extension):
    """Converts each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = converted(obj.docstring.value)
