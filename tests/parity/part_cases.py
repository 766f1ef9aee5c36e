"""Parts of layers that are recomputed (``memory.recompute_parts``), in all layouts around them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, cycle, product

from .. import pool as worker_pool
from .expert_cases import ADAPTED, CAPACITY, DEEPSEEK, MIXTRAL
from .harness import DROP, LAYOUTS, SCHEDULES, VARIANTS, Case, adapted, deep, up_to_three_microbatches
from .latent_cases import LATENT

PARTS = ("norms", "moe_act", "mla_up")
_LATENT_EXPERTS = tuple(
    replace(
        mixture,
        name=f"{latent.name}, {mixture.name}",
        model={**latent.model, "moe": mixture.model["moe"], "layers": 4},
        documents=latent.documents,
    )
    for latent, mixture in zip(LATENT, (DEEPSEEK, CAPACITY))
)
_ADAPTED = tuple(adapted(variant, "LoRA with dropout", **DROP) for variant in LATENT)
_PARTS = (
    Case(_LATENT_EXPERTS[0], 2, 2, True, zero=3, expert=2, parts=PARTS),
    Case(deep(LATENT[1], 3), 1, 2, True, 2, "zb_h1", parts=("mla_up",)),
    Case(_LATENT_EXPERTS[1], context=2, method="ulysses", recompute="selective", parts=("mla_up",)),
    Case(MIXTRAL, 2, pipeline=2, schedule="zb_v", virtual=2, zero=2, expert=2, parts=("moe_act", "norms")),
)
_MORE = Case(deep(_ADAPTED[0], 3), 1, 2, True, 2, "zb_h1", parts=("mla_up",))
PARTS_GRID = up_to_three_microbatches(_PARTS)
"""Every part, and every axis that a repeated projection could disturb."""


def _part_cases() -> Iterator[Case]:
    """Every set of parts, beside every kind of recompute, in every schedule, level of ZeRO and layout."""
    models = cycle((*LATENT, *_LATENT_EXPERTS, *_ADAPTED, DEEPSEEK, MIXTRAL, ADAPTED[0], VARIANTS[5]))
    sets = cycle(chain.from_iterable(combinations(PARTS, number) for number in (1, 2, 3)))
    schedules, states = cycle(SCHEDULES), cycle(product((0, 1, 2, 3), ("none", "selective", "full")))
    for (data, tensor, sequence), (context, method), pipeline in product(
        ((1, 1, True), *LAYOUTS),
        ((1, "ring"), *((2, method) for method in ("ring", "ulysses", "ulysses_ring", "all_gather"))),
        (1, 2),
    ):
        if data * tensor * context * pipeline > worker_pool.MAX_RANKS:
            continue
        (schedule, virtual), (zero, recompute) = next(schedules), next(states)
        variant = deep(next(models), 5 if pipeline * virtual <= 4 else 8)
        if pipeline == 1:
            schedule, virtual = "1f1b", 1
        yield Case(
            variant, data, tensor, sequence and tensor * context <= 4, pipeline, schedule, virtual, zero=zero,
            recompute=recompute, parts=next(sets), context=context, method=method,
            group_size=2 if method == "ulysses_ring" else "auto",
        )  # fmt: skip


EVERY_PART = (
    *up_to_three_microbatches((_MORE, *_part_cases())),
    *(replace(case, compile="pointwise") for case in PARTS_GRID),
)
