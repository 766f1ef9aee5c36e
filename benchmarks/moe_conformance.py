"""Ten failures with mixtures of experts that users of training systems have met, as checks of a framework.

    python benchmarks/moe_conformance.py --framework hexad|transformers|megatron [--check N ...] [--json FILE]
    python benchmarks/moe_conformance.py --adapter MODULE:CLASS        # another framework

Each check trains a small model, with weights, tokens and layouts given, on gloo ranks of this host, and
compares a figure with a closed formula or with the same training in float64 in plain PyTorch
(``conformance/reference.py``). Another framework implements ``conformance.scenario.Adapter``. With ``--json``
the framework's results are added to those of others in the file.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from conformance.checks import CHECKS, outcome
from conformance.playing import Bench
from conformance.ranks import run
from facts import facts

ADAPTERS = {
    "hexad": "conformance.hexad_adapter:HexadAdapter",
    "transformers": "conformance.transformers_adapter:TransformersAdapter",
    "megatron": "conformance.megatron_adapter:MegatronAdapter",
}


def checked(bench: Bench, numbers: list[int]) -> list[dict[str, Any]]:
    """The results of checks; printed as they come."""
    rows = []
    for check in (check for check in CHECKS if check.number in numbers):
        findings = check.findings(bench)
        figures = [finding.figure for finding in findings if finding.figure is not None]
        tried = sum(finding.outcome != "not possible" for finding in findings)
        row = {
            "check": check.number,
            "title": check.title,
            "figure_is": check.figure,
            "outcome": outcome(findings),
            "figure": max(figures, default=None),
            "tried": tried,
            "scenarios": [finding._asdict() for finding in findings],
        }
        rows.append(row)
        figure = "" if row["figure"] is None else f"{row['figure']:.2g}"
        print(f"{check.number:2d} {row['outcome']:12} {figure:>8}  {tried}/{len(findings)}  {check.title}")
        for finding in findings:
            if finding.outcome != "passed":
                figure = "" if finding.figure is None else f" ({finding.figure:.2g})"
                print(f"     {finding.outcome}: {finding.scenario}: {finding.note}{figure}", flush=True)
    return rows


def main() -> None:
    """Run checks; a table and JSON."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Figures are relative errors where nothing else is said.",
    )
    parser.add_argument("--framework", choices=ADAPTERS, default="hexad")
    parser.add_argument("--adapter", metavar="MODULE:CLASS", help="in place of a framework")
    numbers = [check.number for check in CHECKS]
    parser.add_argument("--check", nargs="+", type=int, choices=numbers, default=numbers, metavar="N")
    parser.add_argument("--json", type=Path, help="add the results to this file")
    options = parser.parse_args()
    module, _, name = (options.adapter or ADAPTERS[options.framework]).partition(":")
    adapter = getattr(importlib.import_module(module), name)
    torch.set_num_threads(1)
    rows = checked(Bench(adapter, run), options.check)
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        results = facts(adapter.package)
        results["versions"] = known.get("versions", {}) | results["versions"]
        results["command"] = "python benchmarks/moe_conformance.py --framework NAME --json FILE"
        results["frameworks"] = known.get("frameworks", {}) | {adapter.name: rows}
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row["outcome"] == "failed" for row in rows))


if __name__ == "__main__":
    main()
