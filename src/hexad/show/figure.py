"""Parts that all pictures share: the colours, the style and saving to a file.

Figures are made with :class:`matplotlib.figure.Figure` directly, never through ``pyplot``, which keeps
global state and may look for a display.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hexad.config import HexadError, counted

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

# Okabe & Ito, "Color Universal Design" (2008), without black and the yellow that is unreadable on white.
# Dark text is readable on the first four, and on the paler variants of these.
PALETTE = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00")
PALE = ("#b9dff6", "#f7d99b", "#9fdccb", "#efd0e1")
GREY = "#667085"
PALE_GREY = "#e6e8ed"

_CJK = (
    "Noto Sans CJK JP", "Noto Sans JP", "IPAexGothic", "IPAGothic", "TakaoGothic", "Hiragino Sans",
    "Yu Gothic", "Meiryo", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", "WenQuanYi Zen Hei",
    "Apple SD Gothic Neo", "Malgun Gothic", "Arial Unicode MS",
)  # fmt: skip
"""Fonts with Chinese, Japanese or Korean characters, which DejaVu Sans lacks."""

_TIP = "tip "


def pale_colours(count: int) -> list[str]:
    """So many pale colours that differ, the best ones first."""
    from colorsys import hls_to_rgb

    golden = (5**0.5 - 1) / 2  # multiples of it are evenly spread over the colour wheel
    further = (hls_to_rgb(0.6 + number * golden % 1, 0.85, 0.55) for number in range(count))
    hexadecimal = ["#" + "".join(f"{round(255 * part):02x}" for part in colour) for colour in further]
    return [*PALE, *hexadecimal][:count]


def tip(
    axes: Axes, left: float, right: float, low: float, high: float, text: str, whole_height: bool = False
) -> None:
    """A text that a page shows where the pointer rests on a rectangle in the units of ``axes``; with
    ``whole_height`` low and high are parts of the height."""
    from matplotlib.patches import Rectangle

    # Not quite transparent: what has no colour at all gets no pointer.
    cover = Rectangle((left, low), right - left, high - low, alpha=0.001, linewidth=0, gid=_TIP + text)
    cover.set_in_layout(False)
    if whole_height:
        cover.set_transform(axes.get_xaxis_transform())
    axes.add_artist(cover)


def tip_bars(bars: Iterable[Artist], texts: Iterable[str]) -> None:
    """Texts that a page shows where the pointer rests on bars."""
    for bar, text in zip(bars, texts):
        bar.set_gid(_TIP + text)


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that makes or saves a figure: it runs with the style of all pictures."""
    style: dict[Any, Any] = {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "font.size": 8.5,
        "grid.color": PALE_GREY,
        "svg.fonttype": "none",  # text stays text: small files that can be searched
        "svg.hashsalt": "hexad",  # no random identifiers: equal figures make equal files
        "xtick.color": GREY,
        "xtick.major.size": 0,
        "ytick.color": GREY,
        "ytick.major.size": 0,
    }

    @wraps(function)
    def with_style(*args: P.args, **kwargs: P.kwargs) -> T:
        from matplotlib import rc_context
        from matplotlib.font_manager import fontManager

        installed = set(fontManager.get_font_names()).intersection(_CJK)
        fonts = ["DejaVu Sans", *(name for name in _CJK if name in installed)]
        with rc_context({**style, "font.sans-serif": fonts}):
            return function(*args, **kwargs)

    return with_style


@styled
def save_figure(figure: Figure, path: str | Path) -> None:
    """Write ``figure`` to ``path`` in the format of its ending: ``.png``, ``.svg`` or ``.html``; the last two
    show tips.

    Raises:
        HexadError: the file cannot be written.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".png":
            _save_png(figure, path)
            return
        text = svg_text(figure)
        if path.suffix.lower() == ".html":
            title = escape(str(figure.get_label()))
            text = (
                f"<!doctype html>\n<meta charset=utf-8>\n<title>{title}</title>\n{text[text.index('<svg') :]}"
            )
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HexadError(f"``output``: '{path}' cannot be written: {error.strerror}") from None


@styled
def svg_text(figure: Figure) -> str:
    """A figure as an SVG document with tips."""
    svg = StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a browser has others
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return re.sub(f'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", svg.getvalue())


def _save_png(figure: Figure, path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # a user may have turned them off
        figure.savefig(path, dpi=150)
    missing = [text for text in (str(warning.message) for warning in caught) if "missing from font" in text]
    if missing:
        problem = f"no font here has {counted(len(missing), 'character')} of this picture"
        print(f"note: {path}: {problem}; a browser has them for .svg and .html", file=sys.stderr)
