"""What all pictures share: colours that colour-blind readers can tell apart, and saving to a file.

Figures are made with :class:`matplotlib.figure.Figure` directly, never through ``pyplot``, which keeps
global state and may look for a display.
"""

from __future__ import annotations

from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from hexad.config import HexadError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".html")

# Okabe & Ito, "Color Universal Design" (2008), without black and the yellow that is unreadable on white.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK = "#1f2430"
MUTED = "#667085"
RULE = "#d0d5dd"

# One colour per axis in every picture.
AXIS_COLOURS = {
    "tensor": PALETTE[0],
    "context": PALETTE[4],
    "pipeline": PALETTE[2],
    "data": PALETTE[1],
    "expert": PALETTE[3],
    "expert_tensor": PALETTE[5],
    "expert_data": MUTED,
}

_PIXELS_PER_INCH = 150
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<style>body {{ margin: 2rem; background: #fff; }} svg {{ max-width: 100%; height: auto; }}</style></head>
<body>
{svg}
</body>
</html>
"""


def stage_colours(count: int) -> list[str]:
    """``count`` fills, light enough for dark text: named colours for few stages, a scale for many."""
    if count <= len(PALETTE):
        return [tint(colour, 0.45) for colour in PALETTE[:count]]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    scale = colormaps["viridis"]
    return [tint(to_hex(scale(0.1 + 0.9 * index / (count - 1))), 0.5) for index in range(count)]


def tint(colour: str, strength: float) -> str:
    """``colour`` (``#rrggbb``) over white, 1 being the pure colour."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - channel) * strength):02x}" for channel in channels)


def output_path(path: str | Path) -> Path:
    """``path``, checked before any work is done for it.

    Raises:
        HexadError: an ending that cannot be written, or a missing folder.
    """
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        found = f"ending '{path.suffix}'" if path.suffix else "no ending"
        raise HexadError(f"--output: found '{path}' with {found}; use one of {', '.join(ENDINGS)}")
    if not path.parent.is_dir():
        raise HexadError(f"--output: found '{path}', but there is no folder '{path.parent}'; create it first")
    return path


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write ``figure`` as the file's ending says: ``.png``, ``.svg`` or ``.html`` (a page of its own).

    Raises:
        HexadError: another ending, a missing folder, or a file that cannot be written.
    """
    path = output_path(path)
    try:
        if path.suffix.lower() == ".png":
            figure.savefig(path, format="png", dpi=_PIXELS_PER_INCH)
        elif path.suffix.lower() == ".svg":
            path.write_text(_svg(figure), encoding="utf-8")
        else:
            svg = _svg(figure)
            page = _PAGE.format(title=escape(_title(figure)), svg=svg[svg.index("<svg") :])
            path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HexadError(f"--output: '{path}' cannot be written: {error.strerror}") from None


def _svg(figure: Figure) -> str:
    """The same text for the same figure: no date, no random identifiers."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.hashsalt": "hexad"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _title(figure: Figure) -> str:
    label = figure.get_label()
    return str(label) if label else "Hexad"


def quiet_axes(axes: Axes) -> None:
    """Light rules, no box: the data are the darkest thing in the picture."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
