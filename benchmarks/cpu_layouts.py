"""Steps of many layouts on this host's CPU, measured beside the planner's prediction.

    python benchmarks/cpu_layouts.py [--hardware calibrated.yaml] [--json FILE] [--only NAME ...]

Without ``--hardware`` the host is calibrated first (``hexad plan --calibrate``). Layouts have one rank or
two, each with one thread, of a model that calibration has not seen. Each is started anew, makes a step that
does not count, then ``--steps`` of which the median counts; ``--rounds`` times, of which the median counts.
Order counts pairs of layouts whose measured steps differ by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from facts import facts
from turns import Program, Step, serve, wall

MODEL = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn_hidden": 1408, "vocab": 6144}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro 1": (1, {}),
    "micro 4": (1, {"batch.micro": 4}),
    "recompute full": (1, {"memory.recompute": "full"}),
    "recompute selective": (1, {"memory.recompute": "selective"}),
    "data 2": (2, {}),
    "data 2, zero 1": (2, {"parallel.zero": 1}),
    "data 2, zero 2": (2, {"parallel.zero": 2}),
    "data 2, zero 3": (2, {"parallel.zero": 3}),
    "data 2, zero 3, micro 4": (2, {"parallel.zero": 3, "batch.micro": 4}),
    "tensor 2": (2, {"parallel.tensor": 2}),
    "tensor 2, micro 4": (2, {"parallel.tensor": 2, "batch.micro": 4}),
    "tensor 2, sequence": (2, {"parallel.tensor": 2, "parallel.sequence": True}),
    "context 2, ring": (2, {"parallel.context": 2, "parallel.context_method": "ring"}),
    "context 2, ulysses": (2, {"parallel.context": 2, "parallel.context_method": "ulysses"}),
    "context 2, all_gather": (2, {"parallel.context": 2, "parallel.context_method": "all_gather"}),
    "pipeline 2": (2, {"parallel.pipeline": 2}),
    "pipeline 2, micro 4": (2, {"parallel.pipeline": 2, "batch.micro": 4}),
    "pipeline 2, interleaved": (
        2,
        {"parallel.pipeline": 2, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2},
    ),
    "pipeline 2, zb_h1": (2, {"parallel.pipeline": 2, "parallel.schedule": "zb_h1"}),
}
"""Ranks and settings by name."""


def config_of(name: str, dtype: str) -> Any:
    """The configuration of a layout."""
    from hexad import load_config

    settings = LAYOUTS[name][1]
    return load_config(
        {
            "run": {"device": "cpu"},
            "model": MODEL,
            "data": {"sequence": 384},
            "batch": {"micro": 1, "global": 8},
            "precision": {"dtype": dtype},
        },
        [f"{key}={json.dumps(value)}" for key, value in settings.items()],
    )


def worker(name: str, dtype: str) -> None:
    """One rank of a layout."""

    def start() -> Step:
        import torch

        from hexad import Engine, Layout, Mesh, Microbatch

        config = config_of(name, dtype)
        mesh = Mesh.create(Layout.from_settings(config.parallel, LAYOUTS[name][0]), torch.device("cpu"))
        engine = Engine(config, mesh)
        torch.manual_seed(mesh.data.rank)
        micro = config.batch.micro
        count = config.batch.global_ // micro // mesh.data.size
        ids = torch.randint(0, 6144, (count, micro, config.data.sequence + 1))
        batch = [Microbatch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]
        return lambda _: {"loss": engine.train_step(batch).loss}

    serve(start, LAYOUTS[name][0])


def measured(name: str, dtype: str, steps: int) -> float:
    """Median seconds of a step."""
    command = [sys.executable, __file__, "--worker", name, dtype]
    program = Program([command] * LAYOUTS[name][0])
    try:
        program.wait()
        for _ in range(steps + 1):
            program.step()
        program.close()
    finally:
        program.kill()
    return median(wall(step) for step in program.steps[1:])


def predicted(name: str, dtype: str, hardware: str) -> float:
    """Seconds of a step by the planner."""
    from hexad import Layout
    from hexad.planning import resolve
    from hexad.planning.job import Job
    from hexad.planning.links import Cluster
    from hexad.planning.step_time import Predictor
    from hexad.topology.hardware import load_hardware

    config, ranks = config_of(name, dtype), LAYOUTS[name][0]
    job = Job.of(resolve(config, Layout.from_settings(config.parallel, ranks)))
    return Predictor(job, Cluster(load_hardware(hardware), ranks)).step.total


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = options.hardware or Path(directory) / "calibrated.yaml"
        if options.hardware is None:
            command = [Path(sys.executable).with_name("hexad"), "plan", "--calibrate", "--output", path]
            subprocess.run(command, check=True)
        rows = []
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(options.rounds):
            for dtype in options.dtypes:
                for name in options.only:
                    times.setdefault((dtype, name), []).append(measured(name, dtype, options.steps))
        for (dtype, name), values in times.items():
            row = {"dtype": dtype, "layout": name, "ranks": LAYOUTS[name][0], "measured": median(values)}
            rows.append(row | {"predicted": predicted(name, dtype, str(path))})
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        print(
            f"{row['dtype']:5s} {row['layout']:26s}{row['measured']:9.3f}{row['predicted']:9.3f}{error:+8.1%}"
        )
    mape = mean(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    pairs = [
        (one["measured"] < other["measured"]) == (one["predicted"] < other["predicted"])
        for one, other in combinations(rows, 2)
        if max(one["measured"], other["measured"]) > 1.15 * min(one["measured"], other["measured"])
    ]
    print(f"{len(rows)} layouts: MAPE {mape:.1%}; order right in {sum(pairs)} of {len(pairs)} pairs")
    if options.json:
        document = {**facts(), "mape": mape, "pairs": len(pairs), "right": sum(pairs), "predictions": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
