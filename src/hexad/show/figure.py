"""What all pictures share: the colours, the style and saving to a file.

Figures are made with :class:`matplotlib.figure.Figure` directly, never through ``pyplot``, which keeps
global state and may look for a display.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hexad.config import HexadError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

# Okabe & Ito, "Color Universal Design" (2008), without black and the yellow that is unreadable on white.
# Dark text is readable on the first four, and on the paler variants of these.
PALETTE = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00")
PALE = ("#b9dff6", "#f7d99b", "#9fdccb", "#efd0e1")
GREY = "#667085"
PALE_GREY = "#e6e8ed"


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that makes or saves a figure: it runs with the style of all pictures."""
    style: dict[Any, Any] = {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "font.sans-serif": ["DejaVu Sans"],
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

        with rc_context(style):
            return function(*args, **kwargs)

    return with_style


@styled
def save_figure(figure: Figure, path: str | Path) -> None:
    """Write ``figure`` to ``path`` in the format of its ending: ``.png``, ``.svg`` or ``.html``.

    Raises:
        HexadError: the file cannot be written.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".png":
            figure.savefig(path, dpi=150)
            return
        svg = StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        text = svg.getvalue()
        if path.suffix.lower() == ".html":
            title = escape(str(figure.get_label()))
            text = (
                f"<!doctype html>\n<meta charset=utf-8>\n<title>{title}</title>\n{text[text.index('<svg') :]}"
            )
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HexadError(f"--output: '{path}' cannot be written: {error.strerror}") from None
