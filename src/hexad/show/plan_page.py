"""A plan as one page: the best layouts, and of one of them memory, the step in time, ranks, and MFU."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from hexad.planning.memory import per_pipeline_rank
from hexad.planning.plan import Plan
from hexad.planning.search import Candidate

from .figure import GREY, PALE_GREY, PALETTE, styled, svg_text, tip, tip_bars
from .layout import layout_figure
from .memory import Device, memory_figure, memory_title
from .plan import layout_name, misfit
from .schedule import Chart, schedule_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB = 2**30
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
       color: #1d2433 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #e6e8ed; white-space: nowrap }
th:last-child, td:last-child { text-align: left; white-space: normal; overflow-wrap: anywhere }
figure { margin: 1em 0; overflow-x: auto } svg { max-width: 100%; height: auto }
p { color: #475467 }
"""


def plan_page(plan: Plan, candidate: Candidate) -> str:
    """A self-contained HTML document."""
    config = plan.config
    title = f"{memory_title(candidate.resolved)} on {plan.cluster.cluster.gpus:,} x {plan.cluster.name}"
    words = (
        f"Sequences of {config.data.sequence:,} tokens, {config.batch.global_:,} a step. "
        f"{candidate.step.total:.3f} s a step, {plan.rate(candidate):,.0f} tokens per second and GPU, "
        f"MFU {plan.mfu(candidate):.3f}. {plan.convention}."
    )
    words = ". ".join([*(f"It {line}" for line in misfit(plan, candidate)), words])
    ranks = per_pipeline_rank(candidate.resolved)
    device = Device(plan.cluster.name, plan.cluster.capacity, plan.cluster.gpu)
    memory = memory_figure(ranks, memory_title(candidate.resolved), device)
    chart = Chart(candidate.step.timeline, "predicted", "s")
    sections = [
        ("Layouts", _table(plan)),
        ("Memory against speed", _svg(tradeoff_figure(plan, candidate))),
        ("Where the step goes", _svg(waterfall_figure(plan, candidate))),
        ("Memory of each pipeline rank", _svg(memory)),
        ("The step in time", _svg(schedule_figure([chart]))),
        ("Ranks", _svg(layout_figure(candidate.resolved.layout))),
    ]
    body = "\n".join(f"<h2>{escape(name)}</h2>\n{content}" for name, content in sections)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n<p>{escape(words)}</p>\n{body}\n"
        "</body></html>\n"
    )


def _svg(figure: Figure) -> str:
    text = svg_text(figure)
    return f"<figure>{text[text.index('<svg') :]}</figure>"


def _table(plan: Plan) -> str:
    headings = ("step s", "tokens/s/GPU", "MFU", "tensors GiB", "GPU GiB", "bubble", "layout")
    rows = [
        (
            f"{layout.step.total:.3f}",
            f"{plan.rate(layout):,.0f}",
            f"{plan.mfu(layout):.3f}",
            f"{layout.memory.total / _GIB:.1f}",
            f"{layout.device.total / _GIB:.1f}",
            f"{layout.step.timeline.bubble:.1%}",
            layout_name(plan, layout),
        )
        for layout in plan.layouts
    ]
    # Lines of a layout break between its settings. The comma of a number lies in cells that do not break.
    lines = ["".join(f"<td>{escape(cell).replace(',', ',<wbr>')}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


@styled
def tradeoff_figure(plan: Plan, candidate: Candidate) -> Figure:
    """Memory against speed of all layouts that the search looked at; details under the pointer."""
    from matplotlib.figure import Figure

    figure = Figure((10.0, 4.4), layout="constrained", label="Memory against speed")
    axes = figure.subplots()
    axes.grid(color=PALE_GREY)
    axes.set_axisbelow(True)
    tokens, gpus = candidate.job.tokens, plan.cluster.cluster.gpus
    capacity = plan.cluster.capacity / _GIB
    kinds = (
        (False, PALE_GREY, "lower bounds: slower layouts, not predicted further"),
        (True, PALETTE[0], "predicted"),
    )
    highest = 0.0
    for exact, colour, label in kinds:
        points = [point for point in plan.points if point.exact == exact]
        rates = [tokens / point.seconds / gpus for point in points]
        sizes = [point.nbytes / _GIB for point in points]
        axes.scatter(sizes, rates, s=18, color=colour, label=label, edgecolors=GREY, linewidths=0.3)
        highest = max([highest, *rates])
    best = candidate.device.total / _GIB, plan.rate(candidate)
    axes.scatter([best[0]], [best[1]], s=60, color=PALETTE[5], label="this layout", zorder=3)
    axes.axvline(capacity, color="#c1121f", linestyle="--", linewidth=1.2, label=f"{plan.cluster.name}")
    axes.set_ylim(0, 1.08 * max(highest, best[1]))
    axes.set_xlim(left=0)
    width, height = 0.006 * axes.get_xlim()[1], 0.012 * axes.get_ylim()[1]
    for point in plan.points:
        size, rate = point.nbytes / _GIB, tokens / point.seconds / gpus
        text = f"{point.layout}: {point.seconds:.3f} s, {rate:,.0f} tokens/s/GPU, {size:.1f} GiB"
        tip(axes, size - width, size + width, rate - height, rate + height, text)
    axes.set_xlabel("GiB of a GPU's memory")
    axes.set_ylabel("tokens per second and GPU")
    axes.legend(frameon=False, loc="lower left")
    return figure


@styled
def waterfall_figure(plan: Plan, candidate: Candidate) -> Figure:
    """The share of the peak that each cause costs, from 100 % down to MFU."""
    from matplotlib.figure import Figure

    seconds = dict(plan.breakdown(candidate).seconds)
    mfu = seconds.pop("model FLOPs at the peak") / candidate.step.total
    shares = [(name, value / candidate.step.total) for name, value in seconds.items()]
    shares = sorted((share for share in shares if abs(share[1]) >= 5e-4), key=lambda share: -share[1])
    figure = Figure((10.0, 1.2 + 0.32 * (len(shares) + 1)), layout="constrained", label="Where the step goes")
    axes = figure.subplots()
    axes.grid(axis="x", color=PALE_GREY)
    axes.set_axisbelow(True)
    right, names = 1.0, []
    for place, (name, share) in enumerate(shares):
        bars = axes.barh([place], [share], left=[right - share], color=PALETTE[1])
        tip_bars(bars, [f"{name}: {share:.1%} of the step, {share * candidate.step.total:.3f} s"])
        axes.text(right + 0.005, place, f"{share:.1%}", va="center")
        right -= share
        names.append(name)
    bars = axes.barh([len(shares)], [mfu], color=PALETTE[2])
    tip_bars(bars, [f"MFU {mfu:.1%}"])
    axes.text(mfu + 0.005, len(shares), f"MFU {mfu:.1%}", va="center", weight="bold")
    axes.set_yticks(range(len(shares) + 1), [*names, "model FLOPs at the peak"])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the step")
    return figure
