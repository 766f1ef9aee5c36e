"""The parity grid: every layout gives the numbers of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..pool import Pool
from .harness import GRID, TOLERANCE, VARIANTS, Case, References, errors, run
from .mutations import MUTATIONS
from .table import PAGE, rows


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
    except AssertionError:
        return  # copies of a tensor differ between ranks, or ranks report different losses
    assert max(found.values()) > 1e3 * TOLERANCE, f"{name}: not noticed: {found}"


@pytest.mark.parametrize("layout", [(1, 1, True), (2, 1, True), (1, 2, False), (2, 2, True)])
@pytest.mark.parametrize("index", range(len(VARIANTS)))
def test_bf16_stays_near_float64(
    index: int, layout: tuple[int, int, bool], pool: Pool, references: References
) -> None:
    """A bf16 number is off by 2^-9 of itself at most; losses are means over many such numbers."""
    variant = replace(VARIANTS[index], overrides={"precision": {"dtype": "bf16"}})
    losses, wanted = run(pool, Case(variant, *layout)).losses, references.of(variant.name).losses
    assert losses != wanted
    assert losses == pytest.approx(wanted, rel=2**-8)


def test_the_published_table_lists_the_grid() -> None:
    text = PAGE.read_text(encoding="utf-8")
    header = next(line for line in text.splitlines() if line.startswith("| layout"))
    assert [name.strip() for name in header.split("|")[2:-1]] == [variant.name for variant in VARIANTS]
    table = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| data")]
    assert [row[0].strip() for row in table] == rows()
    assert all(float(number) < TOLERANCE for row in table for number in row[1:])
    assert [line[2:].split(":")[0] for line in text.splitlines() if line.startswith("- ")] == list(MUTATIONS)
