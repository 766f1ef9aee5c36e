"""Reads the pictures that commands write."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree


def png_size(file: Path) -> tuple[int, int]:
    """Width and height in pixels of a PNG file that holds more than a blank page."""
    data = file.read_bytes()
    assert data[:4] == b"\x89PNG" and len(data) > 10_000
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def paths_of(text: str) -> int:
    """How many paths the drawing in an SVG or HTML document has."""
    drawing = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    return sum(element.tag.endswith("path") for element in drawing.iter())
