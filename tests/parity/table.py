"""Writes ``docs/parity.md`` from a run of the grid: ``python -m tests.parity.table``."""

from pathlib import Path

from ..pool import Pool
from .context_cases import CONTEXT_GRID, CONTEXT_PAIRS, CONTEXT_TRIPLES, EVERY_CONTEXT
from .expert_cases import EVERY_EXPERT, EXPERT_GRID
from .harness import (
    ADAPTED_GRID,
    COMPILED_GRID,
    COPIED_GRID,
    EVERY_STATE,
    GRID,
    LAYOUTS,
    PIPELINE_GRID,
    STATE_GRID,
    STEPS,
    TOLERANCE,
    VARIANTS,
    Case,
    References,
    errors,
    run,
)
from .latent_cases import LATENT_GRID
from .mutations import MUTATIONS
from .part_cases import PARTS_GRID

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"

_LATER = (*STATE_GRID, *COMPILED_GRID, *COPIED_GRID, *ADAPTED_GRID, *LATENT_GRID, *PARTS_GRID)
_OTHERS = len(PIPELINE_GRID) + len(_LATER) + len(CONTEXT_GRID) + len(EXPERT_GRID)
_HEAD = f"""\
<!-- Written by 'python -m tests.parity.table'. Do not edit. -->

# Parity: every layout gives the numbers of one process

Each cell is a run of {STEPS} steps on N gloo ranks in float64 against one process: the largest relative
error of the losses, gradient norms, every gradient and every weight. `make test` runs {len(GRID)} cells of
the first table and all {_OTHERS} of the others, `pytest -m slow` all of the
first; both require less than {TOLERANCE:.0e}.

All cells accumulate gradients over several microbatches, clip, and use several gradient buckets. Sizes are
deliberately irregular: heads wider than `hidden / heads`, vocabularies of which some ranks hold padding only,
samples that lose most of their targets, documents of one token. Half of the models multiply in five chunks,
two on 8 ranks (`parallel.tensor_chunks`). Worlds have at most 8 ranks, so data 4 x
tensor 4 is not among them.
"""

_PIPELINES = """
## Pipelines

Every schedule on 2 and 4 pipeline ranks, with layers divided by cost, evenly or unevenly, from one microbatch
to eight. Layouts, models, numbers of microbatches and splits alternate here; `pytest -m slow` runs every
schedule in every layout of up to 8 ranks, and every test run adds a random sample.

| stages and schedule | layout around them | model and batch | largest error |
|---|---|---|---|"""

_STATES = f"""
## Sharded state and recompute

ZeRO levels 0 to 3 with replicas, recompute and pipelines, all with dropout in embeddings, residual branches
and attention. Of the {len(EVERY_STATE)} combinations of up to 8 ranks these {len(STATE_GRID)} contain every
pair of settings; `pytest -m slow` runs all, and every test run adds a random sample. In the rows with
`compile pointwise` pointwise functions are compiled (`run.compile: pointwise`), against one process in which
they are not. In the {len(COPIED_GRID)} rows with `kv_heads` several tensor ranks hold the same KV heads; in
the next {len(ADAPTED_GRID)} rows weights are frozen (`model.train`), with adapters (`model.lora`) or without.
In the {len(LATENT_GRID)} rows after these attention is multi-head latent attention (`model.mla`); in the
last {len(PARTS_GRID)} rows every layer recomputes parts (`memory.recompute_parts`).

| state | layout | stages and schedule | model and batch | largest error |
|---|---|---|---|---|"""

_CONTEXT = f"""
## Context parallel

Every method on 2 and 4 context ranks, with joined and isolated documents of one token up to the whole
sequence, in the layouts around it. Of {len(EVERY_CONTEXT)} combinations of up to 8 ranks these
{len(CONTEXT_PAIRS)} contain every pair of settings, and `pytest -m slow` runs {len(CONTEXT_TRIPLES)} that
contain every three; every test run adds a random one. In the last {len(CONTEXT_GRID) - len(CONTEXT_PAIRS)}
rows there are fewer KV heads than ranks, adapters, frozen stages, and blocks of odd sizes.

| state | layout | stages and schedule | model and batch | largest error |
|---|---|---|---|---|"""

_EXPERTS = f"""
## Mixtures of experts

Expert degrees 1, 2 and 4, parts of experts on 2 ranks, both dispatchers, in the layouts around them: losses
that balance loads over microbatches, sequences and steps, groups, biases, shared experts, capacities, and
scores that are all equal, so that some experts and ranks have no token. Of {len(EVERY_EXPERT):,} combinations
of up to 8 ranks these {len(EXPERT_GRID)} contain every pair of settings; every test run adds a random one.

| state | layout | stages and schedule | model and batch | largest error |
|---|---|---|---|---|"""

_MUTATIONS = """
## Mutations are detected

The same tests run with the code broken in each of these ways, and require an error of a thousand times the
tolerance, or ranks that disagree with each other:
"""


def rows() -> list[str]:
    """The layouts, one per table row."""
    return [Case(VARIANTS[0], *layout).layout for layout in LAYOUTS]


def pipeline_rows() -> list[list[str]]:
    """The first columns of the table of pipelines."""
    return [[case.stages, case.layout, case.work] for case in PIPELINE_GRID]


def state_rows() -> list[list[str]]:
    """The first columns of the table of sharded state."""
    return [[case.state, case.layout, case.stages, case.work] for case in _LATER]


def context_rows() -> list[list[str]]:
    """The first columns of the table of context parallel."""
    return [[case.state, case.layout, case.stages, case.work] for case in CONTEXT_GRID]


def expert_rows() -> list[list[str]]:
    """The first columns of the table of experts."""
    return [[case.state, case.layout, case.stages, case.work] for case in EXPERT_GRID]


def cell(largest: dict[str, float]) -> str:
    """The largest error, to one digit."""
    return f"{max(largest.values()):.0e}"


def page(pool: Pool) -> str:
    """Run everything and describe it."""
    references = References(pool)
    lines = [_HEAD, "| layout | " + " | ".join(variant.name for variant in VARIANTS) + " |"]
    lines.append("|---|" + "---|" * len(VARIANTS))
    for layout in LAYOUTS:
        cases = [Case(variant, *layout) for variant in VARIANTS]
        cells = [cell(errors(run(pool, case), references.of(case))) for case in cases]
        lines.append(f"| {cases[0].layout} | " + " | ".join(cells) + " |")
    lines.append(_PIPELINES)
    for row, case in zip(pipeline_rows(), PIPELINE_GRID):
        lines.append(f"| {' | '.join(row)} | {cell(errors(run(pool, case), references.of(case)))} |")
    lines.append(_STATES)
    for row, case in zip(state_rows(), _LATER):
        lines.append(f"| {' | '.join(row)} | {cell(errors(run(pool, case), references.of(case)))} |")
    lines.append(_CONTEXT)
    for row, case in zip(context_rows(), CONTEXT_GRID):
        lines.append(f"| {' | '.join(row)} | {cell(errors(run(pool, case), references.of(case)))} |")
    lines.append(_EXPERTS)
    for row, case in zip(expert_rows(), EXPERT_GRID):
        lines.append(f"| {' | '.join(row)} | {cell(errors(run(pool, case), references.of(case)))} |")
    lines.append(_MUTATIONS)
    for name, mutation in MUTATIONS.items():
        case = mutation.case
        try:
            how = f"error {cell(errors(run(pool, case, name), references.of(case)))}"
        except AssertionError:
            how = "ranks disagree"
        where = f"{case.layout}, {case.stages}" if case.pipeline > 1 else case.layout
        lines.append(f"- {name}: {how} ({case.variant.name}; {where})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    workers = Pool()
    try:
        PAGE.write_text(page(workers), encoding="utf-8")
    finally:
        workers.close()
