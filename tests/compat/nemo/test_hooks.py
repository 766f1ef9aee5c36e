"""LightningModules with NeMo's hooks: any layout computes what one process and a plain loop do."""

from pathlib import Path
from typing import Any

import pytest

from ...pool import Pool, RankError
from . import hooked
from .hooked import evaluated, fitted, marked, plain

pytest.importorskip("lightning")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data, zero 2": (2, {"zero": 2}),
    "tensor": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2, "zero": 3}),
    "virtual stages": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "V": (2, {"pipeline_model_parallel_size": 2, "schedule": "zb_h1"}),
    "tensor and pipeline": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero": 1},
    ),
    "data, tensor and pipeline": (
        8,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "zero": 1,
        },
    ),
}
EVERY_TIME = ("virtual stages", "data, tensor and pipeline")
COMPARED = ("losses", "norms", "val")


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    """The numbers of one process."""
    return pool.run(1, fitted, {})[0]


def test_one_process_computes_what_a_plain_loop_does(pool: Pool, alone: dict[str, Any]) -> None:
    expected = pool.run(1, plain)[0]
    for name in ("losses", "norms"):
        assert alone[name] == pytest.approx(expected[name], rel=1e-9)
    assert alone["rates"] == pytest.approx([0.005, 0.01, 0.00775, 0.00325])
    assert alone["samples"] == hooked.STEPS * hooked.GLOBAL


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n in EVERY_TIME else pytest.mark.slow) for n in LAYOUTS]
)
def test_any_layout(pool: Pool, alone: dict[str, Any], layout: str) -> None:
    ranks, given = LAYOUTS[layout]
    for found in pool.run(ranks, fitted, given):
        for name in COMPARED:
            assert found[name] == pytest.approx(alone[name], rel=1e-9), name
        assert found["rates"] == alone["rates"]
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            assert found["config"][name] == given.get(name, 1)


@pytest.mark.parametrize("sampler", [{}, {"rampup_batch_size": [4, 4, 8]}], ids=["plain", "growing batches"])
def test_resumed_in_another_layout(pool: Pool, tmp_path: Path, sampler: dict[str, Any]) -> None:
    """A checkpoint of two stages, within a pass over the data, continues in one process."""
    alone = pool.run(1, fitted, {}, None, sampler)[0]
    path = str(tmp_path / "saved.ckpt")
    given = {"pipeline_model_parallel_size": 2, "zero": 1}
    before = pool.run(2, fitted, given, None, sampler, path, 2)[0]
    after = pool.run(1, fitted, {}, None, sampler, path)[0]
    for name in ("losses", "norms", "rates"):
        assert before[name] + after[name] == pytest.approx(alone[name], rel=1e-9), name
    assert after["samples"] == alone["samples"]


@pytest.mark.parametrize("given", [{}, {"pipeline_model_parallel_size": 2}], ids=["alone", "pipeline"])
def test_evaluations(pool: Pool, given: dict[str, Any]) -> None:
    """The weights that were trained, without dropout, during a fit and after it."""
    for found in pool.run(given.get("pipeline_model_parallel_size", 1), evaluated, given):
        during, after, tested = found["losses"]
        assert after == pytest.approx(during, rel=1e-6)  # a metric of fp32
        assert tested == pytest.approx(after, rel=1e-9)
        assert found["clip"] == 0.0


def test_marked_parameters_of_plain_modules(pool: Pool) -> None:
    """Gradients of ``sequence_parallel`` parameters are summed in a stage without sharded modules."""
    alone = pool.run(1, marked, 1)[0]
    assert pool.run(2, marked, 2)[0] == pytest.approx(alone, rel=1e-6)  # metrics of fp32


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "context": ({"context_parallel_size": 2}, {}, "BertModule: found context_parallel_size=2"),
    "clipping": ({}, {"gradient_clip_val": 1.0}, "set OptimizerConfig.clip_grad"),
    "per token": ({}, {"per_token": True}, "found calculate_per_token_loss=True"),
    "accumulation": ({}, {"accumulate_grad_batches": 2}, "found accumulate_grad_batches=2"),
    "steps": (
        {},
        {"max_steps": -1, "max_epochs": 1},
        "found max_steps=-1 with CosineAnnealingScheduler, whose rates depend on it",
    ),
    "sizes": ({}, {"max_steps": 1}, "rampup_batch_size with 3, expected a multiple of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(pool: Pool, case: str) -> None:
    given, options, message = REFUSED[case]
    sampler = {"rampup_batch_size": [3, 4, 8]} if case == "sizes" else None
    with pytest.raises(RankError, match=f"Error: .*{message}"):
        pool.run(2, fitted, given, options, sampler)
