"""``hexad show memory``: the plan of a run, as a table, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexad.plan.memory import MemoryPlan
from hexad.show.memory import MOST_BARS, memory_figure

from .common import document_of, error_of, labels_of, text_of

YAML = """
model: {layers: 4, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 300}
data: {sequence: 32}
batch: {micro: 2, global: 16}
parallel: {tensor: 2, pipeline: 2}
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(YAML)
    return str(tmp_path / "run.yaml")


def test_json_adds_up_and_the_default_is_the_largest(path: str) -> None:
    document = document_of("memory", path)
    parts = ("parameters", "gradients", "master", "optimizer", "buffers")
    assert document["total"] == sum(document[n] for n in parts) + sum(document["activations"].values())
    assert [entry["rank"] for entry in document["pipeline"]] == [0, 2]
    assert document["total"] == max(entry["total"] for entry in document["pipeline"])
    last = document_of("memory", path, "--rank", "3")
    assert last["rank"] == 3 and last["total"] == document["pipeline"][1]["total"]
    assert last["activations"]["loss"] > 0 and "loss" not in document["activations"]


def test_zero_and_recompute_save_memory(path: str) -> None:
    plain = document_of("memory", path, "parallel.data=4")
    for level, sharded in enumerate(("optimizer", "gradients", "parameters"), 1):
        document = document_of("memory", path, "parallel.data=4", f"parallel.zero={level}")
        assert document[sharded] < plain[sharded] / 3
    for smaller in ("memory.recompute=selective", "memory.recompute=full"):
        assert document_of("memory", path, "parallel.data=4", smaller)["total"] < plain["total"]


def test_table_and_picture(path: str, tmp_path: Path) -> None:
    total = document_of("memory", path)["total"] / 2**20
    text = text_of("memory", path)
    assert "activations: feed forward" in text and f"total {total:.1f}" in " ".join(text.split())
    labels = labels_of("memory", path, file=tmp_path / "memory.svg")
    assert {"Predicted peak memory, MiB", "parameters", "buffers", f"{total:.3g}"} <= set(labels)


def test_bars_are_as_high_as_the_plan() -> None:
    def plan(rank: int) -> MemoryPlan:
        return MemoryPlan(rank, 2**20, 2**20, 0, 2**21, {"residual": 3 * 2**20}, 2**20, 0, "F")

    (axes,) = memory_figure([plan(0), plan(5)]).axes
    tops: dict[float, float] = {}
    for bar in axes.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    assert list(tops.values()) == pytest.approx([8.0, 8.0])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "5"]
    (many,) = memory_figure([plan(rank) for rank in range(50)]).axes
    assert f"the first {MOST_BARS} of 50" in many.get_xlabel()


def test_errors_name_the_argument(path: str) -> None:
    assert error_of("memory").startswith("show memory: found no configuration file")
    assert error_of("memory", path, "--rank", "9").startswith("--rank: found 9, expected 0 to 3")
    assert error_of("memory", path, "memory.recompute_layers=2").startswith(
        "memory.recompute_layers: found 2"
    )
