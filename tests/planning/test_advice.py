"""Advice on layouts that take much longer than they need."""

from typing import Any

import pytest

from hexad import Layout, load_config
from hexad.planning import Resolved, resolve
from hexad.planning.advice import advice
from hexad.planning.job import Job
from hexad.planning.links import Cluster
from hexad.planning.step_time import Predictor
from hexad.topology.hardware import load_hardware


def _resolved(world: int, device: str = "cuda", **parallel: Any) -> Resolved:
    config = load_config(
        {
            "run": {"device": device},
            "model": {"preset": "llama3-70b"},
            "data": {"sequence": 4096},
            "batch": {"micro": 1, "global": 128},
            "parallel": parallel,
            "precision": {"dtype": "bf16"},
        }
    )
    return resolve(config, Layout.from_settings(config.parallel, world))


def test_gathers_in_every_microbatch() -> None:
    """ZeRO 3 with a pipeline over nodes: more is gathered than computed."""
    resolved = _resolved(512, tensor=8, pipeline=8, zero=3)
    change = advice(resolved)
    assert change is not None and change.changes == {"parallel.zero": 1}
    before, after = change.seconds
    assert before > 2 * after and change.waiting[0] > 0.5 * before
    assert f"{change.waiting[0]:.2f} s is waiting for data ranks; with parallel.zero=1" in str(change)
    # The figures are the planner's.
    cluster = Cluster(load_hardware("h100"), 512)
    assert before == Predictor(Job.of(resolved), cluster).step.total
    assert after == Predictor(Job.of(_resolved(512, tensor=8, pipeline=8, zero=1)), cluster).step.total


@pytest.mark.parametrize(
    ("world", "parallel", "key"),
    [
        (512, {"tensor": 8, "pipeline": 8, "zero": 2}, "parallel.zero"),
        (512, {"tensor": 8, "pipeline": 16, "zero": 1}, "parallel.schedule"),
        (64, {"tensor": 64, "zero": 1}, "parallel.tensor"),
    ],
)
def test_what_to_change(world: int, parallel: dict[str, Any], key: str) -> None:
    change = advice(_resolved(world, **parallel))
    assert change is not None and key in change.changes


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (512, {"tensor": 8, "pipeline": 4, "zero": 1, "schedule": "interleaved", "virtual_stages": 5}),
        (64, {"tensor": 8, "zero": 1}),
    ],
)
def test_good_layouts_have_none(world: int, parallel: dict[str, Any]) -> None:
    assert advice(_resolved(world, **parallel)) is None


def test_a_cpu_has_none() -> None:
    assert advice(_resolved(512, "cpu", tensor=8, pipeline=8, zero=3)) is None
