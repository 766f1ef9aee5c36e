"""Names below ``megatron`` that Python files use: does Hexad's interface have all of a file's?

    git clone https://github.com/alibaba/Pai-Megatron-Patch
    git clone https://github.com/deepspeedai/Megatron-DeepSpeed
    python benchmarks/megatron_names.py Pai-Megatron-Patch Megatron-DeepSpeed --output megatron_names.json

Read are the imports of every file that imports ``megatron``, and attributes of what they bind; a checkout's
own ``megatron`` package is left out. A file is complete if all its names can be imported from the interface.
Names that no release in ``names.txt`` has are counted too: they are of the checkout's own package.

``--table src/hexad/compat/megatron/names.txt PACKAGE ...`` writes the names of ``megatron`` packages, such as
a checkout's, or the one of ``megatron-core``. Their text is read; they are not imported: most need a GPU.
``--arguments src/hexad/compat/megatron/earlier_arguments.txt PACKAGE ...`` writes the defaults of what
``get_args()`` has in these, and ``--settings src/hexad/compat/megatron/transformer_settings.txt PACKAGE ...``
those of the settings of ``TransformerConfig``; names that the table does not have are appended.
"""

import ast
import json
import re
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


def _updated(path: Path, defaults: dict[str, Any], meaning: str) -> None:
    """Write these defaults into a table, whose rows keep what their names mean; new names get ``meaning``."""
    text = path.read_text(encoding="utf-8")
    for name, default in sorted(defaults.items()):
        row = f"{name}={json.dumps(default)}"
        text, count = re.subn(rf"(?m)^( *){name}=\S+", lambda line, row=row: line[1] + row, text)
        if not count:
            text += f"{row:<49} {meaning}\n"
    path.write_text(text, encoding="utf-8")


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


def settings(packages: Sequence[Path]) -> dict[str, Any]:
    """The defaults of settings by name; of one that several packages have, the first one's."""
    defaults: dict[str, Any] = {}
    for package in packages:
        for path in ("core/model_parallel_config.py", "core/transformer/transformer_config.py"):
            for node in ast.walk(ast.parse((package / path).read_text(encoding="utf-8"))):
                for field in node.body if isinstance(node, ast.ClassDef) else []:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        default = _literal(field.value) if field.value is not None else None
                        defaults.setdefault(field.target.id, default)
    return defaults


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


def earlier_arguments(packages: Sequence[Path]) -> dict[str, Any]:
    """The defaults of attributes that no flag sets; of one that several packages have, the first one's."""
    from hexad.compat.megatron.tables import FLAGS

    known = {flag.attribute for flag in FLAGS.values()}
    defaults: dict[str, Any] = {}
    for package in packages:
        for name, default in arguments_of(package):
            defaults.setdefault(name, default)
    return {name: value for name, value in defaults.items() if name not in known}


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
    if options.table:
        lines = names_table(options.sources)
        options.table.write_text(HEAD + "".join(line + "\n" for line in lines), encoding="utf-8")
        return
    if options.arguments:
        _updated(options.arguments, earlier_arguments(options.sources), "none of another release")
        return
    if options.settings:
        _updated(options.settings, settings(options.sources), "refused there is no such setting")
        return
    from hexad.compat.megatron.installed import CONSTANTS, MODULES, UNSUPPORTED

    of_releases = (*CONSTANTS, *MODULES, *UNSUPPORTED)
    print_counts(count(options.sources, SYSTEM, UsedNames([SYSTEM]), of_releases), options.output)


if __name__ == "__main__":
    main()
