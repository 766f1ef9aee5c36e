"""``hexad show layout``: its JSON, its pictures, its errors, and how fast it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hexad.cli.show import show
from hexad.show.layout import MOST_DRAWN, layout_figure
from hexad.topology.layout import AXES, Layout

from .common import label_boxes, paths_of, png_size, refusal

WORLDS = [
    {"world": 1},
    {"world": 16, "tensor": 2, "pipeline": 4},
    {"world": 90, "tensor": 3, "context": 5, "pipeline": 3},
    {"world": 64, "tensor": 2, "context": 2, "pipeline": 4, "expert": 4, "expert_tensor": 2},
    {"world": 512},
    {"world": 16384, "tensor": 8, "context": 4, "pipeline": 16, "expert": 8},
    {"world": 2048, "tensor": 1024, "pipeline": 2},
]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(show, ["layout", *map(str, arguments)])


def error_of(*arguments: str | Path) -> str:
    return refusal(run(*arguments))


def options(degrees: dict[str, int]) -> list[str]:
    return [text for name, value in degrees.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("degrees", WORLDS[:4])
def test_json_holds_the_groups_of_every_axis(degrees: dict[str, int]) -> None:
    document = json.loads(run(*options(degrees), "--json").stdout)
    layout = Layout(**degrees)
    assert {axis: document.pop(axis) for axis in AXES} == {axis: layout.groups(axis) for axis in AXES}
    assert document == {"world": layout.world, "order": layout.order, "degrees": layout.degrees}


def test_degrees_of_a_run_file_overrides_and_options(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("parallel: {tensor: 2, pipeline: 2}\n")
    assert json.loads(run(file, "--json").stdout)["world"] == 4
    assert json.loads(run(file, "parallel.data=3", "--json").stdout)["world"] == 12
    document = json.loads(run(file, "parallel.context=2", "--tensor", "1", "--world", "8", "--json").stdout)
    assert {k: v for k, v in document["degrees"].items() if v > 1} == {
        "context": 2,
        "pipeline": 2,
        "data": 2,
        "expert_data": 4,
    }


def test_the_default_world_fits_both_grids() -> None:
    assert json.loads(run("--tensor", "2", "--expert", "3", "--json").stdout)["world"] == 6
    assert json.loads(run("--json").stdout)["world"] == 1


@pytest.mark.parametrize("ending", [".png", ".svg", ".html"])
def test_pictures_are_written(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"layout{ending}"
    result = run("--world", "16", "--tensor", "2", "--pipeline", "4", "--output", file)
    assert result.exit_code == 0 and result.stdout == "" and str(file) in result.stderr
    if ending == ".png":
        width, height = png_size(file)
        assert width > 600 and height > 300
        return
    text = file.read_text()
    assert paths_of(text) > 16 + 4  # a cell per rank and a frame per stage
    assert ("<title>16 ranks</title>" in text) == (ending == ".html")
    assert not any(word in text for word in ("<script", "<link", "<image", 'href="http', "src="))


@pytest.mark.parametrize("degrees", WORLDS)
def test_every_drawn_rank_is_legible_and_inside_the_picture(degrees: dict[str, int]) -> None:
    layout = Layout(**degrees)
    figure = layout_figure(layout)
    (axes,) = figure.axes
    width, height = figure.get_size_inches()
    assert width < 16
    grids = 2 if layout.expert * layout.expert_tensor > 1 else 1
    drawn = [text for text in axes.texts if text.get_text().isdigit() and text.get_ha() == "center"]
    assert len(drawn) == grids * min(layout.world, MOST_DRAWN)
    assert all(text.get_fontsize() >= 4.5 for text in drawn)
    assert all(0 < text.get_position()[0] < width and 0 < text.get_position()[1] < height for text in drawn)
    places = {text.get_position() for text in drawn}
    assert len(places) == len(drawn)
    words = " ".join(text.get_text() for text in axes.texts)
    assert ("drawn are" in words) == (layout.world > MOST_DRAWN)
    assert f"tensor {layout.tensor}" in words or layout.tensor == 1


def test_labels_do_not_overlap() -> None:
    figure = layout_figure(Layout(world=32, tensor=2, context=2, pipeline=2, expert=4))
    assert label_boxes(figure)


def test_the_same_layout_gives_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        run("--world", "4", "--tensor", "2", "--output", file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_terminal_shows_every_rank_or_says_that_it_does_not() -> None:
    small = run("--world", "16", "--tensor", "2", "--pipeline", "4").stdout
    assert "stage 3" in small and "12 13" in small and "0, 4, 8, 12" in small
    assert "too many" in run("--world", "4096", "--tensor", "8").stdout
    wide = run("--world", "256", "--tensor", "4", "--pipeline", "32").stdout
    assert all(f"{rank}" in wide for rank in range(256))


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert error_of("--world", "6", "--tensor", "4").startswith("parallel.tensor: found 4")
    assert error_of("--tensor", "0").startswith("parallel.tensor: found 0")
    assert error_of("--data", "many") == "parallel.data: found 'many', expected an integer or auto"
    assert "did you mean 'tensor'" in error_of("--order", "tensr-data")
    assert "no such configuration file" in error_of(tmp_path / "none.yaml")
    assert "give one" in error_of("a.yaml", "b.yaml")
    assert "parallel.tensr" in error_of("parallel.tensr=2")
    assert "use one of .png, .svg, .html" in error_of("--output", tmp_path / "a.pdf")
    assert "no ending" in error_of("--output", tmp_path / "a")
    assert "create it first" in error_of("--output", tmp_path / "none" / "a.png")


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_starts_without_torch_and_matplotlib(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from hexad.cli.show import show\n"
        f"show(['layout', '--world', '16', '--tensor', '2', *{arguments}], standalone_mode=False)\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'rich' not in sys.modules or '--json' not in sys.argv\n"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
