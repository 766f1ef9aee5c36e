"""Names below ``deepspeed`` that Python files use: which does the package have, and which Hexad's interface?

    git clone https://github.com/deepspeedai/DeepSpeedExamples
    git clone https://github.com/huggingface/trl
    python benchmarks/deepspeed_names.py DeepSpeedExamples trl --output deepspeed_names.json

Needs the ``deepspeed`` package. Read are the imports of every file that imports it, attributes of what they
bind under any name (``import deepspeed.comm as dist``, ``dist.get_rank``), and of the accelerator. A file is
complete if every name that it uses and the package has can be imported from Hexad's interface.

``--table src/hexad/compat/deepspeed/names.txt`` writes the names of the installed package, for a new release.
"""

import ast
import json
import os
import sys
from argparse import SUPPRESS
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from facts import facts
from foreign_names import UsedNames, answer, exists, names_of_files, parser, resolved

SYSTEM = "deepspeed"
ACCELERATOR = "get_accelerator"
"""The function whose result's attributes are names too."""


def _exists(name: str) -> bool:
    """Whether a name of the package, or of its accelerator, exists."""
    if name.startswith(f"{ACCELERATOR}()"):
        return hasattr(import_module(SYSTEM).get_accelerator(), name.rpartition(".")[2])
    return exists(name)


def _resolve(package: str) -> None:
    if package == "hexad":
        from hexad.compat import deepspeed

        deepspeed.install()
    import_module(SYSTEM)
    answer(_exists)


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
    options_of = parser(__doc__)
    options_of.add_argument("--resolve", help=SUPPRESS)
    options = options_of.parse_args()
    if options.resolve:
        _resolve(options.resolve)
        return
    if options.table:
        lines = [line + "\n" for line in table()]
        options.table.write_text(HEAD.format(version=version(SYSTEM)) + "".join(lines))
        return
    used = UsedNames([SYSTEM], [ACCELERATOR])
    files = {source.name: names_of_files(source, SYSTEM, used) for source in options.sources}
    names = {name for names in files.values() for in_file in names.values() for name in in_file}
    theirs, ours = resolved(names, SYSTEM), resolved(names, "hexad")
    missing: dict[str, Any] = {
        f"{source}/{path}": lacking
        for source, of_source in files.items()
        for path, in_file in of_source.items()
        if (lacking := [name for name in in_file if name in theirs - ours])
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
