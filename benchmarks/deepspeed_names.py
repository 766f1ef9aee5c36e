"""Names below ``deepspeed`` that Python files use: which does the package have, and which Hexad's interface?

    git clone https://github.com/deepspeedai/DeepSpeedExamples
    git clone https://github.com/huggingface/trl
    python benchmarks/deepspeed_names.py DeepSpeedExamples trl --output deepspeed_names.json

Needs the ``deepspeed`` package. Read are the imports of every file that imports it, attributes of what they
bind under any name (``import deepspeed.comm as dist``, ``dist.get_rank``), and of the accelerator. A file is
complete if every name that it uses and the package has can be imported from Hexad's interface.

``--table src/hexad/compat/deepspeed/names.txt`` writes the names of the installed package, for a new release.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from facts import facts

ACCELERATOR = "get_accelerator()"


def bound_names(tree: ast.AST, package: str) -> dict[str, str]:
    """What a file's imports, and assignments of ``get_accelerator()``, bind: name -> name of the package."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    bound[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module.split(".")[0] == package:
                bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names if a.name != "*"}
        elif isinstance(node, ast.Assign) and _called(node.value) == "get_accelerator":
            bound |= {target.id: ACCELERATOR for target in node.targets if isinstance(target, ast.Name)}
    return bound


def _called(node: ast.expr) -> str:
    """The last name of the function that an expression calls; empty if it is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def used_names(tree: ast.AST, package: str = "deepspeed") -> Iterator[str]:
    """The names of a package that a file imports or uses, and those of DeepSpeed's accelerator."""
    bound = bound_names(tree, package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == package)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module.split(".")[0] == package:
                yield from (f"{node.module}.{a.name}".removesuffix(".*") for a in node.names)
        elif isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts, inner = [inner.attr, *parts], inner.value
            if isinstance(inner, ast.Name) and inner.id in bound:
                of_accelerator = bound[inner.id] == ACCELERATOR
                yield ".".join([bound[inner.id], *(parts[:1] if of_accelerator else parts)])
            elif _called(inner) == "get_accelerator" and bound:
                yield f"{ACCELERATOR}.{parts[0]}"


def exists(name: str) -> bool:
    """Whether a name can be imported, or is an attribute of what can be."""
    if name.startswith(ACCELERATOR):
        return hasattr(import_module("deepspeed").get_accelerator(), name.rpartition(".")[2])
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


def names_of_files(source: Path, package: str = "deepspeed") -> dict[str, list[str]]:
    """Files that import a package -> the names of it that they use; without those of the package itself,
    where the checkout has it."""
    names: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if package not in text or path.relative_to(source).parts[0] == package:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in the file
                used = sorted(set(used_names(ast.parse(text), package)))
        except SyntaxError:  # of Python 2, or a template
            continue
        if used:
            names[str(path.relative_to(source))] = used
    return names


def resolved(package: str, names: set[str]) -> set[str]:
    """The names that exist, with the package or Hexad's interface in a process of its own."""
    command = [sys.executable, __file__, "--resolve", package, "."]
    done = subprocess.run(command, input=json.dumps(sorted(names)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return set(json.loads(done.stdout.splitlines()[-1]))


def _resolve(package: str) -> None:
    if package == "hexad":
        from hexad.compat import deepspeed

        deepspeed.install()
    import_module("deepspeed")
    found = [name for name in json.loads(sys.stdin.read()) if exists(name)]
    print("\n" + json.dumps(found))


# The table of the package's names

HEAD = """\
# The modules of the deepspeed package {version} and their public names: MODULE: NAME NAME CONSTANT=VALUE
# Values are JSON without blanks. Written by benchmarks/deepspeed_names.py --table.
"""


class _Defined(ast.NodeVisitor):
    """Collects the classes, functions and values that a module defines, in branches too."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.values: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names.add(node.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.values |= {target.id for target in node.targets if isinstance(target, ast.Name)}


def _plain(value: Any) -> bool:
    """Whether a value is a constant: no path, nothing of this machine."""
    if isinstance(value, list | tuple):
        return all(isinstance(item, str | int | float) and _plain(item) for item in value)
    own = (os.path.expanduser("~"), os.getcwd(), sys.prefix, sys.base_prefix)
    return isinstance(value, str | int | float | None) and not str(value).startswith(own)


def table() -> Iterator[str]:
    """The lines of the table."""
    import deepspeed

    root = Path(deepspeed.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        package = parts[-1] == "__init__"
        parts = parts[:-1] if package else parts
        if "__main__" in parts or not all(map(str.isidentifier, parts)):
            continue
        defined = _Defined()
        defined.visit(ast.parse(path.read_text(encoding="utf-8")))
        package = package or not defined.names  # a module that only collects names of others
        try:
            values = vars(import_module(".".join(["deepspeed", *parts])))
        except Exception:  # it needs a GPU's packages: only what its text defines is known
            values = {}
        names, constants = set(defined.names), dict[str, Any]()
        for name, value in values.items():
            if _plain(value) and (name in defined.values or package):
                constants[name] = value
            elif (
                package and callable(value) and str(getattr(value, "__module__", "")).startswith("deepspeed")
            ):
                names.add(name)
        words = sorted(name for name in names - set(constants) if not name.startswith("_"))
        for name, value in sorted(constants.items()):
            if not name.startswith("_"):
                text = json.dumps(value, separators=(",", ":")).replace(" ", "\\u0020")
                words.append(f"{name}={text}")
        yield " ".join([f"{'.'.join(parts)}:", *words])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, nargs="*", help="checkouts")
    parser.add_argument("--table", type=Path, help="write the names of the package, and nothing else")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--resolve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resolve:
        _resolve(options.resolve)
        return
    if options.table:
        lines = [line + "\n" for line in table()]
        options.table.write_text(HEAD.format(version=version("deepspeed")) + "".join(lines))
        return
    files = {source.name: names_of_files(source) for source in options.sources}
    names = {name for used in files.values() for of_file in used.values() for name in of_file}
    theirs, ours = resolved("deepspeed", names), resolved("hexad", names)
    missing: dict[str, Any] = {
        f"{source}/{path}": lacking
        for source, of_source in files.items()
        for path, used in of_source.items()
        if (lacking := [name for name in used if name in theirs - ours])
    }
    for path, lacking in missing.items():
        print(f"{path}: {', '.join(lacking)}")
    counts = {
        "files": sum(map(len, files.values())),
        "repositories": sum(map(bool, files.values())),
        "names": len(names),
        "names of the package": len(theirs),
        "names of the package that Hexad lacks": len(theirs - ours),
        "files that lack one": len(missing),
    }
    print(json.dumps(counts, indent=1))
    if options.output:
        options.output.write_text(json.dumps({**facts(), **counts, "lacking": missing}, indent=1) + "\n")


if __name__ == "__main__":
    main()
