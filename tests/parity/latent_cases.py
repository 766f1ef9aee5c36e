"""Multi-head latent attention in all layouts around it."""

from dataclasses import replace
from itertools import cycle, product

from .. import pool as worker_pool
from .harness import (
    ALL,
    DROP,
    DROPOUT,
    LAYOUTS,
    SCHEDULES,
    SMALL,
    Case,
    Variant,
    adapted,
    deep,
    up_to_three_microbatches,
)

# Latent attention: values narrower and wider than keys, queries from a latent vector and direct ones.
_MLA = {"q_rank": 14, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 7}
_LATENT_MODEL = {key: value for key, value in SMALL.items() if key not in ("kv_heads", "head_dim")}
_LATENT_MODEL |= {"family": "deepseek_v3"}
LATENT = (
    Variant("latent attention, masks", {**_LATENT_MODEL, "vocab": 101, "mla": _MLA}, masked=0.3, micro=2),
    Variant(
        "latent attention, direct queries, wide values, isolate",
        {**_LATENT_MODEL, "vocab": 83, "mla": {**_MLA, "q_rank": None, "value_dim": 13}},
        "isolate",
    ),
)
_LATENT_DROPPED = replace(
    LATENT[0], name=f"{LATENT[0].name}, dropout", model={**LATENT[0].model, **DROPOUT, "layers": 2}
)
_LATENT_ADAPTED = adapted(deep(LATENT[0], 3), "LoRA with dropout", **DROP)
_LATENT = (
    Case(LATENT[0], tensor=2),
    Case(LATENT[1], tensor=2, sequence=False, recompute="selective"),
    Case(LATENT[1], context=2, method="ring", zero=1, data=2),
    Case(_LATENT_DROPPED, tensor=2, context=2, method="ulysses", recompute="selective"),
    Case(_LATENT_ADAPTED, 1, 2, True, 2, "zb_h1", zero=0),
    Case(deep(LATENT[0], 4), 2, 2, True, 2, "zb_v", 2, zero=2, recompute="full"),
    Case(LATENT[1], 2, 2, zero=3, context=2, method="all_gather", recompute="selective"),
)
LATENT_GRID = up_to_three_microbatches(_LATENT)
"""Latent attention in all layouts around it."""


def latent_cases() -> tuple[Case, ...]:
    """Latent attention by every method of context parallel, in every schedule, state and recompute."""
    turns = cycle((*LATENT, _LATENT_DROPPED, _LATENT_ADAPTED, adapted(LATENT[1], "LoRA", **ALL)))
    schedules, states = cycle(SCHEDULES), cycle(product((0, 1, 2, 3), ("none", "selective", "full")))
    cases = []
    for (data, tensor, sequence), (context, method), pipeline in product(
        ((1, 1, True), *LAYOUTS),
        ((1, "ring"), *((2, method) for method in ("ring", "ulysses", "ulysses_ring", "all_gather"))),
        (1, 2),
    ):
        if not 1 < data * tensor * context * pipeline <= worker_pool.MAX_RANKS:
            continue
        (schedule, virtual), (zero, recompute) = next(schedules), next(states)
        sequence = sequence and tensor * context <= 4  # tokens divide
        variant = deep(next(turns), 5 if pipeline * virtual <= 4 else 8)
        if pipeline == 1:
            variant, schedule, virtual = deep(variant, 2), "1f1b", 1
        cases.append(
            Case(
                variant, data, tensor, sequence, pipeline, schedule, virtual, zero=zero, recompute=recompute,
                context=context, method=method, group_size=2 if method == "ulysses_ring" else "auto",
            )
        )  # fmt: skip
    return up_to_three_microbatches(cases)


EVERY_LATENT = (
    *latent_cases(),
    replace(LATENT_GRID[0], compile="pointwise"),
    # Deferred products of the same inputs, of which one gathers them.
    *up_to_three_microbatches([Case(deep(LATENT[1], 3), 1, 2, True, 2, "zb_h1")]),
)
