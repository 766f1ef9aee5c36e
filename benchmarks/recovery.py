"""Kills ranks of a run at random moments, lets it restart, and compares it with one that was left alone.

Each kill is a SIGKILL to a random rank at a random moment, a third of them while a checkpoint is written.
The run restarts by itself (``faults.restarts``). Measured per kill: seconds from the kill to the first new
step, and how many steps were repeated. Checked: the losses of all steps equal those of a run that was never
killed, and every restart resumes from the newest checkpoint that was complete at the kill, or a newer one.

    python benchmarks/recovery.py --kills 50 --ranks 2 --output benchmarks/results/recovery.json
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from facts import facts
from tests.training.command import Process, RunFile, call, write_run
from tests.training.kills import Kill, kill_at_random

MODEL = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn_hidden": 256}


def killed_run(run: RunFile, where: Path, kills: int, ranks: int, chance: random.Random) -> list[Kill]:
    """Kill it so often, then ask it to stop."""
    process = Process.hexad(run.arguments(f"faults.restarts={kills}", f"parallel.data={ranks}"), where)
    record = []
    try:
        process.wait_for_step(run, 5)
        for number in range(kills):
            record.append(kill_at_random(run, process, ranks, chance, longest=1.0))
            print(f"{number + 1}: {record[-1]}", flush=True)
        os.kill(process.popen.pid, signal.SIGTERM)
        result = process.wait()
        assert result.status == 0, result.err
    finally:
        process.end()
    return record


def figures(kills: list[Kill], killed: RunFile, alone: RunFile) -> dict[str, Any]:
    """What is to be shown of it."""
    seconds = sorted(kill.seconds for kill in kills)
    return {
        "kills": len(kills),
        "kills_while_saving": sum(kill.saving for kill in kills),
        "steps": len(killed.losses),
        "losses_equal": killed.losses == alone.losses,
        "restarts_behind_the_last_checkpoint": sum(kill.resumed < kill.saved for kill in kills),
        "most_steps_made_again": max(kill.step - kill.resumed for kill in kills),
        "seconds_to_training": {"median": median(seconds), "least": seconds[0], "most": seconds[-1]},
    }


def main() -> None:
    """Parse, run, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        text = directory / "text.txt"
        text.write_text("\n".join(f"line {n}: the square of {n} is {n * n}" for n in range(3000)))
        prefix = str(directory / "train")
        call("data", "build", "--input", str(text), "--output", prefix, "--tokenizer", "byte")
        groups = {"model": MODEL, "data": {"sequence": 64}, "run": {"steps": 10**6}}
        groups["lr_schedule"] = {"kind": "constant", "decay_steps": "auto"}
        killed, alone = (write_run(directory / which, prefix, **groups) for which in ("killed", "alone"))
        kills = killed_run(killed, directory, args.kills, args.ranks, random.Random(seed))
        left_alone = Process.hexad(
            alone.arguments(f"run.steps={len(killed.losses)}", f"parallel.data={args.ranks}"), directory
        )
        assert left_alone.wait(600).status == 0
        result = facts() | {"seed": seed, "ranks": args.ranks} | figures(kills, killed, alone)
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
