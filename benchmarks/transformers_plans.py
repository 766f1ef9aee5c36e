"""Models of ``transformers`` divided over tensor ranks by the plans that they carry: which compute what one
process does?

    python benchmarks/transformers_plans.py --output benchmarks/results/transformers_plans.json

Every configuration with a plan (``base_model_tp_plan``) is built small, with random weights, in float64, and
trains three steps on two ranks and on one. Experts and latent attention are refused; models of images and
sound, whose inputs are not token ids, are not tried.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from facts import facts

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}

from tests.conversion.small_models import LOW_RATE, Kind, kinds, trained  # noqa: E402
from tests.conversion.test_transformers import largest_difference  # noqa: E402
from tests.pool import Pool, RankError  # noqa: E402

LIMIT = 1e-9
"""Relative difference of losses, and difference of weights."""


def outcome(kind: Kind, pool: Pool) -> dict[str, Any]:
    """What became of one configuration, and why."""
    if kind.of_experts:
        return {"outcome": "refused", "why": f"experts or latent attention: {', '.join(kind.of_experts)}"}
    try:
        trained(kind.build())
    except LookupError as error:
        return {"outcome": "not built", "why": str(error)}
    except Exception as error:  # whatever a model raises that is called with token ids alone
        return {"outcome": "not built", "why": _line(error)}
    try:
        losses, weights = largest_difference(kind, 2, pool, rate=LOW_RATE)
    except RankError as error:
        if "would not compute a rank's part" in str(error):
            return {
                "outcome": "unfit",
                "why": "the forward pass does not fit the plan, in transformers neither",
            }
        lines = [line for line in str(error).splitlines() if "Error: " in line]
        return {"outcome": "fails", "why": lines[-1].strip()[:200]}
    same = losses < LIMIT and weights < LIMIT
    return {"outcome": "works" if same else "differs", "losses": losses, "weights": weights}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def main() -> None:
    """Try all and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    import transformers

    pool = Pool(timeout=60)
    rows = []
    for kind in kinds():
        rows.append({"model": kind.folder, "configuration": kind.name, **outcome(kind, pool)})
        print(json.dumps(rows[-1]), flush=True)
    pool.close()
    counts = Counter(row["outcome"] for row in rows)
    print(dict(counts))
    result = facts() | {"plans": rows, "counts": dict(counts)}
    result["dtype"] = f"fp64, transformers {transformers.__version__}"
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
