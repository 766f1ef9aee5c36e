"""What tests of the commands under ``show`` share: calling them, and reading their pictures."""

import json
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..training.command import call

SVG = "{http://www.w3.org/2000/svg}"


def text_of(*arguments: str | Path) -> str:
    """What ``hexad show`` prints."""
    result = call("show", *map(str, arguments))
    assert result.status == 0, result.err
    return result.out


def document_of(*arguments: str | Path) -> Any:
    """The JSON that ``hexad show`` prints."""
    return json.loads(text_of(*arguments, "--json"))


def error_of(*arguments: str | Path) -> str:
    """The one line with which ``hexad show`` refuses."""
    result = call("show", *map(str, arguments))
    assert result.status == 2 and result.out == ""
    return result.error


def labels_of(*arguments: str | Path, file: Path) -> list[str]:
    """Draws into an SVG or HTML file; returns the text in the picture."""
    assert text_of(*arguments, "--output", file) == ""
    content = file.read_text(encoding="utf-8")
    assert content.startswith("<!doctype html>" if file.suffix == ".html" else "<?xml")
    drawing = ElementTree.fromstring(content[content.index("<svg") :])
    assert sum(1 for _ in drawing.iter(f"{SVG}path")) > 3
    return ["".join(text.itertext()) for text in drawing.iter(f"{SVG}text")]


def png_size(*arguments: str | Path, file: Path) -> tuple[int, int]:
    """Draws into a PNG file; returns width and height in pixels of what is more than a blank page."""
    assert text_of(*arguments, "--output", file) == ""
    data = file.read_bytes()
    assert data[:4] == b"\x89PNG" and len(data) > 10_000
    width, height = struct.unpack(">II", data[16:24])
    return width, height
