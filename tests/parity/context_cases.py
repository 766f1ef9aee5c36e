"""Context parallel in all layouts around it."""

from dataclasses import replace
from itertools import cycle, product

from .. import pool as worker_pool
from .harness import ADAPTED_GRID, DROPPED, VARIANTS, Case, Variant, covering, deep

CONTEXT_SETTINGS = (
    "context", "method", "tensor", "pipeline", "data", "zero", "documents", "recompute",
)  # fmt: skip


def long(variant: Variant, length: int = 40) -> Variant:
    """The variant with longer sequences, and with as many more documents: of one token up to all."""
    name = f"{variant.name}, {length} tokens"
    return replace(variant, name=name, overrides={**variant.overrides, "data": {"sequence": length}})


# GQA, learned positions, QK norm, multipliers; tied, windows; dropout in attention.
_JOINED = tuple(long(variant) for variant in (VARIANTS[0], DROPPED[0], VARIANTS[5], VARIANTS[7], DROPPED[2]))
_ISOLATED = tuple(long(variant) for variant in (VARIANTS[1], VARIANTS[6], DROPPED[1], VARIANTS[3]))
_AROUND = ((1, "1f1b", 1), (2, "1f1b", 1), (2, "zb_v", 2), (2, "zb_h1", 1), (2, "interleaved", 2))
_METHODS = ("ring", "ulysses", "ulysses_ring", "all_gather")


def context_cases() -> tuple[Case, ...]:
    """Degrees of 2 and 4 by every method, with all that may be around them."""
    turns = {"join": cycle(_JOINED), "isolate": cycle(_ISOLATED)}
    schedules, balances = cycle(_AROUND[1:]), cycle(("auto", "auto", "zigzag", "work", "none"))
    cases: list[Case] = []
    for context, method, tensor, pipeline, data, zero, documents, recompute in product(
        (2, 4), _METHODS, (1, 2), (1, 2), (1, 2), (0, 1, 3), turns, ("none", "selective", "full")
    ):
        if context * tensor * pipeline * data > worker_pool.MAX_RANKS:
            continue
        variant = next(turns[documents])
        pipelined = next(schedules) if pipeline > 1 else _AROUND[0]
        cases.append(
            Case(
                deep(variant, 5) if pipeline > 1 else variant,
                data,
                tensor,
                len(cases) % 3 != 0,
                *pipelined,
                zero=zero,
                recompute=recompute,
                samples=(2 if pipeline > 1 else 1) * variant.micro * data,
                context=context,
                method=method,
                group_size=2 if method == "ulysses_ring" else "auto",
                balance="auto" if method == "ulysses" else next(balances),
            )
        )
    return tuple(cases)


def _odd(case: Case) -> Case:
    """Shares that are odd: blocks of two sizes."""
    return replace(case, variant=long(case.variant, 9 * case.context * case.tensor))


EVERY_CONTEXT = context_cases()
CONTEXT_PAIRS = covering(EVERY_CONTEXT, CONTEXT_SETTINGS, 2)
CONTEXT_GRID = (
    *CONTEXT_PAIRS,
    # Fewer KV heads than ranks; adapters; frozen stages.
    Case(long(VARIANTS[0]), tensor=2, context=4, method="ulysses_ring", group_size=4),
    replace(ADAPTED_GRID[0], tensor=1, variant=long(ADAPTED_GRID[0].variant), context=2),
    _odd(replace(ADAPTED_GRID[3], tensor=1, context=2, method="all_gather")),
    _odd(Case(VARIANTS[6], context=4)),
)
CONTEXT_TRIPLES = covering(EVERY_CONTEXT, CONTEXT_SETTINGS, 3)
COMPILED_CONTEXT = tuple(replace(case, compile="pointwise") for case in CONTEXT_PAIRS[:3])
