"""``hexad show memory``: the plan of a run, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hexad.plan.memory import MemoryPlan
from hexad.show.memory import memory_figure

from ..train.command import call

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
    document = json.loads(call("show", "memory", path, "--json").out)
    parts = ("parameters", "gradients", "master", "optimizer", "buffers")
    assert document["total"] == sum(document[n] for n in parts) + sum(document["activations"].values())
    assert [entry["rank"] for entry in document["pipeline"]] == [0, 2]
    assert document["total"] == max(entry["total"] for entry in document["pipeline"])
    last = json.loads(call("show", "memory", path, "--rank", "3", "--json").out)
    assert last["rank"] == 3 and last["total"] == document["pipeline"][1]["total"]
    assert last["activations"]["loss"] > 0 and "loss" not in document["activations"]


def test_what_is_asked_for_saves_memory(path: str) -> None:
    def total(*overrides: str) -> dict[str, int]:
        result: dict[str, int] = json.loads(call("show", "memory", path, "--json", *overrides).out)
        return result

    plain = total("parallel.data=4")
    assert total("parallel.data=4", "parallel.zero=1")["optimizer"] < plain["optimizer"] / 3
    assert total("parallel.data=4", "parallel.zero=2")["gradients"] < plain["gradients"] / 3
    assert total("parallel.data=4", "parallel.zero=3")["parameters"] < plain["parameters"] / 3
    for smaller in ("memory.recompute=selective", "memory.recompute=full"):
        assert total("parallel.data=4", smaller)["total"] < plain["total"]


def test_table_and_picture(path: str, tmp_path: Path) -> None:
    table = call("show", "memory", path)
    assert table.status == 0 and "activations: feed forward" in table.out and "total" in table.out
    target = tmp_path / "memory.svg"
    assert call("show", "memory", path, "--output", str(target)).status == 0
    assert "Predicted peak memory" in target.read_text()


def test_bars_are_as_high_as_the_plan() -> None:
    plans = [
        MemoryPlan(rank, 2**20, 2**20, 0, 2**21, {"residual": 3 * 2**20}, 2**20, 0, "F") for rank in (0, 5)
    ]
    (axes,) = memory_figure(plans).axes
    tops = {}
    for bar in axes.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    assert len(tops) == 2 and all(top == pytest.approx(8.0) for top in tops.values())
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "5"]


def test_errors_name_the_argument(path: str) -> None:
    assert call("show", "memory").error.startswith("show memory: found no file")
    assert call("show", "memory", path, "--rank", "9").error.startswith("--rank: found 9, expected 0 to 3")
    refused = call("show", "memory", path, "memory.recompute_layers=2")
    assert refused.status == 2 and refused.error.startswith("memory.recompute_layers: found 2")
