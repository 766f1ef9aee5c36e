"""Tables of the names of other systems' packages, as data: their modules, constants, and the names that
Hexad lacks. No torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Names:
    """The names of a package, without its own name in front.

    Attributes:
        modules: that can be imported.
        unsupported: names of functions and classes -> what to do instead of using them, where Hexad lacks
            them.
        constants: names -> values.
    """

    modules: tuple[str, ...]
    unsupported: Mapping[str, str]
    constants: Mapping[str, Any]


def read_names(
    package: str,
    instead: Mapping[str, str],
    earlier: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Names:
    """Read ``names.txt`` of a package of this one, whose head describes the format.

    Args:
        package: the full name of the one that has the file.
        instead: name or module -> what to do instead of using it, or a name in it; the longest part of a name
            that has an entry decides, and an empty one is for all others.
        earlier: module -> names, separated by blanks, that the file does not have.
        constants: further ones.
    """
    modules: list[str] = []
    unsupported, values = dict[str, str](), dict[str, Any]()
    more = ((module, name) for module, names in (earlier or {}).items() for name in names.split())
    for module, name in (*_rows(package), *more):
        short, equals, value = name.partition("=")
        full = f"{module}.{short}".strip(".")
        if not name:
            modules += [module] if module else []
        elif equals:
            values[full] = json.loads(value)
        else:
            unsupported[full] = _longest(instead, full)
    return Names(tuple(modules), unsupported, values | dict(constants or {}))


def _rows(package: str) -> Iterator[tuple[str, str]]:
    """(module, empty) and (module, name) of every line."""
    for line in files(package).joinpath("names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        module, _, names = line.partition(":")
        yield module, ""
        yield from ((module, name) for name in names.split())


def _longest(entries: Mapping[str, str], name: str) -> str:
    while name not in entries:
        name = name.rpartition(".")[0]
    return entries[name]
