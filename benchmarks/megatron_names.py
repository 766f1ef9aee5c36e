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

import ast
import json
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foreign_names import UsedNames, answer, count, parser, print_counts, table

SYSTEM = "megatron"

HEAD = """\
# The modules of megatron packages and their names: MODULE: NAME NAME CONSTANT=VALUE
# Values are JSON without blanks. Of Megatron-LM core_v0.16.1, core_v0.19.0, core_v0.12.0, core_v0.8.0 and
# core_v0.4.0, and of Megatron-DeepSpeed (deepspeedai's and bigscience-workshop's).
# Written by benchmarks/megatron_names.py --table.
"""

LEFT_OUT = ("post_training",)
"""Packages that scripts do without, where they cannot be imported."""


def names_table(packages: Sequence[Path]) -> Iterator[str]:
    """The lines of the table of names."""
    return table(packages, SYSTEM, LEFT_OUT)


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


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument(
        "--arguments", type=Path, help="write the arguments of packages, and nothing else"
    )
    options_of.add_argument("--settings", type=Path, help="write settings of packages, and nothing else")
    options_of.add_argument("--resolve", action="store_true", help=SUPPRESS)
    options = options_of.parse_args()
    from hexad.compat import megatron

    if options.resolve:
        megatron.install()
        answer()
        return
    tables = (
        (options.table, HEAD, names_table),
        (options.arguments, ARGUMENTS_HEAD, earlier_arguments),
        (options.settings, SETTINGS_HEAD, settings),
    )
    for path, head, lines in tables:
        if path:
            path.write_text(head + "".join(line + "\n" for line in lines(options.sources)), encoding="utf-8")
            return
    from hexad.compat.megatron.installed import CONSTANTS, MODULES, UNSUPPORTED

    of_releases = (*CONSTANTS, *MODULES, *UNSUPPORTED)
    print_counts(count(options.sources, SYSTEM, UsedNames([SYSTEM]), of_releases), options.output)


if __name__ == "__main__":
    main()
