"""All layouts on one GPU: the parity grid in float64, by ranks that share it, over ``tests/staged.py``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest

from tests.parity.context_cases import CONTEXT_GRID
from tests.parity.expert_cases import EXPERT_GRID
from tests.parity.harness import (
    ADAPTED_GRID,
    COPIED_GRID,
    GRID,
    PIPELINE_GRID,
    STATE_GRID,
    TOLERANCE,
    Case,
    References,
    errors,
    name_of,
)
from tests.parity.harness import (
    run as run_case,
)
from tests.pool import Pool

from .record import Record

TIMEOUT = 20.0
"""Seconds of a collective; ranks that hang are given up after twice as long."""


def run(record: Record) -> None:
    """Cases of all grids in turn, as many as there is time for."""
    device = "cpu" if record.pretend else "cuda:0"
    pool = Pool("staged", TIMEOUT)
    references = References(pool, device)
    chosen = cases()[:6] if record.pretend else cases()
    passed, slowest = 0, 0.0
    for number, case in enumerate(chosen):
        if record.left() < 2 * slowest + 3:
            record.absent("remaining_cases", f"no time for {len(chosen) - number} of {len(chosen)}")
            break
        begin = time.monotonic()
        row = {"number": number, "case": name_of(case), "ranks": case.world}
        with record.attempt(f"case {number}: {row['case']}"):
            row["error"] = max(errors(run_case(pool, case, device=device), references.of(case)).values())
            if not row["error"] < TOLERANCE:
                raise RuntimeError(f"its error is {row['error']:.3g}")
            passed += 1
        seconds = time.monotonic() - begin
        slowest = max(slowest, seconds) if number else slowest  # the first one starts the ranks
        record.add("cases", row | {"seconds": seconds})
        record.put("cases_passed", {"passed": passed, "run": number + 1, "all": len(chosen)})
    pool.close()


def cases() -> Sequence[Case]:
    """The grids in turns: whenever the time is up, something of each has been run. A case of few ranks comes
    first in each: it says most plainly what is wrong."""
    grids = (GRID, STATE_GRID, CONTEXT_GRID, PIPELINE_GRID, EXPERT_GRID, COPIED_GRID, ADAPTED_GRID)
    first = [min(grid, key=lambda case: case.world) for grid in grids]
    later = [[case for case in grid if case != begin] for grid, begin in zip(grids, first)]
    return [*first, *(case for row in zip_longest(*later) for case in row if case is not None)]
