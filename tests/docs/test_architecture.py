"""Docs name places that exist: functions in files, and headings of pages."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/hexad"
PLACE = re.compile(r"`([\w/]+\.py):\s+([\w.]+)`")
"""A function, class or constant, or a method of a class, in a file."""
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
PAGES = [
    *(path for path in ROOT.glob("*.md")),
    *(path for path in (ROOT / "docs").rglob("*.md")),
]


@cache
def names(path: Path) -> frozenset[str]:
    """What a module defines."""
    defined = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
            defined |= {f"{node.name}.{method.name}" for method in methods}
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                defined.add(target.id)
    return frozenset(defined)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them, and of names in the Python reference."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    described = re.findall(r"^::: (.+)$", text, re.MULTILINE)  # by the site, from docstrings
    return frozenset([*described, *(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain)])


def test_places_in_the_walks_exist() -> None:
    places = PLACE.findall((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert len(places) > 100
    missing = [
        f"{file}: {name}"
        for file, name in places
        if not (SOURCE / file).is_file() or (file.endswith(".py") and name not in names(SOURCE / file))
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in LINK.findall(text):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}#{anchor}"
