"""Names of other systems' packages: those that Python files use, those that can be imported, and tables of
those that packages have. The commands are ``deepspeed_names.py``, ``megatron_names.py``, ``nemo_names.py``.
"""

import argparse
import ast
import json
import subprocess
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from facts import facts

# The names that files use


class UsedNames:
    """The names of packages that a file imports, or uses of what it has imported.

    Args:
        packages: the names of the packages.
        objects: names of functions, whose results are objects of the packages with attributes that count,
            as ``get_accelerator().NAME``.
    """

    def __init__(self, packages: Iterable[str], objects: Iterable[str] = ()) -> None:
        self._packages, self._objects = frozenset(packages), frozenset(objects)

    def of(self, tree: ast.AST) -> Iterator[str]:
        """The names that a file uses; one may come several times."""
        bound = self._bound(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if self._counts(alias.name))
            elif isinstance(node, ast.ImportFrom):
                if not node.level and node.module and self._counts(node.module):
                    yield from (f"{node.module}.{a.name}".removesuffix(".*") for a in node.names)
            elif isinstance(node, ast.Attribute):
                parts, inner = [node.attr], node.value
                while isinstance(inner, ast.Attribute):
                    parts, inner = [inner.attr, *parts], inner.value
                if isinstance(inner, ast.Name) and inner.id in bound:
                    of_object = bound[inner.id].endswith("()")
                    yield ".".join([bound[inner.id], *(parts[:1] if of_object else parts)])
                elif _called(inner) in self._objects and bound:
                    yield f"{_called(inner)}().{parts[0]}"

    def may_be_in(self, text: str) -> bool:
        """Whether a file's text has a package's name."""
        return any(package in text for package in self._packages)

    def _counts(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages

    def _bound(self, tree: ast.AST) -> dict[str, str]:
        """What imports, and assignments of calls of ``objects``, bind: name -> name of a package."""
        bound: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if self._counts(alias.name):
                        first = alias.name.partition(".")[0]
                        bound[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                if not node.level and node.module and self._counts(node.module):
                    names = (alias for alias in node.names if alias.name != "*")
                    bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in names}
            elif isinstance(node, ast.Assign) and _called(node.value) in self._objects:
                targets = (target.id for target in node.targets if isinstance(target, ast.Name))
                bound |= dict.fromkeys(targets, f"{_called(node.value)}()")
        return bound


def _called(node: ast.expr) -> str:
    """The last name of the function that an expression calls; empty if it is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def names_of_files(source: Path, own: str, used: UsedNames) -> dict[str, list[str]]:
    """Files that use names of packages -> these names; without the files of the package ``own``, where the
    checkout has it."""
    names: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.relative_to(source).parts[0] == own or not used.may_be_in(text):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in the file
                in_file = sorted(set(used.of(ast.parse(text))))
        except SyntaxError:  # of Python 2, or a template
            continue
        if in_file:
            names[str(path.relative_to(source))] = in_file
    return names


# The names that can be imported


def exists(name: str) -> bool:
    """Whether a name can be imported, or is an attribute of what can be."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def resolved(names: Iterable[str], *arguments: str) -> set[str]:
    """The names that exist for the command with ``--resolve`` and further arguments, in a process of its
    own; see :func:`answer`."""
    command = [sys.executable, sys.argv[0], "--resolve", *arguments]
    done = subprocess.run(command, input=json.dumps(sorted(names)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return set(json.loads(done.stdout.splitlines()[-1]))


def answer(exist: Callable[[str], bool] = exists) -> None:
    """Print which of the names on stdin exist, for :func:`resolved`."""
    found = [name for name in json.loads(sys.stdin.read()) if exist(name)]
    print("\n" + json.dumps(found))


def count(sources: Sequence[Path], own: str, used: UsedNames, of_releases: Iterable[str]) -> dict[str, Any]:
    """The counts of checkouts, and the names that files lack.

    Args:
        sources: the checkouts.
        own: the system's package.
        used: reads the names.
        of_releases: names below the system that its releases have.
    """
    known = {f"{own}.{name}" for name in of_releases}
    files = {source.name: names_of_files(source, own, used) for source in sources}
    everywhere = Counter(name for names in files.values() for in_file in names.values() for name in in_file)
    found = resolved(everywhere)
    missing = Counter({name: number for name, number in everywhere.items() if name not in found})
    counts = {
        source: {"files": len(names), "complete": sum(set(in_file) <= found for in_file in names.values())}
        for source, names in files.items()
    }
    return {
        "repositories": counts,
        "names": len(everywhere),
        "names that Hexad lacks": len(missing),
        "of them names of the releases in the table": len(missing.keys() & known),
        "lacking": dict(missing.most_common()),
    }


def print_counts(results: Mapping[str, Any], output: Path | None) -> None:
    """Print the counts of checkouts and the most frequent names that files lack; write all to a file."""
    for name, number in list(results["lacking"].items())[:40]:
        print(f"{number} files: {name}")
    for source, numbers in results["repositories"].items():
        print(f"{source}: {numbers['complete']} of {numbers['files']} files complete")
    print(json.dumps({name: value for name, value in results.items() if isinstance(value, int)}, indent=1))
    if output:
        output.write_text(json.dumps({**facts(), **results}, indent=1) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all commands have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("sources", type=Path, nargs="*", help="checkouts, or packages for --table")
    made.add_argument("--table", type=Path, help="write the names of packages, and nothing else")
    made.add_argument("--output", type=Path, help="result file")
    return made


# Tables of the names that packages have, whose text is read: they are not imported, as most need a GPU

_LONGEST = 11_000
"""Characters of a constant."""

Names = dict[str, dict[str, str | None]]
"""Module -> name -> value of a constant as JSON; None for all else."""


class _Module(ast.NodeVisitor):
    """Collects what a module defines, in branches too: its last value is that where a package is missing.

    Attributes:
        names: with the values of constants.
        origins: of names that a package imports -> the full name there.
        all_of: modules whose names a package has too, by ``from MODULE import *``.
    """

    def __init__(self, system: str, full: str, package: bool) -> None:
        self.names: dict[str, str | None] = {}
        self.origins: dict[str, str] = {}
        self.all_of: list[str] = []
        self._system, self._full, self._package = system, full, package

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names[node.name] = None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        own = node.level > 0 or (node.module or "").split(".")[0] == self._system
        if not (self._package and own):
            return
        above = [self._system, *self._full.split(".")]
        base = above[: len(above) + 1 - node.level] if node.level else []
        module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            if alias.name == "*":
                self.all_of.append(module)
            else:
                self.names[alias.asname or alias.name] = None
                self.origins[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit_Assign(ast.Assign([node.target], node.value))

    def visit_Assign(self, node: ast.Assign) -> None:
        text = literal(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = text


def literal(node: ast.expr) -> str | None:
    """A literal as JSON without blanks; None for another expression, and for one that is a whole document."""
    try:
        text = json.dumps(ast.literal_eval(node), separators=(",", ":")).replace(" ", "\\u0020")
    except (ValueError, TypeError, SyntaxError):
        return None
    return text if len(text) <= _LONGEST else None


def read_package(root: Path, names: Names, system: str, left_out: Sequence[str] = ()) -> None:
    """Add the names of a package of the system's name to ``names``.

    Args:
        root: its directory.
        left_out: modules and packages below it to leave out.
    """
    modules: dict[str, _Module] = {}
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        package = parts[-1] == "__init__"
        parts = parts[:-1] if package else parts
        full = ".".join(parts)
        if f"{full}.".startswith(tuple(f"{name}." for name in left_out)) or "__main__" in parts:
            continue
        if not all(part.isidentifier() for part in parts):
            continue
        modules[full] = _Module(system, full, package)
        try:
            modules[full].visit(ast.parse(path.read_text(encoding="utf-8")))
        except SyntaxError as error:
            print(f"{path}: left out: {error.msg}, which may be of another Python", file=sys.stderr)
    for full, module in sorted(modules.items()):
        known = names[full]
        for name, value in _names_of(module, modules, system).items():
            private = name.startswith("__") or (name.startswith("_") and value is not None)
            if not private and name not in known:
                known[name] = value


def _names_of(module: _Module, modules: Mapping[str, _Module], system: str) -> dict[str, str | None]:
    """The names of a module, with those of the modules that it has all names of, but without modules."""
    names = dict(module.names)
    origins = dict(module.origins)
    for other in module.all_of:
        inner = modules.get(other.removeprefix(system).strip("."))
        for name, value in inner.names.items() if inner else ():
            if not name.startswith("_"):
                names.setdefault(name, value)
                origins.setdefault(name, inner.origins.get(name, f"{other}.{name}"))
    return {
        name: value
        for name, value in names.items()
        if name not in origins or origins[name].removeprefix(f"{system}.") not in modules
    }


def table(packages: Sequence[Path], system: str, left_out: Sequence[str] = ()) -> Iterator[str]:
    """The lines of a ``names.txt``; of a name that several packages have, the first one's value."""
    names: Names = defaultdict(dict)
    for package in packages:
        read_package(package, names, system, left_out)
    for module, of_module in sorted(names.items()):
        functions = sorted(name for name, value in of_module.items() if value is None)
        constants = [f"{name}={value}" for name, value in sorted(of_module.items()) if value is not None]
        yield " ".join([f"{module}:", *functions, *constants])
