"""Step time of DeepSpeed's interface against the ``deepspeed`` package: one script, one unchanged module,
ZeRO 1 to 3 on two ranks of a CPU. Both run at once and alternate, a step each. Needs ``deepspeed``.

    python benchmarks/deepspeed_interface.py --rounds 5 --output benchmarks/results/deepspeed_interface.json
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from facts import facts
from turns import Program, serve, wall

PROGRAMS = ("interface", "package")


def make_step(program: str, stage: int) -> Callable[[str], dict[str, Any]]:
    """The step of a rank: the same script, whichever package it imports."""
    import torch
    import torch.distributed as dist
    from peers.deepspeed_zero import make_step as script
    from peers.plain_torch import (
        ADAMW,
        GLOBAL,
        MICRO,
        Llama,
        Shape,
        load_reference_weights,
        random_tokens,
        reference_weights,
    )

    if program == "interface":
        from hexad.compat import deepspeed

        deepspeed.install()
    shape = Shape()
    model = Llama(shape)
    load_reference_weights(model, reference_weights(shape))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, **ADAMW)
    tokens = random_tokens(shape)[0]
    rows = range(dist.get_rank() * MICRO, GLOBAL, MICRO * dist.get_world_size())
    step = script(model, optimizer, tuple(tokens[row : row + MICRO] for row in rows), stage, "fp32")
    return lambda _: {"loss": step()}


def compare(stage: int, rounds: int) -> dict[str, Any]:
    """Medians of both programs, and of the ratios of neighbouring steps."""
    worker = [sys.executable, __file__, "--worker"]
    programs = {name: Program([[*worker, name, str(stage)]] * 2) for name in PROGRAMS}
    try:
        for program in programs.values():
            program.wait()
        for _ in range(rounds + 1):
            for program in programs.values():
                program.step()
        for program in programs.values():
            program.close()
    finally:
        for program in programs.values():
            program.kill()
    figures: dict[str, Any] = {name: program.figures() for name, program in programs.items()}
    pairs = zip(programs["interface"].steps[1:], programs["package"].steps[1:])
    ours, theirs = figures["interface"], figures["package"]
    return figures | {
        "stage": stage,
        "ratio": ours["step_seconds"] / theirs["step_seconds"],
        "paired": median(wall(one) / wall(other) for one, other in pairs),
        "cpu_ratio": ours["cpu_seconds"] / theirs["cpu_seconds"],
    }


def main() -> None:
    """Print a table, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("PROGRAM", "STAGE"))
    options = parser.parse_args()
    if options.worker:
        program, stage = options.worker
        serve(lambda: make_step(program, int(stage)), 2)
        return
    rows = [compare(stage, options.rounds) for stage in options.stages]
    print(
        "| ZeRO | Hexad s | DeepSpeed s | ratio | paired | CPU seconds | Hexad MB | DeepSpeed MB | losses |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ours, theirs = row["interface"], row["package"]
        seconds = f"{ours['step_seconds']:.2f} | {theirs['step_seconds']:.2f}"
        print(
            f"| {row['stage']} | {seconds} | {row['ratio']:.2f} "
            f"| {row['paired']:.2f} | {row['cpu_ratio']:.2f} | {ours['peak_rss_mb']:.0f} "
            f"| {theirs['peak_rss_mb']:.0f} | {ours['last_loss']:.6f} {theirs['last_loss']:.6f} |"
        )
    if options.output:
        options.output.write_text(json.dumps(facts() | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
