"""The site: links of its pages resolve, and nothing is loaded from a network."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml

import hexad

from ..forks import PATIENCE

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
"""What a browser loads with a page, and the attribute that names it."""
IN_STYLES = re.compile(r"url\(['\"]?((?:https?:)?//[^)]*)|@import\s+([^;]*)")


class Page(HTMLParser):
    """The links of a page, its anchors, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.loaded.append(values.get("href", ""))
        if tag in LOADED:
            self.loaded.append(values.get(LOADED[tag], ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The builder refuses folders outside the project's, so it has a copy."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "mkdocs.yml", project)
    shutil.copytree(ROOT / "docs", project / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "src").symlink_to(ROOT / "src")
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=project,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "griffe:" not in built.stdout + built.stderr  # docstrings that it cannot read
    return project / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """All pages of the site."""
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def in_navigation(entries: list) -> Iterator[str]:
    """The pages that the navigation names."""
    for entry in entries:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [target] if isinstance(target, str) else in_navigation(target)


def navigation() -> list:
    """The navigation of ``mkdocs.yml``."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"!!python/\S+", "", text))["nav"]


def test_every_page_is_in_the_navigation() -> None:
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(in_navigation(navigation())) == sorted(written)


def test_the_navigation_has_the_four_kinds_of_pages() -> None:
    titles = [next(iter(entry)) for entry in navigation()]
    assert titles == ["Home", "Tutorials", "How-to guides", "Explanation", "Reference"]


def test_links_and_anchors_resolve(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 30
    broken = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        for link in page.links
        if not urlsplit(link).scheme and not resolves(link, path, site, pages)
    ]
    assert broken == []


def resolves(link: str, origin: Path, site: Path, pages: dict[Path, Page]) -> bool:
    """Whether a relative link of a page leads to a file of the site, and to an anchor that is in it."""
    address, anchor = urldefrag(unquote(link))
    if not address:
        target = origin
    elif address.startswith("/"):  # of the page for addresses that do not exist
        target = site / address.lstrip("/")
    else:
        target = (origin.parent / address).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file() or not target.is_relative_to(site):
        return False
    return not anchor or target not in pages or anchor in pages[target].anchors


def test_nothing_is_loaded_from_a_network(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {
        address for page in pages.values() for address in page.loaded if not address.startswith("data:")
    }
    assert any(address.endswith(".css") for address in loaded)
    assert [address for address in loaded if urlsplit(address).netloc] == []
    styles = [path for path in site.rglob("*.css") if IN_STYLES.search(path.read_text(encoding="utf-8"))]
    assert styles == []


def test_programs_are_not_published(site: Path) -> None:
    assert list(site.rglob("*.py")) == list(site.rglob("__pycache__")) == []


def test_every_public_name_is_described(site: Path, pages: dict[Path, Page]) -> None:
    names = {f"hexad.{name}" for name in hexad.__all__ if not name.startswith("_")}
    assert names <= pages[site / "api" / "index.html"].anchors


def test_links_out_of_the_pages_are_paths(site: Path) -> None:
    text = (site / "exact" / "index.html").read_text(encoding="utf-8")
    assert "<code>benchmarks/exact.py</code>" in text
