"""``hexad show schedule``: its JSON, its files, its pictures, its rows in the terminal, its errors."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PolyCollection

from hexad.parallel.pipeline.schedule import Schedule, read_schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.simulate import Costs, simulate
from hexad.parallel.pipeline.validate import validate
from hexad.show.schedule import COLOURS, MOST_ACTIONS, MOST_RANKS, Chart, read_timeline, schedule_figure

from .common import document_of, error_of, labels_of, png_size, text_of

NAMES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]


def schedule_of(name: str, pipeline: int = 4, microbatches: int = 8) -> Schedule:
    return build_schedule(name, pipeline, microbatches, 2 if name == "interleaved" else 1)


def chart_of(name: str, pipeline: int = 4, microbatches: int = 8, **times: float) -> Chart:
    schedule = schedule_of(name, pipeline, microbatches)
    return Chart(simulate(schedule, Costs.uniform(schedule.stages, schedule.stages // pipeline, **times)))


# JSON and files


@pytest.mark.parametrize("name", NAMES)
def test_json_is_the_simulated_schedule(name: str) -> None:
    document = document_of("schedule", "--pipeline", "4", "--microbatches", "8", "--schedule", name)
    chart = chart_of(name)
    schedule, timeline, report = chart.timeline.schedule, chart.timeline, validate(chart.timeline.schedule)
    assert list(document) == [
        *("name", "microbatches", "placement", "ranks", "bubble", "makespan", "peak_activations", "buffers")
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


def test_costs_are_of_all_stages_of_a_rank() -> None:
    """One rank's work takes the same time, in however many stages it is done."""
    common = ("schedule", "--pipeline", "4", "--microbatches", "8", "--costs", "2,3,4,0")
    for name in NAMES:
        for entries in document_of(*common, "--schedule", name)["ranks"]:
            assert sum(e["end"] - e["start"] for e in entries) == pytest.approx(8 * (2 + 3 + 4))
    two = ("schedule", "--pipeline", "2", "--microbatches", "1", "--costs")
    plain, delayed = (document_of(*two, costs)["makespan"] for costs in ("1,1,1,0", "1,1,1,5"))
    assert delayed == plain + 2 * 5


def test_a_saved_schedule_is_read_and_drawn(tmp_path: Path) -> None:
    saved, printed = tmp_path / "saved.json", tmp_path / "printed.json"
    options = ("schedule", "--schedule", "zb_v", "--pipeline", "3", "--microbatches", "7")
    assert text_of(*options, "--save", saved) == ""
    document = document_of(*options)
    printed.write_text(json.dumps(document))
    assert read_schedule(saved) == read_schedule(printed) == schedule_of("zb_v", 3, 7)
    for file in (saved, printed):
        assert document_of("schedule", "--file", file) == document
    del document["ranks"][1][0]
    saved.write_text(json.dumps(document))
    assert "F of stage 1, microbatch 0" in error_of("schedule", "--file", saved)


def test_auto_keeps_to_its_memory() -> None:
    options = ("--schedule", "auto", "--pipeline", "2", "--microbatches", "6", "--memory", "2")
    document = document_of("schedule", *options)
    stages = len(document["placement"]) // 2
    assert max(document["peak_activations"]) <= 2 * stages


# Runs


def test_a_configuration_determines_the_schedule(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {vocab: 512, layers: 8}\n"
        "batch: {micro: 2, global: 16}\n"
        "parallel: {pipeline: 2, schedule: interleaved, virtual_stages: 2, data: 2}\n"
    )
    document = document_of("schedule", file)
    assert (document["name"], document["microbatches"]) == ("interleaved", 4)
    assert document["placement"] == [0, 1, 0, 1]
    document = document_of("schedule", file, "parallel.data=auto", "parallel.schedule=zb_v")
    assert (document["name"], document["microbatches"]) == ("zb_v", 8)
    assert error_of("schedule", file, "--pipeline", "3").startswith("--pipeline: found 3, but")
    assert error_of("schedule", file, "batch.global=18").startswith("batch.global: found 18, expected a mult")
    assert error_of("schedule", file, "parallel.pipeline=9").startswith("parallel.pipeline: found 18 stages")
    assert "FLOPs" in text_of("schedule", file)
    assert "F 2, B 2, W 2" in text_of("schedule", file, "--costs", "2,2,2,0")


def timeline(change: Callable[[dict[str, Any]], object] = lambda tree: None) -> str:
    """What a trainer writes; measured times begin anywhere."""
    schedule = schedule_of("zb_h1", 2, 4)
    planned = simulate(schedule, Costs.uniform(2, 1, 0.01, 0.01, 0.01)).as_tree()
    measured = simulate(schedule, Costs((0.012, 0.011), (0.014, 0.013), (0.012, 0.011), 0.002)).as_tree()
    for entries in measured["ranks"]:
        for entry in entries:
            entry["start"] += 777.0
            entry["end"] += 777.0
    tree = {"step": 30, "planned": planned, "measured": measured}
    change(tree)
    return json.dumps(tree)


def test_a_run_is_drawn_as_planned_and_as_measured(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(timeline())
    text = text_of("schedule", tmp_path)
    assert "step 30" in text and "planned: bubble" in text and "measured: bubble" in text
    makespans = [float(makespan) for makespan in re.findall(r"makespan (\S+) s", text)]
    tree = json.loads(timeline())
    assert makespans == pytest.approx([tree[name]["makespan"] for name in ("planned", "measured")], rel=1e-3)
    document = document_of("schedule", tmp_path)
    assert document["step"] == 30
    assert document["measured"]["ranks"][0][0]["start"] == 0.0
    assert "time, s" in labels_of("schedule", tmp_path, file=tmp_path / "both.svg")
    assert "leave it out" in error_of("schedule", tmp_path, "--costs", "1,1,1,0")
    assert "leave it out" in error_of("schedule", tmp_path, "--schedule", "1f1b")
    assert "found overrides" in error_of("schedule", tmp_path, "parallel.pipeline=2")


def test_a_timeline_needs_only_actions_and_times(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    names = ("bubble", "makespan", "peak_activations", "buffers")
    file.write_text(timeline(lambda tree: [tree["measured"].pop(name) for name in names]))
    _, (_, measured) = read_timeline(file)
    whole = json.loads(timeline())["measured"]
    assert measured.timeline.bubble == pytest.approx(whole["bubble"])
    assert measured.timeline.makespan == pytest.approx(whole["makespan"])
    assert list(measured.peak_activations) == whole["peak_activations"]


def test_a_damaged_timeline_is_one_line(tmp_path: Path) -> None:
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda tree: tree.pop("step"),
        lambda tree: tree.pop("planned"),
        lambda tree: tree["measured"].pop("ranks"),
        lambda tree: tree["measured"]["ranks"][0][0].pop("start"),
        lambda tree: tree["measured"]["ranks"][0].pop(),
        lambda tree: tree["measured"]["ranks"][0][0].update(start=float("nan")),
        lambda tree: tree["measured"]["ranks"][0][0].update(stage=7),
        lambda tree: tree["measured"]["ranks"][0][0].update(stage="0"),
        lambda tree: [e.update(start=5, end=5) for row in tree["planned"]["ranks"] for e in row],
        lambda tree: tree.update(planned=[]),
    ]
    for text in ("{", "[]", *map(timeline, changes)):
        (tmp_path / "timeline.json").write_text(text)
        assert "cannot be read as a timeline" in error_of("schedule", tmp_path)


def test_a_run_without_a_timeline_is_drawn_as_configured(tmp_path: Path) -> None:
    assert "neither timeline.json nor config.yaml" in error_of("schedule", tmp_path)
    (tmp_path / "config.yaml").write_text("parallel: {pipeline: 2}\n")
    assert "as configured" in text_of("schedule", tmp_path)


# Pictures


def test_pictures_are_written(tmp_path: Path) -> None:
    options = ("schedule", "--schedule", "zb_v")
    title = "zb_v: pipeline 4, stages 8, microbatches 8"
    for ending in (".svg", ".html"):
        labels = labels_of(*options, file=tmp_path / f"a{ending}")
        assert {title, "rank 3", "F, forward", "idle 0.0%, peak activations 8"} <= set(labels)
        assert "idle" not in labels  # in the legend: there is none
        assert sum(label.isdigit() for label in labels) >= 4 * 2 * 3 * 8
    page = (tmp_path / "a.html").read_text()
    assert f"<title>{title}</title>" in page
    assert page.count("<g><title>rank ") == 4 * 2 * 3 * 8
    assert "<title>rank 3: weight gradient of microbatch 7 in stage 3, 25 to 25.5</title>" in page
    assert "idle" in labels_of("schedule", file=tmp_path / "c.svg")
    labels_of(*options, file=tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    width, height = png_size(*options, file=tmp_path / "a.png")
    assert width > 1000 and height > 400


def boxes_of(axes: Any) -> list[list[tuple[float, float]]]:
    """(left, right) of the boxes of each row."""
    rows = [collection for collection in axes.collections if isinstance(collection, PolyCollection)]
    return [
        [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in row.get_paths()] for row in rows
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_a_box_with_its_number(name: str) -> None:
    chart = chart_of(name)
    (axes,) = schedule_figure([chart]).axes
    for boxes, times in zip(boxes_of(axes), chart.timeline.times, strict=True):
        assert [x for box in boxes for x in box] == pytest.approx([x for pair in times for x in pair])
    numbers = [text.get_text() for text in axes.texts]
    ranks = chart.timeline.schedule.ranks
    assert numbers == [str(action.microbatch) for actions in ranks for action in actions]
    assert axes.get_title("left") == chart.facts


def test_large_schedules_are_cut_and_say_so() -> None:
    (axes,) = schedule_figure([chart_of("1f1b", 64, 1256)]).axes
    assert [len(row) for row in boxes_of(axes)] == [MOST_ACTIONS] * MOST_RANKS
    assert "first 32 of 64 ranks and the first 256 of 2512 actions" in axes.get_xlabel()
    assert not axes.texts  # no room for numbers


def test_two_charts_have_one_time_axis() -> None:
    slow = chart_of("1f1b", forward=2.0, backward=2.0, weight=2.0)
    first, second = schedule_figure([chart_of("1f1b"), slow]).axes
    assert first.get_xlim() == second.get_xlim() == (0, slow.timeline.makespan)


def test_text_is_readable_on_every_colour() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for pale, full in COLOURS.values():
        assert (luminance(full) + 0.05) / 0.05 > 4.5  # the contrast of WCAG 2
        assert (luminance(pale) + 0.05) / (luminance(full) + 0.05) > 1.4


# Terminal


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\d+ +[FBWfbw·]+", line)]


def test_the_terminal_shows_every_action_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ("schedule", "--schedule", "zb_h1", "--pipeline", "2", "--microbatches", "3")
    text, document = text_of(*options), document_of(*options)
    assert text.startswith("zb_h1: pipeline 2, stages 2, microbatches 3\n")
    assert f"bubble {document['bubble']:.1%}, makespan {document['makespan']:g}" in text
    for row, entries, peak in zip(rows_of(text), document["ranks"], document["peak_activations"]):
        _, boxes, _, last = row.split()
        for entry in entries:
            place = 2 * round(entry["start"])
            assert boxes[place : place + 2] == f"{entry['kind']}{entry['microbatch']}"
        assert last == str(peak)


@pytest.mark.parametrize("columns", [40, 120])
@pytest.mark.parametrize(
    ("name", "pipeline", "microbatches"), [("zb_v", 4, 8), ("1f1b", 64, 128), ("gpipe", 1, 1)]
)
def test_rows_fit_the_terminal(
    name: str, pipeline: int, microbatches: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    sizes = ("--pipeline", str(pipeline), "--microbatches", str(microbatches))
    text = text_of("schedule", "--schedule", name, *sizes)
    assert all(len(line) <= columns for line in text.splitlines())
    assert len(rows_of(text)) == min(pipeline, MOST_RANKS)
    assert ("of 64 ranks" in text) == (pipeline == 64)
    assert ("time 0 to" in text) == (pipeline == 64 or (columns == 40 and name == "zb_v"))


def test_second_stages_are_lower_case() -> None:
    text = text_of("schedule", "--schedule", "zb_v", "--pipeline", "2", "--microbatches", "4")
    assert "lower case" in text and "f0b0w0" in text and "F0" in text


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for option in ("--pipeline", "--microbatches", "--virtual-stages", "--group", "--memory"):
        assert f"'{option}': 0" in error_of("schedule", option, "0")
    assert "did you mean 'zb_v'" in error_of("schedule", "--schedule", "zb_w")
    assert "1f1b has one stage" in error_of("schedule", "--schedule", "1f1b", "--virtual-stages", "2")
    assert "interleaved" in error_of("schedule", "--schedule", "1f1b", "--group", "2")
    for costs in (
        "1,1",
        "1,1,1",
        "1,1,1,1,1",
        "a,b,c",
        "",
        "1;1;1",
        "1,1,-1",
        "1,1,1,-0.5",
        "nan,1,1",
        "0,0,0,1",
    ):
        assert error_of("schedule", "--costs", costs).startswith(
            f"--costs: found '{costs}', expected F,B,W,P2P"
        )
    assert "applies only to --schedule auto" in error_of("schedule", "--memory", "2")
    assert "no such configuration file" in error_of("schedule", tmp_path / "none.yaml")
    assert "give one" in error_of("schedule", "a.yaml", "b.yaml")
    assert "cannot be read as a schedule" in error_of("schedule", "--file", tmp_path / "none.json")
    assert "give one of them" in error_of("schedule", "--file", "x.json", "run.yaml")
    assert "leave it out" in error_of("schedule", "--file", "x.json", "--pipeline", "2")
    assert "cannot be written" in error_of("schedule", "--save", tmp_path / "none" / "a.json")
