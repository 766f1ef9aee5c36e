"""The picture of ``overlap.py``: a step's seconds by stage, before and after."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COMPUTE, HIDDEN, EXPOSED = "#9db8cf", "#3f78a8", "#d9803f"
BARS = (("waiting", "waited for"), ("overlapped", "overlapped"))


def draw(results: dict[str, Any], path: Path) -> None:
    """Two bars per stage: computation, of it with communication under way, and exposed communication."""
    stages = results["stages"]
    plt.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(figsize=(1.8 + 1.7 * len(stages), 4.6), layout="constrained")
    ticks, labels = [], []
    for place, figures in enumerate(stages.values()):
        for side, (name, label) in zip((-0.21, 0.21), BARS):
            _bar(axes, place + side, figures, name)
            ticks.append(place + side)
            labels.append(label)
    axes.set_xticks(ticks, labels, fontsize=8, rotation=25, ha="right", rotation_mode="anchor")
    second = axes.secondary_xaxis(-0.14)
    second.set_xticks(range(len(stages)), [f"ZeRO {stage}" for stage in stages], fontweight="bold")
    second.tick_params(length=0)
    second.spines["bottom"].set_visible(False)
    tallest = max(figures["free"] + max(figures["exposed_waiting"], 0.0) for figures in stages.values())
    axes.set_ylim(0, tallest * 1.12)
    axes.set_ylabel("seconds per step")
    axes.spines[["top", "right"]].set_visible(False)
    speed = results["megabits"] / 1000
    axes.set_title(
        f"32M-parameter llama, data 2, {results['dtype']}, a link of {speed:g} Gbit/s", fontsize=10
    )
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (EXPOSED, HIDDEN, COMPUTE)]
    names = ["communication, exposed", "communication hidden behind compute", "compute"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bar(axes: Axes, x: float, figures: dict[str, Any], name: str) -> None:
    exposed = max(figures[f"exposed_{name}"], 0.0)
    compute = figures["free"]
    hidden = min(max(figures["alone"] - exposed, 0.0), compute)
    width = 0.36
    axes.bar(x, compute - hidden, width, color=COMPUTE)
    axes.bar(x, hidden, width, bottom=compute - hidden, color=HIDDEN)
    axes.bar(x, exposed, width, bottom=compute, color=EXPOSED)
    share = max(0.0, min(1.0, figures[f"hidden_{name}"]))
    axes.annotate(
        f"{share:.0%}\nhidden",
        (x, compute + exposed),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
    )
