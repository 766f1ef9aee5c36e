"""``hexad show experts``: loads of a made-up run and of a real one, damaged files, and the picture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexad.show.experts import experts_figure, read_loads

from .common import document_of, error_of, labels_of, png_size, text_of


def load(*tokens: int) -> dict[str, Any]:
    return {"tokens": list(tokens), "imbalance": max(tokens) * 4 / sum(tokens), "entropy": 1.2, "dropped": 3}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    lines = [
        {"step": step, "layers": {"1": load(10, 10, 10, 10 + step), "3": load(40, 0, 0, 0)}}
        for step in range(1, 31)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "experts.jsonl").write_text(text + '{"step": 31, "lay')
    return tmp_path


def test_the_table_has_a_row_for_each_layer(directory: Path) -> None:
    text = text_of("experts", directory)
    assert "steps 1 to 30" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(("1 ", "3 "))]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("1", "2.286", "90"), ("3", "4.000", "90")]


def test_json_has_every_expert_of_every_step(directory: Path) -> None:
    document = document_of("experts", directory)
    assert document["steps"] == [*range(1, 31)]
    assert document["layers"]["1"][4]["tokens"] == [10, 10, 10, 15]


def test_the_picture_has_a_panel_for_each_layer(directory: Path) -> None:
    figure = experts_figure(read_loads(directory))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[1:3] == ["layer 1", "layer 3"]
    image = figure.axes[2].collections[0].get_array()
    assert image is not None
    values = np.asarray(image).reshape(4, 30)
    assert (values[0] == 4).all() and (values[1:] == 0).all()
    assert min(png_size("experts", directory, file=directory / "experts.png")) > 300
    labels = labels_of("experts", directory, file=directory / "experts.svg")
    assert {"layer 1", "layer 3", "expert"} <= set(labels)
    drawn = (directory / "experts.svg").read_text()
    assert "expert 0: 4.00 of the mean at the end" in drawn


def test_a_run_without_experts_and_damaged_files(directory: Path, tmp_path: Path) -> None:
    assert "runs of models with experts (model.moe) write it" in error_of("experts", tmp_path / "other")
    path = directory / "experts.jsonl"
    path.write_text(path.read_text().replace('"3"', '"2"', 1))
    assert "found other layers than before" in error_of("experts", directory)
