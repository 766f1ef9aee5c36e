"""Programs outside the package use names that the package has. Most run by hand only, some on GPUs only."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = [path for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
PATCHED = ("object", "setattr", "getattr")
"""Functions whose first two arguments are an object and the name of an attribute."""


def absent_names(source: str) -> Iterator[str]:
    """Names of ``hexad`` that a program imports, reads or replaces and that do not exist."""
    tree = ast.parse(source)
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.name: importlib.import_module("hexad") for alias in node.names if alias.name == "hexad"
            }
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("hexad"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                names[alias.asname or alias.name] = value = _attribute(module, alias.name)
                if value is None:
                    yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        attribute = _read_attribute(node) if isinstance(node, ast.Attribute) else _replaced_attribute(node)
        if attribute is not None:
            where, name = attribute
            holder = _resolved(where, names)
            if isinstance(holder, ModuleType | type) and _attribute(holder, name) is None:
                yield f"{ast.unparse(where)}.{name}"


def _read_attribute(node: ast.Attribute) -> tuple[ast.expr, str] | None:
    return (node.value, node.attr) if isinstance(node.ctx, ast.Load) else None


def _replaced_attribute(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The object and the attribute of ``mock.patch.object(where, "name", ...)``, also as a tuple."""
    arguments = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) not in PATCHED:
        return None
    if len(arguments) >= 2 and isinstance(arguments[1], ast.Constant) and isinstance(arguments[1].value, str):
        return arguments[0], arguments[1].value
    return None


def _resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """The module or class that an expression names; None for any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        holder = _resolved(node.value, names)
        return _attribute(holder, node.attr) if isinstance(holder, ModuleType | type) else None
    return None


def _attribute(holder: Any, name: str) -> Any:
    """An attribute, a module of a package or a field of a class; True if it is None, and None where there is
    none."""
    if hasattr(holder, name):
        value = getattr(holder, name)
        return True if value is None else value
    if isinstance(holder, type):
        declared = any(name in vars(base).get("__annotations__", {}) for base in holder.__mro__)
        return True if declared else None
    try:
        return importlib.import_module(f"{holder.__name__}.{name}")
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_exist(path: Path) -> None:
    assert list(absent_names(path.read_text(encoding="utf-8"))) == []


def test_absent_names_are_noticed() -> None:
    source = """
import hexad
from unittest import mock
from hexad.engine import engine, gone
from hexad.engine.engine import Engine, Vanished
Engine.nothing()
engine.Engine.step_back
engine.LossScaler
hexad.Engine.step_forward
hexad.trian("run.yaml")
with mock.patch.object(engine.Engine, "finish_step", None): pass
for where, name in ((Engine, "absent"), (engine, "Engine")): setattr(where, name, 1)
"""
    assert set(absent_names(source)) == {
        "hexad.engine.gone",
        "hexad.engine.engine.Vanished",
        "Engine.nothing",
        "engine.Engine.step_back",
        "engine.Engine.finish_step",
        "Engine.absent",
        "hexad.Engine.step_forward",
        "hexad.trian",
    }
