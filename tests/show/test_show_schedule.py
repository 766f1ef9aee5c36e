"""``hexad show schedule``: its JSON, its files, its pictures, its lines in the terminal, its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hexad.cli.show import show
from hexad.parallel.pipeline.schedule import Schedule, read_schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.simulate import Costs, simulate
from hexad.parallel.pipeline.validate import validate
from hexad.show.schedule import (
    MOST_ROWS,
    Chart,
    colours,
    read_timeline,
    rows,
    schedule_text,
    simulated,
    ticks,
)
from hexad.show.schedule_figure import MOST_DRAWN, schedule_figure

from .common import label_boxes, paths_of, png_size, refusal

NAMES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]


def run(*arguments: str | Path, columns: int = 120) -> Result:
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return CliRunner(env=environment).invoke(show, ["schedule", *map(str, arguments)])


def document_of(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exception is None, result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def error_of(*arguments: str | Path) -> str:
    return refusal(run(*arguments))


def schedule_of(name: str, pipeline: int = 4, microbatches: int = 8, virtual_stages: int = 1) -> Schedule:
    virtual_stages = 2 if name == "interleaved" and virtual_stages == 1 else virtual_stages
    return build_schedule(name, pipeline, microbatches, virtual_stages)


def chart_of(name: str, pipeline: int = 4, microbatches: int = 8, virtual_stages: int = 1) -> Chart:
    schedule = schedule_of(name, pipeline, microbatches, virtual_stages)
    return simulated(schedule, Costs.uniform(schedule.stages, schedule.stages // pipeline))


# JSON and files


@pytest.mark.parametrize("name", NAMES)
def test_json_is_the_simulated_schedule(name: str) -> None:
    document = document_of("--pipeline", "4", "--microbatches", "8", "--schedule", name)
    schedule = schedule_of(name)
    timeline = simulate(schedule, Costs.uniform(schedule.stages, schedule.stages // 4))
    report = validate(schedule)
    assert list(document) == [
        "name",
        "microbatches",
        "placement",
        "ranks",
        "bubble",
        "makespan",
        "peak_activations",
        "buffers",
    ]
    assert document["name"] == name and document["placement"] == list(schedule.placement)
    assert document["bubble"] == pytest.approx(timeline.bubble, abs=1e-12)
    assert document["makespan"] == pytest.approx(timeline.makespan)
    assert document["peak_activations"] == list(report.peak_activations)
    assert document["buffers"] == report.buffers
    for rank, entries in enumerate(document["ranks"]):
        assert [(e["kind"], e["stage"], e["microbatch"]) for e in entries] == list(schedule.ranks[rank])
        assert [(e["start"], e["end"]) for e in entries] == list(timeline.times[rank])
        assert all(first["end"] <= second["start"] + 1e-12 for first, second in pairwise(entries))


def test_costs_are_of_a_ranks_whole_share() -> None:
    """One rank's work takes the same time, in however many stages it is done."""
    common = ("--pipeline", "4", "--microbatches", "8", "--costs", "2,3,4,0")
    for name in NAMES:
        document = document_of(*common, "--schedule", name)
        for entries in document["ranks"]:
            assert sum(e["end"] - e["start"] for e in entries) == pytest.approx(8 * (2 + 3 + 4))
    plain = document_of("--pipeline", "2", "--microbatches", "1", "--costs", "1,1,1,0")
    waiting = document_of("--pipeline", "2", "--microbatches", "1", "--costs", "1,1,1,5")
    assert waiting["makespan"] == plain["makespan"] + 2 * 5
    assert document_of("--costs", "1,2,3")["makespan"] == document_of("--costs", "1,2,3,0")["makespan"]


def test_a_saved_schedule_is_read_and_drawn(tmp_path: Path) -> None:
    saved, printed = tmp_path / "saved.json", tmp_path / "printed.json"
    result = run("--schedule", "zb_v", "--pipeline", "3", "--microbatches", "7", "--save", saved)
    assert result.exception is None and result.stdout == "" and str(saved) in result.stderr
    assert read_schedule(saved) == schedule_of("zb_v", 3, 7)
    document = document_of("--schedule", "zb_v", "--pipeline", "3", "--microbatches", "7")
    printed.write_text(json.dumps(document))
    assert read_schedule(printed) == schedule_of("zb_v", 3, 7)
    assert document_of("--file", saved) == document_of("--file", printed) == document


def test_a_schedule_of_ones_own_is_validated(tmp_path: Path) -> None:
    document = document_of("--pipeline", "2", "--microbatches", "2")
    del document["ranks"][1][0]
    file = tmp_path / "own.json"
    file.write_text(json.dumps(document))
    assert "F of stage 1, microbatch 0" in error_of("--file", file)


def test_auto_keeps_to_its_memory() -> None:
    document = document_of("--schedule", "auto", "--pipeline", "2", "--microbatches", "6", "--memory", "2")
    each = len(document["placement"]) // 2
    assert max(document["peak_activations"]) <= 2 * each


# Runs


def test_a_configuration_settles_the_schedule(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {vocab: 512, layers: 8}\n"
        "batch: {micro: 2, global: 16}\n"
        "parallel: {pipeline: 2, schedule: interleaved, virtual_stages: 2, data: 2}\n"
    )
    document = document_of(file)
    assert (document["name"], document["microbatches"]) == ("interleaved", 4)
    assert document["placement"] == [0, 1, 0, 1]
    document = document_of(file, "parallel.data=auto", "parallel.schedule=zb_v")
    assert (document["name"], document["microbatches"]) == ("zb_v", 8)
    assert "found 3, but" in error_of(file, "--pipeline", "3")
    assert "parallel.pipeline=..." in error_of(file, "--pipeline", "3")
    assert error_of(file, "batch.global=18").startswith("batch.global: found 18, expected a multiple of")
    assert error_of(file, "parallel.pipeline=9").startswith("parallel.pipeline: found 18 stages")
    assert "arithmetic" in run(file).stdout
    assert "F 2, B 2, W 2" in run(file, "--costs", "2,2,2").stdout


def timeline(change: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """What a trainer writes; measured times begin anywhere."""
    schedule = schedule_of("zb_h1", 2, 4)
    planned = simulate(schedule, Costs.uniform(2, 1, 0.01, 0.01, 0.01)).as_tree()
    measured = simulate(schedule, Costs((0.012, 0.011), (0.014, 0.013), (0.012, 0.011), 0.002)).as_tree()
    for entries in measured["ranks"]:
        for entry in entries:
            entry["start"] += 777.0
            entry["end"] += 777.0
    tree = {"step": 30, "planned": planned, "measured": measured}
    if change:
        change(tree)
    return tree


def test_a_run_is_drawn_as_planned_and_as_measured(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(json.dumps(timeline()))
    text = run(tmp_path).stdout
    assert "step 30" in text and "planned: bubble" in text and "measured: bubble" in text
    makespans = [float(found) for found in re.findall(r"makespan (\S+) s", text)]
    assert makespans == pytest.approx([tree["makespan"] for tree in list(timeline().values())[1:]], rel=1e-3)
    document = document_of(tmp_path)
    assert document["step"] == 30
    assert document["measured"]["ranks"][0][0]["start"] == 0.0
    assert run(tmp_path, "--output", tmp_path / "both.png").exit_code == 0
    assert "settles it" in error_of(tmp_path, "--costs", "1,1,1")
    assert "settles it" in error_of(tmp_path, "--schedule", "1f1b")
    assert "as it is" in error_of(tmp_path, "parallel.pipeline=2")


def test_a_timeline_needs_only_actions_and_times(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"

    def shorten(tree: dict[str, Any]) -> None:
        for name in ("bubble", "makespan", "peak_activations", "buffers"):
            del tree["measured"][name]

    file.write_text(json.dumps(timeline(shorten)))
    _, (_, measured) = read_timeline(file)
    whole = timeline()["measured"]
    assert measured.timeline.bubble == pytest.approx(whole["bubble"])
    assert measured.timeline.makespan == pytest.approx(whole["makespan"])
    assert list(measured.peak_activations) == whole["peak_activations"]


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.pop("step"),
        lambda tree: [tree.pop("planned"), tree.pop("measured")],
        lambda tree: tree["measured"].pop("ranks"),
        lambda tree: tree["measured"]["ranks"][0][0].pop("start"),
        lambda tree: tree["measured"]["ranks"][0].pop(),
        lambda tree: tree["measured"]["ranks"][0][0].update(start=float("nan")),
        lambda tree: tree["measured"]["ranks"][0][0].update(stage=7),
        lambda tree: tree.update(planned=[]),
    ],
)
def test_a_damaged_timeline_is_one_line(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    (tmp_path / "timeline.json").write_text(json.dumps(timeline(change)))
    assert "not a timeline" in error_of(tmp_path)


def test_a_run_without_a_timeline_is_drawn_as_configured(tmp_path: Path) -> None:
    assert "neither timeline.json nor config.yaml" in error_of(tmp_path)
    (tmp_path / "config.yaml").write_text("parallel: {pipeline: 2}\n")
    assert "as configured" in run(tmp_path).stdout
    (tmp_path / "timeline.json").write_text("{")
    assert "cannot be read as a timeline" in error_of(tmp_path)


# Pictures


@pytest.mark.parametrize("ending", [".png", ".svg", ".html"])
def test_pictures_are_written(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"schedule{ending}"
    result = run("--schedule", "zb_v", "--output", file)
    assert result.exit_code == 0 and result.stdout == "" and str(file) in result.stderr
    if ending == ".png":
        width, height = png_size(file)
        assert width > 1000 and height > 400
        return
    text = file.read_text()
    assert paths_of(text) > 4 * 2 * 3 * 8
    assert ("<title>ZB-V: 4 ranks with 2 stages each, 8 microbatches</title>" in text) == (ending == ".html")


def numbers_in(figure: Any) -> list[Any]:
    (axes,) = figure.axes
    return [text for text in axes.texts if text.get_text().isdigit() and text.get_va() == "center_baseline"]


def boxes_in(figure: Any) -> int:
    (axes,) = figure.axes
    return sum(len(collection.get_paths()) for collection in axes.collections)


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_a_box_with_its_number(name: str) -> None:
    chart = chart_of(name)
    figure = schedule_figure([chart])
    actions = sum(map(len, chart.schedule.ranks))
    assert boxes_in(figure) == actions
    numbers = [text for text in numbers_in(figure) if text.get_ha() == "center"]
    assert len(numbers) == actions
    assert all(text.get_fontsize() >= 4.5 for text in numbers)
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert f"bubble {chart.timeline.bubble:.1%}, makespan {chart.timeline.makespan:.4g}" in words
    peaks = [text.get_text() for text in numbers_in(figure) if text.get_ha() == "right"]
    assert peaks == [str(peak) for peak in chart.peak_activations]
    assert "drawn:" not in words


@pytest.mark.parametrize(
    ("name", "pipeline", "microbatches"), [("zb_v", 4, 8), ("dualpipe_v", 16, 32), ("1f1b", 1, 1)]
)
def test_labels_neither_overlap_nor_leave_the_picture(name: str, pipeline: int, microbatches: int) -> None:
    chart = chart_of(name, pipeline, microbatches)
    figure = schedule_figure([chart, chart])
    boxes = label_boxes(figure)
    assert all(left >= 0 and bottom >= 0 for left, bottom, _, _ in boxes)
    assert all(right <= figure.bbox.width and top <= figure.bbox.height for _, _, right, top in boxes)


def test_large_schedules_are_abbreviated_and_say_so() -> None:
    start = perf_counter()
    chart = chart_of("1f1b", 64, 1024)
    figure = schedule_figure([chart])
    assert perf_counter() - start < 20  # about 2 on one quiet core
    assert MOST_DRAWN / 2 < boxes_in(figure) < 1.1 * MOST_DRAWN
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert f"drawn: {MOST_ROWS} of 64 ranks; the first and the last" in words and "..." in words
    assert "rank 0 " in words and "rank 63 " in words
    medium = schedule_figure([chart_of("zb_v", 16, 64)])
    assert boxes_in(medium) == 16 * 2 * 3 * 64
    assert not [text for text in numbers_in(medium) if text.get_ha() == "center"]


def test_two_charts_have_one_time_axis() -> None:
    fast, slow = chart_of("1f1b"), simulated(schedule_of("1f1b"), Costs.uniform(4, 1, 2.0, 2.0, 2.0))
    figure = schedule_figure([fast, slow])
    (axes,) = figure.axes
    ends = [
        max(x for path in collection.get_paths() for x, _ in path.vertices) for collection in axes.collections
    ]
    left = min(x for path in axes.collections[0].get_paths() for x, _ in path.vertices)
    assert (ends[1] - left) == pytest.approx(2 * (ends[0] - left))


def test_the_same_schedule_gives_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        run("--schedule", "zb_h2", "--output", file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_kinds_and_stages_differ_in_lightness_too() -> None:
    """In grey, the two stages of a rank are apart, and so is text from its box."""

    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    for kind in ("F", "B", "W", "BW"):
        for turns in (1, 2, 4):
            for turn in range(turns):
                assert contrast(*colours(kind, turn, turns)) >= 4
        assert contrast(colours(kind, 0, 2)[0], colours(kind, 1, 2)[0]) > 1.5


# Terminal


def test_the_terminal_shows_every_action_in_its_place() -> None:
    lines = run(
        "--schedule", "zb_h1", "--pipeline", "2", "--microbatches", "3", columns=80
    ).stdout.splitlines()
    assert lines[0] == "ZB-H1: 2 ranks, 3 microbatches"
    first = next(line for line in lines if line.startswith("0 F"))
    document = document_of("--schedule", "zb_h1", "--pipeline", "2", "--microbatches", "3")
    for entry in document["ranks"][0]:
        place = 2 + 2 * round(entry["start"])
        assert first[place : place + 2] == f"{entry['kind']}{entry['microbatch']}"
    assert first.split()[-1] == str(document["peak_activations"][0])
    assert any(line.startswith("bubble") and "makespan" in line for line in lines)


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
@pytest.mark.parametrize(
    ("name", "pipeline", "microbatches"), [("zb_v", 4, 8), ("1f1b", 64, 128), ("gpipe", 1, 1)]
)
def test_the_terminal_is_never_too_narrow(name: str, pipeline: int, microbatches: int, columns: int) -> None:
    from rich.console import Console

    chart = chart_of(name, pipeline, microbatches)
    console = Console(width=columns, record=True, file=StringIO(), color_system="truecolor")
    console.print(schedule_text([chart], columns))
    text = console.export_text()
    assert all(len(line) <= columns for line in text.splitlines())
    bars = [line for line in text.splitlines() if re.match(r"\d+ +[FBWfbw·]", line)]
    assert len(bars) == min(pipeline, MOST_ROWS)
    assert len({len(line) for line in bars}) == 1
    cut = " ".join(text.split())
    assert ("of 64 ranks" in cut) == (pipeline == 64)
    assert ("time 0 to" in cut) == (pipeline == 64 or (columns == 40 and name == "zb_v"))


def test_second_stages_are_lower_case() -> None:
    text = run("--schedule", "zb_v", "--pipeline", "2", "--microbatches", "4").stdout
    assert "lower case, dark: a rank's second stage" in text and "f0b0w0" in text and "F0" in text


# Smaller things


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 33, 8) == [0, 5, 10, 15, 20, 25, 30]
    assert ticks(3000, 3104, 5) == [3000, 3050, 3100]
    assert ticks(0.0, 0.31, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert ticks(1.0, 1.0, 4) == [1.0]


def test_rows_keep_the_first_and_the_last_rank() -> None:
    assert rows(5) == [0, 1, 2, 3, 4]
    many = rows(1000)
    assert len(set(many)) == MOST_ROWS and many[0] == 0 and many[-1] == 999 and many == sorted(many)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert error_of("--pipeline", "0") == "--pipeline: found 0, expected a whole number from 1"
    assert error_of("--microbatches", "-1").startswith("--microbatches: found -1")
    assert error_of("--virtual-stages", "0").startswith("--virtual-stages: found 0")
    assert "did you mean 'zb_v'" in error_of("--schedule", "zb_w")
    assert error_of("--schedule", "1f1b", "--virtual-stages", "2").startswith(
        "--virtual-stages: 1f1b has one stage"
    )
    assert "interleaved" in error_of("--schedule", "1f1b", "--group", "2")
    for costs in ("1,1", "1,1,1,1,1", "a,b,c", "", "1;1;1"):
        assert error_of("--costs", costs) == f"--costs: found '{costs}', expected F,B,W,P2P such as 1,1,1,0.1"
    for costs in ("1,1,-1", "1,1,1,-0.5", "nan,1,1", "inf,1,1", "0,0,0,1"):
        assert error_of("--costs", costs).startswith(f"--costs: found '{costs}', expected times from 0")
    assert error_of("--memory", "2").startswith("--memory: found 2, but 1f1b")
    assert error_of("--schedule", "auto", "--memory", "0") == "--memory: found 0, expected more than 0"
    assert "no such configuration file" in error_of(tmp_path / "none.yaml")
    assert "give one" in error_of("a.yaml", "b.yaml")
    assert "cannot be read as a schedule" in error_of("--file", tmp_path / "none.json")
    assert "give one of them" in error_of("--file", "x.json", "run.yaml")
    assert "settles it" in error_of("--file", "x.json", "--pipeline", "2")
    assert "cannot be written" in error_of("--save", tmp_path / "none" / "a.json")
    assert "use one of .png, .svg, .html" in error_of("--output", tmp_path / "a.pdf")


@pytest.mark.parametrize("arguments", [["--json"], [], ["--json", "parallel.pipeline=2"]])
def test_starts_without_torch_and_matplotlib(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from hexad.cli.show import show\n"
        f"show(['schedule', *{arguments}], standalone_mode=False)\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'rich' not in sys.modules or '--json' not in sys.argv\n"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
