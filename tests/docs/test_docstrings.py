"""Docstrings list parameters and attributes that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/hexad"
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)
"""An entry of a section: names and what they are."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def listed(node: ast.AST, title: str) -> list[str]:
    """The names in a section of a docstring."""
    docstring = ast.get_docstring(node) if isinstance(node, Function | ast.ClassDef) else None
    section = re.search(rf"^{title}:\n((?: {{4}}.*\n?|\n)*)", docstring or "", re.MULTILINE)
    entries = ENTRY.findall(section[1]) if section else []
    return [name.strip("* ") for entry in entries for name in entry.split(",")]


def parameters(node: ast.AST) -> set[str]:
    """The names that a function, or the constructor of a class, is called with."""
    if isinstance(node, ast.ClassDef):
        constructors = (inner for inner in node.body if getattr(inner, "name", "") in ("__init__", "__new__"))
        return fields(node).union(*map(parameters, constructors))
    assert isinstance(node, Function)
    arguments = node.args
    plain = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    return {argument.arg for argument in plain if argument is not None}


def fields(node: ast.ClassDef) -> set[str]:
    """The annotated names of a class, which are parameters of a dataclass."""
    return {
        inner.target.id
        for inner in node.body
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
    }


def attributes(node: ast.ClassDef) -> set[str]:
    """What the class and its methods define or set."""
    names = fields(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute | ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.attr if isinstance(inner, ast.Attribute) else inner.id)
        elif isinstance(inner, Function):
            names.add(inner.name)
        elif isinstance(inner, ast.Call) and getattr(inner.func, "attr", "") == "register_buffer":
            names |= {str(word.value) for word in inner.args[:1] if isinstance(word, ast.Constant)}
    return names


def inherited(name: str, classes: dict[str, list[ast.ClassDef]], seen: tuple[str, ...] = ()) -> set[str]:
    """The attributes of classes of this name and of what they are derived from."""
    names: set[str] = set()
    for node in classes.get(name, []) if name not in seen else []:
        bases = (getattr(base, "id", getattr(base, "attr", "")) for base in node.bases)
        names |= attributes(node).union(*(inherited(base, classes, (*seen, name)) for base in bases))
    return names


def wrong_names(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Listed names that do not exist; a class without constructor and fields has those of its base."""
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    classes: dict[str, list[ast.ClassDef]] = {}
    for _, node in nodes:
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)
    for file, node in nodes:
        for name in listed(node, "Args"):
            known = parameters(node)
            if (known or isinstance(node, Function)) and name not in known:
                yield f"{file}: {getattr(node, 'name', '')}: {name}"
        if isinstance(node, ast.ClassDef):
            missing = set(listed(node, "Attributes")) - inherited(node.name, classes) - {"others"}
            yield from (f"{file}: {node.name}.{name}" for name in sorted(missing))


def test_listed_names_exist() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    trees = {str(path.relative_to(SOURCE)): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    assert sum(len(listed(node, "Args")) for tree in trees.values() for node in ast.walk(tree)) > 1000
    assert list(wrong_names(trees)) == []


def test_a_wrong_name_is_noticed() -> None:
    source = '''
class Base:
    def __init__(self): self.inner = 1

class Shape(Base):
    """A shape.

    Args:
        rows, columns: its sizes.
        gone: not there.

    Attributes:
        inner: of the base.
        area, lost: see there.
    """

    def __init__(self, rows, columns, *, unit=None): self.area = rows * columns

def scale(shape, *factors, **options):
    """Scale a shape.

    Args:
        shape: what is scaled.
        *factors: how much.
        options, other: the rest.
    """
'''
    assert sorted(wrong_names({"a.py": ast.parse(source)})) == [
        "a.py: Shape.lost",
        "a.py: Shape: gone",
        "a.py: scale: other",
    ]
