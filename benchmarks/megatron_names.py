"""Names below ``megatron`` that Python files use: does Hexad's interface have all of a file's?

    git clone https://github.com/alibaba/Pai-Megatron-Patch
    git clone https://github.com/deepspeedai/Megatron-DeepSpeed
    python benchmarks/megatron_names.py Pai-Megatron-Patch Megatron-DeepSpeed --output megatron_names.json

Read are the imports of every file that imports ``megatron``, and attributes of what they bind; a checkout's
own ``megatron`` package is left out. A file is complete if all its names can be imported from the interface.
Names that no release in ``names.txt`` has are counted too: they are of the checkout's own package.

``--table src/hexad/compat/megatron/names.txt PACKAGE ...`` writes the names of ``megatron`` packages, such as
a checkout's, or the one of ``megatron-core``. Their text is read; they are not imported: most need a GPU.
``--arguments src/hexad/compat/megatron/earlier_arguments.txt PACKAGE ...`` writes what ``get_args()`` has in
these, and ``--settings src/hexad/compat/megatron/transformer_settings.txt PACKAGE ...`` the settings of
``TransformerConfig``.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed_names import exists, names_of_files
from facts import facts

SYSTEM = "megatron"


def resolved(names: set[str]) -> set[str]:
    """The names that Hexad's interface has, asked in a process of its own."""
    command = [sys.executable, __file__, "--resolve"]
    done = subprocess.run(command, input=json.dumps(sorted(names)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return set(json.loads(done.stdout.splitlines()[-1]))


def _resolve() -> None:
    from hexad.compat import megatron

    megatron.install()
    found = [name for name in json.loads(sys.stdin.read()) if exists(name)]
    print("\n" + json.dumps(found))


# The table of names

HEAD = """\
# The modules of megatron packages and their names: MODULE: NAME NAME CONSTANT=VALUE
# Values are JSON without blanks. Of Megatron-LM core_v0.16.1, core_v0.19.0, core_v0.12.0, core_v0.8.0 and
# core_v0.4.0, and of Megatron-DeepSpeed (deepspeedai's and bigscience-workshop's).
# Written by benchmarks/megatron_names.py --table.
"""

LEFT_OUT = ("post_training",)
"""Packages that scripts do without, where they cannot be imported."""

Names = dict[str, dict[str, str | None]]
"""Module -> name -> value of a constant as JSON; None for all else."""


class _Module(ast.NodeVisitor):
    """Collects what a module defines, in branches too: its last value is that where a package is missing."""

    def __init__(self, package: bool) -> None:
        self.names: dict[str, str | None] = {}
        self._package = package

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names[node.name] = None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        own = node.level > 0 or (node.module or "").split(".")[0] == SYSTEM
        if self._package and own:
            self.names |= {alias.asname or alias.name: None for alias in node.names if alias.name != "*"}

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit_Assign(ast.Assign([node.target], node.value))

    def visit_Assign(self, node: ast.Assign) -> None:
        try:
            value: Any = ast.literal_eval(node.value)
            text = json.dumps(value, separators=(",", ":")).replace(" ", "\\u0020")
        except (ValueError, TypeError, SyntaxError):
            text = None
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = text


def read_package(root: Path, names: Names) -> None:
    """Add the names of a ``megatron`` package."""
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        package = parts[-1] == "__init__"
        parts = parts[:-1] if package else parts
        if (parts[:1] and parts[0] in LEFT_OUT) or "__main__" in parts:
            continue
        if not all(part.isidentifier() for part in parts):
            continue
        module = _Module(package)
        module.visit(ast.parse(path.read_text(encoding="utf-8")))
        known = names[".".join(parts)]
        for name, value in module.names.items():
            private = name.startswith("__") or (name.startswith("_") and value is not None)
            if not private and name not in known:
                known[name] = value


def table(packages: Sequence[Path]) -> Iterator[str]:
    """The lines of the table; of a name that several packages have, the first one's value."""
    names: Names = defaultdict(dict)
    for package in packages:
        read_package(package, names)
    for module, of_module in sorted(names.items()):
        functions = sorted(
            name
            for name, value in of_module.items()
            if value is None and f"{module}.{name}".strip(".") not in names
        )
        constants = [f"{name}={value}" for name, value in sorted(of_module.items()) if value is not None]
        yield " ".join([f"{module}:", *functions, *constants])


# The tables of arguments and settings

ARGUMENTS_HEAD = """\
# Attributes of get_args() in releases before core_v0.19.0 that it does not have, with their defaults as JSON.
# Of Megatron-LM core_v0.16.1, core_v0.12.0, core_v0.8.0 and core_v0.4.0, and of Megatron-DeepSpeed
# (deepspeedai's and bigscience-workshop's). Written by benchmarks/megatron_names.py --arguments.
"""


SETTINGS_HEAD = """\
# Settings of TransformerConfig, with their defaults as JSON; null for those that are computed.
# Of megatron.core in Megatron-LM core_v0.16.1, core_v0.19.0 and core_v0.12.0.
# Written by benchmarks/megatron_names.py --settings.
"""


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of the ``default`` of a dataclass's ``field``; None for any other
    expression."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "field":
        defaults = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
        return _literal(defaults[0]) if defaults else None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def settings(packages: Sequence[Path]) -> Iterator[str]:
    """The lines of the table of settings; of one that several packages have, the first one's default."""
    found: dict[str, Any] = {}
    for package in packages:
        for path in ("core/model_parallel_config.py", "core/transformer/transformer_config.py"):
            for node in ast.walk(ast.parse((package / path).read_text(encoding="utf-8"))):
                for field in node.body if isinstance(node, ast.ClassDef) else []:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        default = _literal(field.value) if field.value is not None else None
                        found.setdefault(field.target.id, default)
    yield from (f"{name}={json.dumps(value)}" for name, value in sorted(found.items()))


def arguments_of(package: Path) -> Iterator[tuple[str, Any]]:
    """(attribute, default) of the flags that the ``arguments.py`` of a ``megatron`` package declares."""
    path = next(
        path for path in (package / "training/arguments.py", package / "arguments.py") if path.is_file()
    )
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"):
            continue
        words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        names = [word for word in words if str(word).startswith("--")]
        values = {key: _literal(named[key]) for key in ("dest", "default", "action") if key in named}
        if names:
            switch = {"store_true": False, "store_false": True}.get(values.get("action", ""))
            yield values.get("dest", names[0][2:].replace("-", "_")), values.get("default", switch)


def earlier_arguments(packages: Sequence[Path]) -> Iterator[str]:
    """The lines of the table; of an attribute that several packages have, the first one's default."""
    from hexad.compat.megatron.flags import FLAGS

    known = {flag.attribute for flag in FLAGS.values()}
    found: dict[str, Any] = {}
    for package in packages:
        for name, default in arguments_of(package):
            found.setdefault(name, default)
    yield from (f"{name}={json.dumps(value)}" for name, value in sorted(found.items()) if name not in known)


def count(sources: Sequence[Path]) -> dict[str, Any]:
    """The counts of checkouts, and what files lack."""
    from hexad.compat.megatron.installed import CONSTANTS, MODULES, UNSUPPORTED

    of_releases = {f"{SYSTEM}.{name}" for name in (*CONSTANTS, *MODULES, *UNSUPPORTED)}
    files = {source.name: names_of_files(source, SYSTEM) for source in sources}
    names = {name for used in files.values() for of_file in used.values() for name in of_file}
    found = resolved(names)
    missing = Counter(name for used in files.values() for of_file in used.values() for name in of_file)
    missing = Counter({name: number for name, number in missing.items() if name not in found})
    counts = {
        source: {"files": len(used), "complete": sum(set(of_file) <= found for of_file in used.values())}
        for source, used in files.items()
    }
    return {
        "repositories": counts,
        "names": len(names),
        "names that Hexad lacks": len(missing),
        "of them names of the releases in the table": len(missing.keys() & of_releases),
        "lacking": dict(missing.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, nargs="*", help="checkouts, or packages for --table")
    parser.add_argument("--table", type=Path, help="write the names of packages, and nothing else")
    parser.add_argument("--arguments", type=Path, help="write the arguments of packages, and nothing else")
    parser.add_argument("--settings", type=Path, help="write settings of packages, and nothing else")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--resolve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resolve:
        _resolve()
        return
    tables = (
        (options.table, HEAD, table),
        (options.arguments, ARGUMENTS_HEAD, earlier_arguments),
        (options.settings, SETTINGS_HEAD, settings),
    )
    for path, head, lines in tables:
        if path:
            path.write_text(head + "".join(line + "\n" for line in lines(options.sources)), encoding="utf-8")
            return
    results = count(options.sources)
    for name, number in list(results["lacking"].items())[:40]:
        print(f"{number} files: {name}")
    for source, numbers in results["repositories"].items():
        print(f"{source}: {numbers['complete']} of {numbers['files']} files complete")
    print(json.dumps({name: value for name, value in results.items() if isinstance(value, int)}, indent=1))
    if options.output:
        options.output.write_text(json.dumps({**facts(), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
