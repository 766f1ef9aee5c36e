"""What a script's own version of a system has beyond what Hexad knows: names, modules and arguments, and the
errors that name them."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from hexad.config import HexadError

_NAME = f"{__package__}".rpartition(".")[0]
_PACKAGE = str(Path(__file__).parents[2])
_ATTRIBUTE = re.compile(r"(?:'(\w+)' object|type object '(\w+)') has no attribute '(\w+)'")
_CALL = re.compile(r"^([A-Za-z_]\w*)(?:\.\w+)*\(\) (got|missing|takes) ")
_IMPORTED = re.compile(r"cannot import name '(\w+)'")


class UnknownArgument(HexadError, TypeError):
    """An argument that a function of another system does not have: scripts catch what Python raises."""


class MissingAttribute(HexadError, AttributeError):
    """An attribute that an object of another system does not have."""


def explained(error: Exception, system: str) -> str | None:
    """Why a script cannot have what it asked a system for, in one line; None for an error of its own.

    Args:
        error: that has ended the script.
        system: the name of the package that scripts import.
    """
    if _raised_by_hexad(error.__traceback__):
        return None
    if isinstance(error, TypeError):
        call = _CALL.match(str(error))
        if call is None or not _has(call[1]):
            return None
        return f"{error}: Hexad's {system} has the arguments of newer releases; change the call"
    what = _import(error, system) if isinstance(error, ImportError) else None
    what = _attribute(error, system) if isinstance(error, AttributeError) else what
    if what is None:
        return None
    return (
        f"{what}, which Hexad's {system} does not have: it is of another version of the package, perhaps the "
        "script's own; remove it from the script, or train without the script (hexad megatron, hexad train)"
    )


def _raised_by_hexad(trace: TracebackType | None) -> bool:
    """Whether Hexad has raised an error, not the script by asking for something."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if frame.name != "__getattr__" and not frame.filename.startswith("<")
    ]
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)


def _import(error: ImportError, system: str) -> str | None:
    name = _IMPORTED.search(str(error))
    module = sys.modules.get(error.name or "")
    if name and module is not None:
        full = _imported_as(module, system, error.__traceback__)
        return None if full is None else f"found the name {full}.{name[1]}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == system:
        return f"found the module {error.name}"
    return None


def _attribute(error: AttributeError, system: str) -> str | None:
    if isinstance(error.obj, ModuleType):
        full = _imported_as(error.obj, system, error.__traceback__)
        return None if full is None else f"found the name {full}.{error.name}"
    named = _ATTRIBUTE.search(str(error))
    if not named:
        return None
    kind = named[1] or named[2]
    owner = error.obj if isinstance(error.obj, type) else type(error.obj)
    ours = _has(kind) if error.obj is None else owner.__module__.startswith(_NAME)
    return f"{kind}: found the attribute {named[3]!r}" if ours else None


def _has(name: str) -> bool:
    """Whether one of Hexad's interfaces has a class or function of its own with this name."""
    modules = [module for path, module in sys.modules.items() if path.startswith(_NAME)]
    owners = (getattr(vars(module).get(name), "__module__", None) for module in modules)
    return any(str(owner).startswith(_NAME) for owner in owners)


def _imported_as(module: ModuleType, system: str, trace: TracebackType | None) -> str | None:
    """The name by which the script has imported a module of a system; None for one of another package."""
    paths = [
        path for path, other in list(sys.modules.items()) if other is module and path.split(".")[0] == system
    ]
    if not paths:
        return None
    last = traceback.extract_tb(trace)[-1]
    line = linecache.getline(last.filename, last.lineno or 0)
    longest = sorted(paths, key=len, reverse=True)
    short = (path for path in longest if re.search(rf"\b{path.rpartition('.')[2]}\b", line))
    return next((path for path in longest if path in line), next(short, paths[0]))
