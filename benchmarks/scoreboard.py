"""Write the page of predictions beside published measurements, docs/scoreboard.md, with its chart.

python -m benchmarks.scoreboard FILE.jsonl...
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from pathlib import Path
from typing import Any

from hexad.planning.published import system_of
from hexad.planning.validation import Compared, Errors, PredictionErrors, compare, read_rows

DOCS = Path(__file__).parents[1] / "docs"
PAGE, CHART = DOCS / "scoreboard.md", DOCS / "images" / "scoreboard.svg"
BEGIN = "<!-- Written by benchmarks/scoreboard.py. -->"
"""What follows this line on the page is generated."""
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#e377c2", "#7f7f7f")
WIDTH, HEIGHT, LEFT, TOP = 760, 620, 70, 20
"""Of the chart, in pixels."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of Markdown; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(['---', *['--:'] * (len(header) - 1)])}|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def percentages(errors: Errors) -> tuple[str, ...]:
    """Rows, MAPE, bias and worst error."""
    tree = errors.as_tree()
    if not tree["covered"]:
        return "", "", "", ""
    return (
        str(tree["covered"]),
        f"{tree['mape']:.1%}",
        f"{tree['bias']:+.1%}",
        f"{tree['worst']:+.1%}",
    )


def by_source(rows: Sequence[Compared]) -> list[str]:
    """The errors of every source."""
    scores: dict[str, PredictionErrors] = defaultdict(PredictionErrors)
    for row in rows:
        scores[row.source].add(row)
        scores["all"].add(row)
    order = sorted(scores, key=lambda source: (source == "all", source.lower()))
    header = "source", "rows", *("time", "MAPE", "bias", "worst"), *("memory", "MAPE", "bias", "worst"), "OOM"
    lines = []
    for source in order:
        score = scores[source]
        oom = f"{sum(score.oom)} of {len(score.oom)}" if score.oom else ""
        lines.append(
            (source, str(score.rows), *percentages(score.time), *percentages(score.memory), oom),
        )
    return table(header, lines)


def uncovered(rows: Sequence[Compared]) -> list[str]:
    """Why rows are not covered."""
    reasons = Counter((row.source, reason) for row in rows for reason in row.reasons)
    return table(
        ("source", "rows", "reason"),
        ((source, str(count), reason) for (source, reason), count in sorted(reasons.items())),
    )


def layout(row: Mapping[str, Any]) -> str:
    """The layout in short."""
    names = (("t", "tp"), ("c", "cp"), ("p", "pp"), ("v", "vp"), ("e", "ep"), ("d", "dp"))
    return " ".join(f"{short}{row[name]}" for short, name in names if row.get(name) not in (None, 1, "1"))


def figures(pair: tuple[float, float] | None, unit: float) -> tuple[str, str, str]:
    """Measured, predicted, and the error."""
    if pair is None:
        return "", "", ""
    predicted, measured = pair
    return f"{measured / unit:.4g}", f"{predicted / unit:.4g}", f"{predicted / measured - 1:+.1%}"


def every_row(rows: Sequence[Compared]) -> list[str]:
    """All rows that are covered, source by source."""
    sources = defaultdict(list)
    for row in rows:
        if row.seconds is not None or row.memory is not None or row.oom is not None:
            sources[row.source].append(row)
    lines: list[str] = []
    header = ("row", "GPU", "GPUs", "layout", "micro", "step s", "predicted", "error")
    header = (*header, "peak GB", "predicted", "error")
    for source in sorted(sources, key=str.lower):
        body = []
        for compared in sources[source]:
            row = compared.row
            memory = figures(compared.memory, 1e9)
            if compared.oom is not None:
                memory = "out of memory", "does not fit" if compared.oom else "fits", ""
            name, gpu = str(row.get("id")), str(row.get("gpu")).split(" (")[0]
            shape = (name, gpu, str(row.get("n_gpus")), layout(row), str(row.get("micro_batch", "")))
            body.append((*shape, *figures(compared.seconds, 1.0), *memory))
        lines += ["", f"### {source}", "", *table(header, body)]
    return lines


def chart(rows: Sequence[Compared]) -> str:
    """Predicted over measured step time against the measured one, a colour for each system."""
    points = [
        (row.seconds[1], row.seconds[0] / row.seconds[1], system_of(row.row))
        for row in rows
        if row.seconds is not None
    ]
    systems = [name for name, _ in Counter(point[2] for point in points).most_common()]
    low, high = (f(log10(min(p[0] for p in points))) for f in (floor, floor))
    high = floor(log10(max(p[0] for p in points))) + 1

    def x(seconds: float) -> float:
        return LEFT + (log10(seconds) - low) / (high - low) * (WIDTH - LEFT - 20)

    def y(ratio: float) -> float:  # 0.25 to 4, logarithmic
        limited = min(4.0, max(0.25, ratio))
        return TOP + (log10(4) - log10(limited)) / (2 * log10(4)) * (HEIGHT - TOP - 110)

    text = 'font-family="sans-serif" font-size="12" fill="#333"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<rect x="{LEFT}" y="{y(1.1):.1f}" width="{WIDTH - LEFT - 20}" '
        f'height="{y(1 / 1.1) - y(1.1):.1f}" fill="#e8f0e8"/>',
    ]
    for ratio in (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 4.0):
        line = "#888" if ratio == 1 else "#ddd"
        parts.append(f'<path d="M{LEFT} {y(ratio):.1f}H{WIDTH - 20}" stroke="{line}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end" {text}>{ratio:g}</text>')
    bottom = y(0.25)
    for power in range(low, high + 1):
        parts.append(f'<path d="M{x(10**power):.1f} {TOP}V{bottom:.1f}" stroke="#ddd"/>')
        label = f"{10**power:g} s"
        parts.append(
            f'<text x="{x(10**power):.1f}" y="{bottom + 18:.1f}" text-anchor="middle" {text}>{label}</text>'
        )
    for seconds, ratio, name in points:
        colour = COLOURS[systems.index(name) % len(COLOURS)]
        parts.append(
            f'<circle cx="{x(seconds):.1f}" cy="{y(ratio):.1f}" r="3" fill="{colour}" fill-opacity="0.55"/>'
        )
    middle = (LEFT + WIDTH - 20) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{bottom + 38:.1f}" text-anchor="middle" {text}>measured step time</text>'
    )
    parts.append(
        f'<text transform="translate(18 {(TOP + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle" {text}>'
        "predicted / measured (shaded: within 10 %)</text>"
    )
    for number, name in enumerate(systems):
        left, top = LEFT + number % 5 * 135, bottom + 58 + number // 5 * 18
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<circle cx="{left}" cy="{top - 4:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 9}" y="{top:.1f}" {text}>{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Predict all rows; write the page and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl", help="measurements")
    options = parser.parse_args()
    rows = [compare(row) for file in options.files for row in read_rows(file)]
    kept = PAGE.read_text(encoding="utf-8").split(BEGIN)[0]
    lines = [
        *(BEGIN, "", "## Errors by source", "", *by_source(rows)),
        *("", "## Rows that are not covered", "", *uncovered(rows)),
        *("", "## Every row", "", "Layouts: tensor, context, pipeline, virtual stages, expert, data."),
        *every_row(rows),
    ]
    PAGE.write_text(kept + "\n".join(lines) + "\n", encoding="utf-8")
    CHART.write_text(chart(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
