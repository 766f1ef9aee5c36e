"""All models of ``transformers`` that carry a plan: as many work as the page says."""

import json
from pathlib import Path

import pytest

from ..pool import Pool
from .small_models import LOW_RATE, kinds
from .test_transformers import largest_difference

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "transformers_plans.json"


@pytest.mark.slow
def test_models_that_work_still_do(pool: Pool) -> None:
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["plans"]
    works = {(row["model"], row["configuration"]) for row in rows if row["outcome"] == "works"}
    found = {tuple(kind): kind for kind in kinds()}
    assert len(works) > 50
    for name in works & found.keys():  # another version may lack some
        losses, weights = largest_difference(found[name], 2, pool, LOW_RATE)
        assert losses < 1e-9 and weights < 1e-9, name
