"""Plans of memory and traffic against dry runs of mixtures of experts on GPUs, whose buffers have a static
size."""

from typing import Any

import pytest

from hexad.engine.dry.run import dry_run
from hexad.planning import resolve
from hexad.topology.layout import Layout

from ..small import Tree, config_of

DEFAULTS: Tree = {
    "run": {"device": "cuda"},
    "model": {"layers": 4, "hidden": 256, "heads": 8, "ffn_hidden": 512, "vocab": 1024},
    "data": {"sequence": 512},
    "precision": {"dtype": "bf16"},
}
_MOE = {"experts": 16, "top_k": 4, "ffn_hidden": 192}
_MANY = {"experts": 64, "top_k": 8, "ffn_hidden": 64}
_MLA = {"q_rank": 64, "kv_rank": 48, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
_SELECTIVE = {"recompute": "selective"}
_LATENT = {"family": "deepseek_v3", "mla": _MLA}
_GATHER = {"dispatcher": "all_gather"}

Case = dict[str, Any]
"""``world``, and settings: ``parallel``, ``moe``, ``model``, ``memory``, ``micro``."""


def _case(world: int, parallel: Case | None = None, **groups: Any) -> Case:
    return {"world": world, "parallel": parallel or {}, **groups}


CASES: dict[str, Case] = {
    "one rank": _case(1),
    "alltoall of 4": _case(4, {"expert": 4}),
    "alltoall of 8": _case(8, {"expert": 8}),
    "all_gather of 2": _case(2, {"expert": 2}, moe=_GATHER),
    "all_gather of 4": _case(4, {"expert": 4}, moe=_GATHER),
    "selective": _case(4, {"expert": 4}, memory=_SELECTIVE),
    "full": _case(4, {"expert": 4}, memory={"recompute": "full"}),
    "moe_act": _case(4, {"expert": 4}, memory={"recompute_parts": ["moe_act"]}),
    "shared": _case(4, {"expert": 4}, moe={"shared_experts": 1}),
    "shared, selective": _case(4, {"expert": 4}, moe={"shared_experts": 1}, memory=_SELECTIVE),
    "shared, with a gate": _case(4, {"expert": 4}, moe={"shared_experts": 1, "shared_gate": True}),
    "zb_h1": _case(8, {"expert": 4, "pipeline": 2, "schedule": "zb_h1"}),
    "zb_v": _case(8, {"expert": 4, "pipeline": 2, "schedule": "zb_v", "virtual_stages": 2}),
    "dualpipe_v": _case(
        8,
        {"expert": 4, "pipeline": 2, "schedule": "dualpipe_v", "virtual_stages": 2},
        memory=_SELECTIVE,
    ),
    "1f1b": _case(16, {"expert": 4, "pipeline": 4}),
    "interleaved": _case(8, {"expert": 4, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}),
    "tensor, sequence": _case(4, {"expert": 4, "tensor": 2}),
    "tensor": _case(4, {"expert": 4, "tensor": 2, "sequence": False}),
    "expert_tensor": _case(4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
    "expert_tensor, all_gather": _case(
        4, {"expert": 2, "expert_tensor": 2, "tensor": 2, "sequence": False}, moe=_GATHER
    ),
    "zero 1": _case(8, {"expert": 4, "zero": 1}),
    "zero 3": _case(8, {"expert": 4, "zero": 3}),
    "context": _case(4, {"expert": 4, "context": 2}),
    "many small experts": _case(8, {"expert": 8}, moe=_MANY),
    "latent attention": _case(
        16,
        {"expert": 8, "pipeline": 2, "zero": 1},
        model=_LATENT,
        moe={**_MANY, "shared_experts": 1, "score": "sigmoid"},
        memory={**_SELECTIVE, "recompute_parts": ["mla_up"]},
    ),
    "adapters": _case(4, {"expert": 4}, model={"lora": {"rank": 8}}),
    "capacity": _case(4, {"expert": 4}, moe={"capacity_factor": 1.25}),
    "losses": _case(4, {"expert": 4}, moe={"aux_loss": 0.01, "z_loss": 0.01}),
    "four sequences": _case(4, {"expert": 4}, micro=4),
    "wide experts": _case(4, {"expert": 4}, moe={"ffn_hidden": 1024}),
    "twice an even load": _case(4, {"expert": 4}, moe={"allowance": 2.0}),
    "slots that do not divide": _case(8, {"expert": 8}, moe={**_MANY, "top_k": 3, "allowance": 1.37}),
}
QUICK = ("zb_v", "expert_tensor, all_gather", "latent attention", "adapters")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_experts_on_gpus_need_and_send_what_the_plan_says(name: str) -> None:
    """Our own memory within 2 %, bytes sent to the byte."""
    case = CASES[name]
    world, parallel, micro = case["world"], case["parallel"], case.get("micro", 1)
    pipeline = parallel.get("pipeline", 1)
    data = world // (parallel.get("tensor", 1) * parallel.get("context", 1) * pipeline)
    config = config_of(
        DEFAULTS,
        model={**case.get("model", {}), "moe": {**_MOE, **case.get("moe", {})}},
        batch={"micro": micro, "global": data * micro * 2 * pipeline},
        parallel=parallel,
        memory=case.get("memory", {}),
    )
    resolved = resolve(config, Layout.from_settings(config.parallel, world))
    for rank in {0, world - 1} if pipeline > 1 else {0}:
        run = dry_run(resolved, rank)
        assert run.predicted_sent == run.sent, f"rank {rank}"
        assert run.predicted_peak == pytest.approx(run.peak, rel=0.02), f"rank {rank}"
