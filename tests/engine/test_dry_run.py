"""Dry runs against real ones: measured peaks and ledgers of ranks on CPUs, and peaks recorded on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hexad.config import HexadError
from hexad.engine.dry.ledger import Ledger
from hexad.engine.dry.run import COMPONENTS, DryRun, dry_run
from hexad.engine.dry.tensors import META, dry_tensors
from hexad.model.configuration import build_config
from hexad.parallel.contributions import widening_products
from hexad.planning import resolve
from hexad.topology.layout import Layout

from ..memory.layouts import LAYOUTS, Groups
from ..memory.measure import compare_dry_runs, measure, measured_config
from ..pool import Pool

ROOT = Path(__file__).parents[2]


def run_dry(world: int, rank: int, **groups: dict[str, Any]) -> DryRun:
    config = measured_config(**groups)
    return dry_run(resolve(config, Layout.from_settings(config.parallel, world)), rank)


def _check(world: int, groups: Groups, pool: Pool) -> None:
    config = measured_config(**groups)
    compare_dry_runs(config, pool.run(world, measure, config, world))


FIRST = (
    "2 2 1 | seq zb_v | selective | fp32 | tied",
    "1 2 2 | z3 interleaved | full | fp32 | last layer",
    "1 1 2 | e2 z3 | none | fp32 | dense and experts",
)
"""All axes but context, ZeRO 0 and 3, a schedule with deferred gradients, recompute, and experts."""
OTHERS: dict[str, tuple[int, Groups]] = {
    "exact": (2, {"parallel": {"tensor": 2}, "precision": {"exact": True}}),
    "exact, rings": (
        4,
        {
            "parallel": {"context": 4, "context_method": "ulysses_ring", "context_ulysses": 2},
            "precision": {"exact": True},
            "memory": {"recompute": "full"},
        },
    ),
    "exact, adapters": (
        2,
        {"parallel": {"tensor": 2}, "model": {"lora": {"rank": 4}}, "precision": {"exact": True}},
    ),
    "fp8": (2, {"parallel": {"data": 2, "zero": 3}, "precision": {"dtype": "fp8"}}),
    "fp8 throughout": (1, {"precision": {"dtype": "fp8", "fp8_weight_gradients": True}}),
    "documents": (2, {"parallel": {"context": 2}, "data": {"documents": "isolate"}}),
    "chunks": (2, {"parallel": {"tensor": 2, "tensor_chunks": 3}}),
    "capacity": (
        1,
        {
            "model": {
                "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 176, "capacity_factor": 1.25, "forced": True}
            }
        },
    ),
}
"""Settings that no layout of the memory model's sweep has."""


@pytest.mark.parametrize("layout", FIRST)
def test_a_dry_run_is_a_real_one(layout: str, pool: Pool) -> None:
    """So it is in all others, see ``tests/memory/test_memory.py``, which measures their ranks."""
    _check(*LAYOUTS[layout], pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_so_it_is_with_other_settings(name: str, pool: Pool) -> None:
    _check(*OTHERS[name], pool)


# On a GPU

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 4},
    "gpt2": {"family": "gpt2"},
    "qwen3": {"family": "qwen3", "kv_heads": 4},
}
RECORDED = json.loads((ROOT / "benchmarks/results/gpu/memory.json").read_text())["figures"]["cases"]
_OPENED = 66 * 2**20
"""Workspace of cuBLAS, allocated by the first product of a process, and by the first one of compiled
functions: in the first case of each kind."""


def _name(case: dict[str, Any]) -> str:
    return f"{case['family']} {case['dtype']} {case['compile']} {case['recompute']}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if number % 14 == 4 else pytest.mark.slow, id=_name(case))
        for number, case in enumerate(RECORDED)
    ],
)
def test_the_peak_that_an_h100_had(case: dict[str, Any]) -> None:
    """``benchmarks/gpu/memory.py`` has recorded it, with PyTorch's own statistics."""
    sizes = {"layers": 6, "hidden": 1024, "heads": 16, "ffn_hidden": 3072, "vocab": 32000}
    config = build_config(
        {
            "run": {"device": "cuda", "compile": case["compile"]},
            "model": sizes | FAMILIES[case["family"]],
            "data": {"sequence": 2048},
            "batch": {"micro": 4, "global": 8},
            "precision": {"dtype": case["dtype"]},
            "memory": {"recompute": case["recompute"]},
        }
    )
    measured = case["allocated_gib"] * 2**30
    run = dry_run(resolve(config, Layout(world=1)), 0)
    assert -_OPENED <= run.peak - measured <= 0.0002 * measured
    assert measured - run.peak < 0.0015 * measured or case in RECORDED[:1] or case["compile"] == "pointwise"


SMALL: Groups = {
    "run": {"device": "cuda"},
    "model": {"layers": 8, "hidden": 128, "heads": 8, "ffn_hidden": 256, "vocab": 512},
    "data": {"sequence": 64},
    "precision": {"dtype": "bf16"},
}


def test_a_rank_of_16384_is_built_alone() -> None:
    groups = SMALL | {
        "parallel": {"tensor": 8, "pipeline": 8, "zero": 1},
        "batch": {"micro": 1, "global": 2 * 256},
    }
    run = run_dry(16384, 9000, **groups)
    assert run.coordinates | {"tensor": 0, "pipeline": 4} == run.coordinates
    assert abs(run.predicted_peak / run.peak - 1) < 0.02 and not torch.distributed.is_initialized()
    assert min(run.sent[axis] for axis in ("tensor", "pipeline", "data")) > 0
    # Two microbatches forward, two backward: rows of a tensor rank to the next and the previous stage.
    assert run.sent["pipeline"] - 4 * (64 // 8) * 128 * 2 < 100


def test_tied_embeddings_are_summed_with_a_stage_that_does_not_exist() -> None:
    """The first and the last stage add up the embedding's gradient, and others have no part in that."""
    groups = SMALL | {"parallel": {"pipeline": 3}, "batch": {"micro": 1, "global": 1}}
    tied = groups | {"model": groups["model"] | {"tied_embeddings": True}}
    first, middle, last = (
        run_dry(3, rank, **tied).sent["pipeline"] - run_dry(3, rank, **groups).sent["pipeline"]
        for rank in range(3)
    )
    assert middle == 0 and first == last == pytest.approx(512 * 128 * 4, rel=0.001)


def test_components_add_up_and_offloaded_state_is_the_hosts() -> None:
    groups = SMALL | {"memory": {"offload": "optimizer"}, "batch": {"micro": 1, "global": 4}}
    run = run_dry(1, 0, **groups)
    assert tuple(run.components) == COMPONENTS and sum(run.components.values()) == run.peak
    assert run.components["master"] == run.components["optimizer"] == 0 < run.predicted.host
    groups["run"] = {"device": "cpu"}
    groups["precision"] = {"dtype": "fp32"}
    on_cpu = run_dry(1, 0, **groups)
    assert on_cpu.components["optimizer"] == on_cpu.predicted_components["optimizer"] > 0


# What it rests on


def test_memory_is_followed_until_it_is_freed() -> None:
    ledger = Ledger(512)
    with dry_tensors(ledger, cpu=False):
        kept = torch.empty(1000, device=META)
        ledger.mark(kept, "kept")
        ledger.begin_step("before")
        ledger.begin_action()
        outlives = torch.empty(256, device=META)
        views = outlives.view(16, 16), outlives[3:]
        moment = torch.empty(2048, device=META)
        del moment
        ledger.begin_action()
        small = torch.empty(1, device=META)
    assert ledger.bytes == 4096 + 1024 + 512 and ledger.peak == 4096 + 1024 + 8192 and ledger.at == 1
    assert ledger.at_peak("activations", "buffers", True) == {
        "kept": 4096,
        "activations": 1024,
        "buffers": 8192,
    }
    assert ledger.at_peak("activations", "buffers", False)["buffers"] == 1024 + 8192
    del outlives, views, small, kept
    assert ledger.bytes == 0


def test_nothing_of_a_dry_run_stays(pool: Pool) -> None:
    """Neither what the process has tried once on its own device, nor memory."""
    groups = {"precision": {"dtype": "bf16"}, "batch": {"micro": 1, "global": 2}}
    run_dry(1, 0, **groups)
    assert widening_products(torch.device("cpu")) == pool.run(1, widening_products, torch.device("cpu"))[0]
    assert torch.ones(2).device.type == "cpu" and torch.ones(2).sum().item() == 2.0


# What is refused

EXPERTS = {"experts": 8, "top_k": 2, "ffn_hidden": 64}
REFUSED: dict[str, tuple[int, Groups, str]] = {
    "full compilation": (1, {"run": {"compile": "full", "device": "cuda"}}, "run.compile: found full"),
    "counts read by the host": (
        1,
        {"run": {"device": "cuda"}, "model": {"moe": EXPERTS}, "precision": {"dtype": "fp32"}},
        "precision.dtype: found fp32 with experts",
    ),
    "memory of a library": (
        2,
        {
            "run": {"device": "cuda"},
            "model": {"moe": EXPERTS | {"dispatcher": "nvshmem"}},
            "parallel": {"data": 2, "expert": 2},
            "precision": {"dtype": "bf16"},
        },
        "model.moe.dispatcher: found nvshmem",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_dry_is_refused(name: str) -> None:
    world, groups, reason = REFUSED[name]
    with pytest.raises(HexadError, match=reason):
        run_dry(world, 0, **groups)


def test_a_number_that_a_step_reads_is_an_error() -> None:
    with pytest.raises(HexadError, match="without values: a number"), dry_tensors(Ledger(), cpu=True):
        float(torch.zeros(3).sum())
    with pytest.raises(HexadError, match="expected 0 to 3"):
        run_dry(4, 4, parallel={"data": 4})
