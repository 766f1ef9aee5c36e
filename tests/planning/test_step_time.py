"""Predicted step times, beside closed formulas and what was measured on one H100."""

import json
from pathlib import Path
from typing import Any

import pytest

from hexad import Layout, load_config
from hexad.config import Config
from hexad.planning import resolve
from hexad.planning.job import Job
from hexad.planning.links import Cluster, Group
from hexad.planning.step_time import Predictor
from hexad.topology.hardware import load_hardware

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "models.json"
MODELS = {
    "llama3.2-1b": {"preset": "llama3.2-1b"},
    "llama3-8b, 10 layers": {"preset": "llama3-8b", "layers": 10},
}


def _config(model: dict[str, Any], sequence: int, micro: int, sequences: int, **groups: Any) -> Config:
    tree = {
        "run": {"device": "cuda", **groups.pop("run", {})},
        "model": model,
        "data": {"sequence": sequence},
        "batch": {"micro": micro, "global": sequences},
        "precision": {"dtype": "bf16"},
        "lr_schedule": {"warmup": 10},
    }
    return load_config(tree | groups)


def _predictor(config: Config, world: int, gpu: str = "h100") -> Predictor:
    layout = Layout.from_settings(config.parallel, world)
    return Predictor(Job.of(resolve(config, layout)), Cluster(load_hardware(gpu), world))


def _steps() -> list[Any]:
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["figures"]["steps"]
    return [
        pytest.param(row, id=f"{row['model']}, {row['program']}")
        for row in rows
        if row["program"] in ("hexad, pointwise", "hexad, none")
    ]


@pytest.mark.parametrize("row", _steps())
def test_steps_of_an_h100(row: dict[str, Any]) -> None:
    """8 sequences of 4,096 tokens, compiled pointwise and not."""
    mode = row["program"].split(", ")[1]
    config = _config(MODELS[row["model"]], 4096, row["micro"], 8, run={"compile": mode})
    predicted = _predictor(config, 1).step.total
    assert predicted == pytest.approx(row["step_ms"] / 1e3, rel=0.07)


SMALL = {"preset": "llama3-8b", "layers": 8, "vocab": 32000}


def test_a_pipeline_of_equal_stages() -> None:
    """(microbatches + ranks - 1) of the slowest stage, and messages on the way in and out."""
    parallel = {"pipeline": 4, "split": [2, 2, 2, 2]}
    predictor = _predictor(_config(SMALL, 4096, 1, 16, parallel=parallel), 4)
    seconds = [[predictor.actions[stage, kind].seconds for kind in ("F", "BW")] for stage in range(4)]
    slowest = max(map(sum, seconds))
    others = sum(map(sum, seconds)) - slowest
    span = predictor.timeline.makespan
    assert 16 * slowest + others <= span <= (16 * slowest + others) * 1.02


@pytest.mark.parametrize(
    "faster",
    [
        ({"parallel": {"zero": 1}}, {"parallel": {"zero": 3}}),
        ({}, {"memory": {"recompute": "selective"}}),
        ({"memory": {"recompute": "selective"}}, {"memory": {"recompute": "full"}}),
        ({"parallel": {"tensor": 2}}, {"parallel": {"tensor": 8}}),
        ({"parallel": {"tensor": 8}}, {"parallel": {"tensor": 8, "sequence": False}}),
        ({"parallel": {"pipeline": 2, "schedule": "zb_h1"}}, {"parallel": {"pipeline": 2}}),
        ({"parallel": {"pipeline": 4}}, {"parallel": {"pipeline": 4, "schedule": "gpipe"}}),
    ],
    ids=str,
)
def test_what_costs_more(faster: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Of two layouts of 16 GPUs that do the same work."""
    first, second = (_predictor(_config(SMALL, 8192, 1, 64, **groups), 16).step.total for groups in faster)
    assert first < second or (faster[1].get("parallel", {}).get("schedule") == "gpipe" and first <= second)


def test_experts_send_and_compute() -> None:
    """An even load takes as long as a dense layer of the same products, and what is sent and routed."""
    moe = {"experts": 8, "top_k": 2, "ffn_hidden": 7168, "forced": True, "allowance": 1}
    model = {**SMALL, "preset": None, "family": "mixtral", "hidden": 4096, "heads": 32, "moe": moe}
    dense = _predictor(_config(SMALL, 8192, 1, 32), 8)
    experts = _predictor(_config(model, 8192, 1, 32, parallel={"expert": 8}), 8)
    action, plain = experts.actions[0, "BW"], dense.actions[0, "BW"]
    assert action.exposed["expert"] > 0 and "expert" not in plain.exposed
    assert action.computed["permutation"] > 0
    assert action.computed["product"] == pytest.approx(plain.computed["product"], rel=0.25)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_of_the_size_of_a_node_gather_inside_it(zero: int) -> None:
    """Weights are gathered over NVLink in place of the network; gradients are summed over nodes once."""
    parallel = {"zero": zero}
    whole, hybrid = (
        _predictor(_config(SMALL, 4096, 1, 256, parallel=parallel | {"replicas": replicas}), 64)
        for replicas in (1, 8)
    )
    layer = 100e6
    for operation in ("all_gather", "reduce_scatter"):
        inside = hybrid.state_seconds(operation, "shards of dense", layer, 1)
        assert inside == hybrid.cluster.seconds(operation, layer, Group(8, 8, 1))
        assert inside < whole.state_seconds(operation, "shards of dense", layer, 1)
    across = hybrid.state_seconds("all_reduce", "replicas of dense", layer / 8, 1)
    assert across == hybrid.cluster.seconds("all_reduce", layer / 8, Group(8, 1, 8))
    assert whole.state_seconds("all_reduce", "replicas of dense", layer, 1) == 0
    if zero == 3:
        waiting = [job.actions[0, "F"].exposed["data"] for job in (hybrid, whole)]
        assert waiting[0] < waiting[1]


def test_an_update_on_the_host() -> None:
    """28 bytes of each of the rank's parameters, at the host's rate."""
    settings = {"parallel": {"zero": 1}, "memory": {"offload": "optimizer"}}
    here, there = (
        _predictor(_config(SMALL, 4096, 1, 64, **{**settings, **memory}), 8)
        for memory in ({"memory": {}}, {})
    )
    elements = sum(there.job.elements[0].values()) / 8
    seconds = elements * 28 / (load_hardware("h100").constants.host.update_gb_per_s * 1e9)
    assert there.step.update == pytest.approx(seconds, abs=1e-3)
    assert there.step.total - there.step.update == pytest.approx(here.step.total - here.step.update)
