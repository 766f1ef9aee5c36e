"""Mixtures of experts in all layouts around them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any

from .. import pool as worker_pool
from .harness import SMALL, Case, Variant, adapted, covering, up_to_three_microbatches

EXPERT_SETTINGS = (
    "expert", "expert_tensor", "tensor_axis", "context", "pipeline", "data", "zero", "recompute",
    "dispatcher", "mixture",
)  # fmt: skip


def _mixture(name: str, experts: dict[str, Any], masked: float = 0.0, **traits: Any) -> Variant:
    """A model with experts; widths are odd, and those of experts differ from the dense layers'."""
    model = {
        **SMALL,
        "layers": 4,
        "vocab": 71,
        "moe": {"ffn_hidden": 12, **experts},
        **traits.pop("model", {}),
    }
    return Variant(name, model, masked=masked, **traits)


MIXTRAL = _mixture("experts", {"experts": 4, "top_k": 2, "aux_loss": 0.3, "z_loss": 0.1}, masked=0.3)
DEEPSEEK = _mixture(
    "experts in groups, bias, shared",
    {
        "experts": 8,
        "top_k": 3,
        "score": "sigmoid",
        "groups": 4,
        "top_groups": 2,
        "scale": 2.5,
        "shared_experts": 2,
        "first_dense": 1,
        "balance": "sequence",
        "aux_loss": 0.2,
        "bias_rate": 0.05,
    },
    micro=2,
)
CAPACITY = _mixture(
    "experts, capacity, isolate",
    {
        "experts": 4,
        "top_k": 2,
        "score": "topk_softmax",
        "every": 2,
        "capacity_factor": 0.7,
        "balance": "step",
        "aux_loss": 0.5,
        "shared_experts": 1,
        "shared_gate": True,
    },
    documents="isolate",
)
SKEWED = _mixture(
    "experts, all with equal scores, dropout",
    {"experts": 8, "top_k": 1, "normalise": False, "z_loss": 0.2},
    model={"dropout": 0.1},
    micro=2,
    equal_scores=True,
)
MIXTURES = (MIXTRAL, DEEPSEEK, CAPACITY, SKEWED)

_AROUND = ((2, "1f1b", 1), (2, "interleaved", 2), (2, "zb_h1", 1), (2, "zb_v", 2))


def expert_cases() -> Iterator[Case]:
    """Degrees of experts and of what is around them, on up to 8 ranks; schedules take turns."""
    schedules = cycle(_AROUND)
    for variant, expert, expert_tensor, (tensor, sequence), context, pipeline, data in product(
        MIXTURES, (1, 2, 4), (1, 2), ((1, True), (2, True), (2, False)), (1, 2), (1, 2), (1, 2, 4)
    ):
        stage = tensor * context * data
        if stage * pipeline > worker_pool.MAX_RANKS or stage % (expert * expert_tensor) or stage == 1:
            continue
        around = next(schedules) if pipeline > 1 else (1, "1f1b", 1)
        for zero, recompute, dispatcher in product(
            range(4), ("none", "selective", "full"), ("alltoall", "all_gather")
        ):
            layout = Case(variant, data, tensor, sequence, *around, zero=zero, recompute=recompute)
            yield replace(
                layout, context=context, expert=expert, expert_tensor=expert_tensor, dispatcher=dispatcher
            )


ADAPTED = tuple(
    adapted(
        variant,
        "LoRA of experts",
        train,
        rank=3,
        alpha=5.0,
        targets=["q", "experts.gate_up", "experts.down", *more],
    )
    for variant, train, more in ((MIXTRAL, ["router"], []), (DEEPSEEK, "all", ["ffn.shared.*"]))
)
ADAPTED_EXPERTS = up_to_three_microbatches(
    (
        Case(ADAPTED[0], data=2, tensor=2, expert=2, expert_tensor=2, zero=3, dispatcher="alltoall"),
        Case(ADAPTED[1], data=2, context=2, expert=4, pipeline=2, schedule="zb_h1", recompute="full"),
        Case(ADAPTED[0], data=2, expert=2, zero=2, recompute="selective", dispatcher="all_gather"),
    )
)
UNGATED = _mixture(
    "experts without a gate",
    {"experts": 4, "top_k": 2, "z_loss": 0.1},
    model={"family": "gpt2", "kv_heads": 8, "mlp_bias": False},
)
IMPOSED = (
    replace(DEEPSEEK, name="experts imposed, in groups, shared", imposed="experts"),
    replace(CAPACITY, name="experts imposed with weights, isolate", imposed="weights"),
)
IMPOSED_EXPERTS = up_to_three_microbatches(
    (
        Case(IMPOSED[0], tensor=2, context=2, expert=4, pipeline=2, schedule="zb_v", virtual=2),
        Case(IMPOSED[1], 2, 2, False, expert=2, zero=3, recompute="full", dispatcher="all_gather"),
    )
)
OFFLOADED = replace(MIXTRAL, name="experts, offload", overrides={"memory": {"offload": "optimizer"}})
OFFLOADED_EXPERTS = up_to_three_microbatches(
    (
        Case(OFFLOADED, data=2, expert=2, zero=3, pipeline=2),
        Case(OFFLOADED, data=2, tensor=2, expert=2, zero=1),
    )
)
COMPILED_EXPERTS = up_to_three_microbatches(
    (
        Case(MIXTRAL, data=2, expert=2, zero=1, compile="pointwise"),
        Case(CAPACITY, data=2, tensor=2, expert=4, zero=3, recompute="selective", compile="pointwise"),
        Case(DEEPSEEK, data=2, context=2, expert=2, pipeline=2, zero=2, compile="pointwise"),
    )
)
FURTHER_EXPERTS = (
    OFFLOADED_EXPERTS[0],
    *ADAPTED_EXPERTS[:2],
    *IMPOSED_EXPERTS,
    Case(UNGATED, data=2, tensor=2, expert=2, expert_tensor=2, zero=1, recompute="full", samples=6),
)
EVERY_EXPERT = up_to_three_microbatches(expert_cases())
EXPERT_GRID = covering(sorted(EVERY_EXPERT, key=lambda case: case.world), EXPERT_SETTINGS, 2)
MORE_EXPERTS = (*EVERY_EXPERT[::137], *ADAPTED_EXPERTS[2:], OFFLOADED_EXPERTS[1], *COMPILED_EXPERTS)
"""For the slow sweep."""
