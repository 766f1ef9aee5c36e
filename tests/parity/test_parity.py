"""The parity grid: every layout gives the numbers of one process."""

from __future__ import annotations

import pytest

from ..pool import Pool, RankError
from .harness import GRID, TOLERANCE, VARIANTS, Case, References, errors, run
from .mutations import MUTATIONS


@pytest.fixture(scope="session")
def references(pool: Pool) -> References:
    return References(pool)


@pytest.mark.parametrize("case", GRID, ids=lambda case: f"{case.variant.name} / {case.layout}")
def test_layout_gives_the_numbers_of_one_process(case: Case, pool: Pool, references: References) -> None:
    found = errors(run(pool, case), references.of(case.variant.name))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_grid_notices_broken_code(name: str, pool: Pool, references: References) -> None:
    _, index, data, tensor, sequence = MUTATIONS[name]
    case = Case(VARIANTS[index], data, tensor, sequence)
    try:
        found = errors(run(pool, case, name), references.of(case.variant.name))
    except (AssertionError, RankError):
        return  # copies of a tensor differ between ranks, or ranks report different losses
    assert max(found.values()) > 1e3 * TOLERANCE, f"{name}: not noticed: {found}"
