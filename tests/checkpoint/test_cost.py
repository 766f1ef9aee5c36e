"""The benchmark of starts at a size that takes a second: it simulates what the ranks really do."""

import sys
from pathlib import Path

import pytest

from hexad.topology.layout import Layout

LAYOUT = Layout(world=48, tensor=4, pipeline=2)


def test_the_first_rank_s_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import cost_of_start

    monkeypatch.setattr(cost_of_start, "LAYERS", 4)
    saved, loaded = cost_of_start.messages(LAYOUT, tmp_path)
    costs = cost_of_start.first_rank(tmp_path, LAYOUT.world)
    assert costs["tensor_files"] == LAYOUT.world / cost_of_start.HOST and saved > loaded > 0
    # The manifest was accepted: the shards cover every tensor exactly once.
    assert 0 < costs["rectangles_of_the_first_rank"] < costs["rectangles"] / LAYOUT.world * 3
    assert costs["largest_message_on_loading"] < costs["bytes_sent_on_loading"]
    store = cost_of_start.through_the_store(LAYOUT.world)
    assert store["calls"] > LAYOUT.world and store["bytes"] > store["calls"]
    sys.modules.pop("cost_of_start")
