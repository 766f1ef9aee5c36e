"""Draws pictures of ``docs/parallelism`` and ``docs/tutorials``: ``python -m docs.pictures``."""

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from hexad.show.figure import GREY as INK
from hexad.show.figure import PALE, PALE_GREY

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, PINK = PALE
GIB = 2**30
LLAMA = {
    "run": {"device": "cuda"},
    "model": {"preset": "llama3-8b"},
    "data": {"sequence": 8192},
    "batch": {"micro": 1, "global": 8},
    "precision": {"dtype": "bf16"},
}

matplotlib.rcParams["svg.hashsalt"] = "hexad"  # the same file each time
matplotlib.rcParams["font.family"] = "DejaVu Sans"


def hexad(*words: str) -> str:
    """The output of a command; ``run.yaml`` is :data:`LLAMA`."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "run.yaml").write_text(yaml.safe_dump(LLAMA), encoding="utf-8")
        done = subprocess.run(["hexad", *words], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout


def memory(*settings: str) -> dict[str, Any]:
    """The predicted memory of the rank that needs the most, in bytes."""
    return json.loads(hexad("show", "memory", "run.yaml", *settings, "--json"))


def layout(path: Path) -> None:
    """16 ranks on four axes."""
    degrees = ("--tensor", "2", "--context", "2", "--data", "2", "--pipeline", "2")
    hexad("show", "layout", "--world", "16", *degrees, "--output", str(path))


def six_axes(path: Path) -> None:
    """The eight ranks of the tutorial, on both grids."""
    degrees = ("--tensor", "2", "--context", "2", "--pipeline", "2", "--expert", "4")
    hexad("show", "layout", "--world", "8", *degrees, "--output", str(path))


def context(path: Path) -> None:
    """Which of four ranks has which tokens of a sequence."""
    hexad("show", "context", "run.yaml", "parallel.context=4", "--output", str(path))


def pipeline(path: Path) -> None:
    """A step of four stages and eight microbatches."""
    stages = ("--pipeline", "4", "--microbatches", "8", "--schedule", "1f1b")
    hexad("show", "schedule", *stages, "--output", str(path))


def zero(path: Path) -> None:
    """The memory of a rank by component, for each level of ZeRO."""
    kinds = {"parameters": BLUE, "gradients": ORANGE, "master": GREEN, "optimizer": PINK, "other": PALE_GREY}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    for level in range(4):
        settings = ("parallel.data=8", f"parallel.zero={level}", "memory.recompute=full")
        predicted = memory(*settings)
        sizes = {kind: predicted[kind] for kind in kinds if kind != "other"}
        sizes["other"] = predicted["total"] - sum(sizes.values())
        left = 0.0
        for kind, size in sizes.items():
            axes.barh(3 - level, size / GIB, left=left, color=kinds[kind], label=kind if not level else None)
            if size > 6e9:
                axes.text(left + size / GIB / 2, 3 - level, f"{size / GIB:.0f}", ha="center", va="center")
            left += size / GIB
        axes.text(left + 1.5, 3 - level, f"{left:.0f} GiB", ha="left", va="center", weight="bold")
    axes.set_yticks(range(4), [f"zero: {level}" for level in (3, 2, 1, 0)])
    axes.set_xlabel("GiB on each of 8 data ranks, llama3-8b in bf16, full recompute")
    axes.set_xlim(0, 155)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def tensor(path: Path) -> None:
    """The two products of a feed-forward layer on two ranks."""
    axes = _canvas((9.2, 3.9))
    _box(axes, 0.1, 1.2, 1.0, 1.6, PALE_GREY, "input\n$T \\times h$")
    for rank, (bottom, colour) in enumerate(((2.15, BLUE), (0.25, ORANGE))):
        _box(axes, 2.1, bottom, 1.3, 1.6, colour, f"columns of\ngate, up\nrank {rank}")
        _box(axes, 4.1, bottom, 1.0, 1.6, colour, "$T \\times f/2$")
        _box(axes, 5.8, bottom + 0.3, 1.3, 1.0, colour, f"rows of\ndown, rank {rank}")
        _box(axes, 7.8, bottom, 1.0, 1.6, colour, "partial\nsum")
        _arrow(axes, (1.15, 2.0), (2.05, bottom + 0.8))
        for start, end in ((3.45, 4.05), (5.15, 5.75), (7.15, 7.75)):
            _arrow(axes, (start, bottom + 0.8), (end, bottom + 0.8))
        _arrow(axes, (8.85, bottom + 0.8), (9.45, 2.0))
    _box(axes, 9.5, 1.2, 1.0, 1.6, PALE_GREY, "output\n$T \\times h$")
    axes.text(1.55, 3.9, "all-gather", color=INK, ha="center")
    axes.text(9.2, 3.9, "reduce-scatter", color=INK, ha="center")
    axes.set_xlim(0, 10.6)
    axes.set_ylim(0, 4.15)
    axes.figure.savefig(path, metadata={"Date": None})


def sequence(path: Path) -> None:
    """Activations of a rank by kind, without and with sequence parallel."""
    kinds = {"residual": BLUE, "norm": GREEN, "attention": ORANGE, "feed_forward": PINK}
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots()
    for place, word in enumerate(("true", "false")):
        sizes = memory("parallel.tensor=8", f"parallel.sequence={word}")["activations"]
        left = 0.0
        for kind, colour in kinds.items():
            size = sizes[kind] / GIB
            label = kind.replace("_", " ") if not place else None
            axes.barh(place, size, left=left, color=colour, label=label)
            if size > 0.4:
                axes.text(left + size / 2, place, f"{size:.1f}", ha="center", va="center")
            left += size
        axes.text(left + 0.15, place, f"{left:.1f} GiB", ha="left", va="center", weight="bold")
    axes.set_yticks(range(2), ["sequence: true", "sequence: false"])
    axes.set_xlabel("GiB of activations on each of 8 tensor ranks, llama3-8b in bf16, 8,192 tokens")
    axes.set_xlim(0, 13)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def expert(path: Path) -> None:
    """Tokens of two ranks on their way to the experts and back."""
    axes = _canvas((9.2, 3.6))
    routes = ((0, 0, 2), (0, 1, 1), (0, 2, 0), (1, 0, 3), (1, 1, 2), (1, 2, 0))
    for rank, (bottom, colour) in enumerate(((1.95, BLUE), (0.15, ORANGE))):
        axes.text(0.0, bottom + 0.75, f"rank {rank}", color=INK, va="center", ha="right")
        for token in range(3):
            height = bottom + 1.1 - 0.5 * token
            _box(axes, 0.2, height, 1.1, 0.4, colour, f"token {3 * rank + token}")
            _box(axes, 8.3, height, 1.1, 0.4, colour, f"token {3 * rank + token}")
        for number in range(2):
            _box(axes, 4.0, bottom + 0.85 - 0.75 * number, 1.7, 0.62, colour, f"expert {2 * rank + number}")
    for rank, token, number in routes:
        height = (1.95, 0.15)[rank] + 1.3 - 0.5 * token
        owner = (1.95, 0.15)[number // 2] + 1.16 - 0.75 * (number % 2)
        colour = "#3c8dc5" if rank == 0 else "#d08a1d"
        _arrow(axes, (1.35, height), (3.95, owner), colour)
        _arrow(axes, (5.75, owner), (8.25, height), colour)
    axes.text(2.6, 3.62, "all-to-all", color=INK, ha="center")
    axes.text(7.0, 3.62, "all-to-all", color=INK, ha="center")
    axes.set_xlim(-0.8, 9.6)
    axes.set_ylim(0, 3.9)
    axes.figure.savefig(path, metadata={"Date": None})


def _canvas(size: tuple[float, float]) -> Axes:
    axes = Figure(figsize=size, layout="constrained").subplots()
    axes.set_axis_off()
    return axes


def _box(axes: Axes, left: float, bottom: float, width: float, height: float, colour: str, text: str) -> None:
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor=colour, edgecolor="white"))
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour))


PICTURES: dict[str, Callable[[Path], None]] = {
    "axes-layout.svg": layout,
    "axis-context.svg": context,
    "axis-data.svg": zero,
    "axis-expert.svg": expert,
    "axis-pipeline.svg": pipeline,
    "axis-sequence.svg": sequence,
    "axis-tensor.svg": tensor,
    "six-axes-layout.svg": six_axes,
}
"""What is drawn, and by what."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw(IMAGES / name)
        print(f"wrote {IMAGES / name}")
