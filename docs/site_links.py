"""Markdown extension of the site: links to files that are not pages become their paths."""

import posixpath
from xml.etree.ElementTree import Element, SubElement

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from zensical.extensions.context import ContextPreprocessor


class OutsideLinks(Treeprocessor):
    """Replaces links that lead out of ``docs``: programs, examples and results are not on the site."""

    def run(self, root: Element) -> None:
        context = ContextPreprocessor.from_markdown(self.md)
        folder = posixpath.dirname(context.page.path) if context else ""
        for link in root.iter("a"):
            path = posixpath.normpath(posixpath.join(folder, link.get("href", "").partition("#")[0]))
            if path.startswith("../"):
                _show_path(link, path.removeprefix("../"))


def _show_path(link: Element, path: str) -> None:
    """The link's text with the path behind it, or the path alone where the text is its end."""
    text = "".join(link.itertext())
    link.tag = "span"
    del link.attrib["href"]
    code = link
    if path.endswith(text):
        for child in list(link):
            link.remove(child)
        link.text = ""
        code = SubElement(link, "code")
    else:
        if len(link):
            link[-1].tail = (link[-1].tail or "") + " ("
        else:
            link.text = AtomicString(f"{link.text} (")
        code = SubElement(link, "code")
        code.tail = ")"
    code.text = AtomicString(path)


class SiteLinks(Extension):
    """The extension's entry in ``mkdocs.yml``."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(OutsideLinks(md), "outside_links", 15)  # after inline patterns: 20


def makeExtension(**options: object) -> SiteLinks:
    """What Python-Markdown calls."""
    return SiteLinks(**options)
