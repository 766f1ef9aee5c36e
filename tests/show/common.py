"""What tests of the commands under ``show`` share: reading their pictures, and their refusals."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from click.testing import Result

from hexad.config import HexadError


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


def label_boxes(figure: Any) -> list[tuple[float, float, float, float]]:
    """(left, bottom, right, top) in pixels of a figure's labels, none of which overlap."""
    figure.canvas.draw()
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    boxes = [text.get_window_extent().padded(-0.5).extents for text in texts]
    clashes = [
        (texts[index].get_text(), texts[other].get_text())
        for index, (left, bottom, right, top) in enumerate(boxes)
        for other, (left_b, bottom_b, right_b, top_b) in enumerate(boxes[:index])
        if left < right_b and left_b < right and bottom < top_b and bottom_b < top
    ]
    assert not clashes
    return boxes


def refusal(result: Result) -> str:
    """The one line with which a command refused."""
    assert isinstance(result.exception, HexadError), (result.output, result.exception)
    assert "\n" not in str(result.exception)
    return str(result.exception)
