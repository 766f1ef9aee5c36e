"""``hexad show layout``: its JSON, its pictures and its errors; and how fast all of ``show`` starts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hexad.show.figure import pale_colours
from hexad.show.layout import MOST_COLUMNS, MOST_ROWS, MOST_STAGES, grids, layout_figure
from hexad.topology.layout import AXES, Layout

from .common import document_of, error_of, labels_of, png_size, text_of

WORLDS = [
    {"world": 1},
    {"world": 16, "tensor": 2, "pipeline": 4},
    {"world": 90, "tensor": 3, "context": 5, "pipeline": 3},
    {"world": 64, "tensor": 2, "context": 2, "pipeline": 4, "expert": 4, "expert_tensor": 2},
]


def options(degrees: dict[str, int]) -> list[str]:
    return [text for name, value in degrees.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("degrees", WORLDS)
def test_json_holds_the_groups_of_every_axis(degrees: dict[str, int]) -> None:
    document = document_of("layout", *options(degrees))
    layout = Layout(**degrees)
    assert {axis: document.pop(axis) for axis in AXES} == {axis: layout.groups(axis) for axis in AXES}
    assert document == {"world": layout.world, "order": layout.order, "degrees": layout.degrees}


def test_degrees_of_a_run_file_overrides_and_options(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("parallel: {tensor: 2, pipeline: 2}\n")
    assert document_of("layout", file)["world"] == 4
    assert document_of("layout", file, "parallel.data=3")["world"] == 12
    document = document_of("layout", file, "parallel.context=2", "--tensor", "1", "--world", "8")
    used = {axis: degree for axis, degree in document["degrees"].items() if degree > 1}
    assert used == {"context": 2, "pipeline": 2, "data": 2, "expert_data": 4}


def test_the_default_world_fits_both_grids() -> None:
    assert document_of("layout", "--tensor", "2", "--expert", "3")["world"] == 6
    assert document_of("layout")["world"] == 1


@pytest.mark.parametrize("degrees", WORLDS)
def test_grids_hold_every_rank_once_and_rows_are_groups(degrees: dict[str, int]) -> None:
    layout = Layout(**degrees)
    for grid, axis in zip(grids(layout), ("tensor", "expert_tensor")):
        rows = [row for panel in grid.ranks for row in panel]
        assert sorted(rank for row in rows for rank in row) == list(range(layout.world))
        assert sorted(rows) == layout.groups(axis) and grid.omitted == ""
        assert all(len(panel) == len(grid.rows) for panel in grid.ranks)


def test_large_worlds_are_cut_and_say_so() -> None:
    dense, expert = grids(Layout(world=16384, tensor=32, pipeline=16, expert=64))
    shown = MOST_STAGES * MOST_ROWS * MOST_COLUMNS
    assert dense.omitted == f"shown: {shown:,} of 16,384 ranks; --json lists all"
    for grid in (dense, expert):
        assert len(grid.ranks) == MOST_STAGES and len(grid.ranks[0]) <= MOST_ROWS
    assert "shown: 16 of 24 ranks" in text_of("layout", "--world", "24")


def test_pictures_show_every_rank(tmp_path: Path) -> None:
    arguments = ("layout", *options(WORLDS[3]))
    for ending in (".svg", ".html"):
        labels = labels_of(*arguments, file=tmp_path / f"layout{ending}")
        assert {str(rank) for rank in range(64)} | {"stage 3", "data 3, context 1"} <= set(labels)
    assert "<title>rank 63: stage 3, data 3, context 1</title>" in (tmp_path / "layout.html").read_text()
    assert "<title>world 64, order tensor-context" in (tmp_path / "layout.html").read_text()
    width, height = png_size("layout", *options(WORLDS[1]), file=tmp_path / "layout.png")
    assert width > 600 and height > 300


def test_stages_have_colours_of_their_own() -> None:
    colours = pale_colours(32)
    assert len(set(colours)) == 32 and all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_a_picture_of_a_large_world_is_not_wider_than_a_page() -> None:
    figure = layout_figure(Layout(world=2048, tensor=16, pipeline=64))
    assert figure.get_size_inches()[0] < 16


def test_the_same_layout_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        labels_of("layout", "--world", "4", "--tensor", "2", file=tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_terminal_shows_ranks_and_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = text_of("layout", "--world", "16", "--tensor", "2", "--pipeline", "4")
    assert "stage 3" in text and "12 13" in text and "0, 4, 8, 12" in text
    wide = text_of("layout", "--world", "64", "--tensor", "8", "--pipeline", "4")
    assert "56 57 58 59 60 61 62 63" in wide  # panels are below each other where they do not fit


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert error_of("layout", "--world", "6", "--tensor", "4").startswith("parallel.tensor: found 4")
    assert error_of("layout", "--tensor", "0").startswith("parallel.tensor: found 0")
    assert error_of("layout", "--data", "many").startswith("parallel.data: found 'many'")
    assert "did you mean 'tensor'" in error_of("layout", "--order", "tensr-data")
    assert "no such configuration file" in error_of("layout", tmp_path / "none.yaml")
    assert "give one" in error_of("layout", "a.yaml", "b.yaml")
    assert "parallel.tensr" in error_of("layout", "parallel.tensr=2")
    for name in ("a.pdf", "a"):
        assert "ends in .png, .svg or .html" in error_of("layout", "--output", tmp_path / name)
    for ending in (".png", ".svg"):
        assert "cannot be written: No such" in error_of("layout", "--output", tmp_path / "no" / f"a{ending}")


def test_text_and_json_need_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {hidden: 64, vocab: 300}\nparallel: {pipeline: 2}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.5}) + "\n")
    commands = [["layout"], ["schedule"], ["memory", "run.yaml"], ["schedule", "run.yaml"], ["run", "."]]
    code = (
        "import sys\n"
        "from hexad.cli.show import show\n"
        f"for command in {commands}:\n"
        "    for option in ([], ['--json']):\n"
        "        show([*command, *option], standalone_mode=False)\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
