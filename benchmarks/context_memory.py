"""Activation memory of long sequences by context degree: predicted, and measured on ranks here.

    python benchmarks/context_memory.py [--tokens 16384 32768 65536] [--context 1 2 4] [--json FILE]

A layer of small width, so that a CPU computes its attention in reasonable time. Memory is the peak of a step
above what is held between steps: activations, and what is needed for a moment.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from facts import facts


def measured(tokens: int, context: int) -> dict[str, float]:
    """Of the rank that needs the most, in bytes."""
    from tests.memory.measure import measure, measured_config
    from tests.pool import Pool

    config = measured_config(
        model={"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn_hidden": 96, "vocab": 128},
        data={"sequence": tokens},
        batch={"micro": 1, "global": 1},
        parallel={"context": context, "bucket_mb": 1},
    )
    pool = Pool()
    try:
        largest = max(pool.run(context, measure, config, context), key=lambda of_rank: of_rank.peak)
    finally:
        pool.close()
    plan = largest.plan
    return {"measured": largest.peak - largest.state, "predicted": plan.total - plan.state}


def main() -> None:
    """Measure; a table and JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 32768, 65536])
    parser.add_argument("--context", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for context in options.context:
            row = {"tokens": tokens, "context": context, **measured(tokens, context)}
            rows.append(row)
            mib, error = row["measured"] / 2**20, row["predicted"] / row["measured"] - 1
            print(f"{tokens:6d} tokens, context {context}: {mib:7.2f} MiB measured, {error:+.2%}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(facts() | {"memory": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
