"""Step time and peak memory of Hexad beside its peers, in one run: the 32M-parameter llama on CPUs.

    python benchmarks/step_time.py [--modes single data2 tensor2 tensor2_sequence] [--runs 5] [--json FILE]
    python benchmarks/step_time.py --modes pipeline2_1f1b tensor2_pipeline2_1f1b pipeline2_best
    python benchmarks/step_time.py --modes zero1_2 zero2_2 zero3_2 [--dtype bf16]
    python benchmarks/step_time.py --checkouts ../earlier    # another commit of Hexad takes part
    python benchmarks/step_time.py --pointwise               # Hexad with run.compile: pointwise takes part

For every mode, all programs' processes are started and hold the same weights; then they alternate, a step
each, while the others' processes sleep. Printed are the medians of the wall seconds of a step (the slowest
rank), of the CPU seconds (all ranks), the largest resident set of a rank, and the ratios (Hexad / peer):
``paired`` is the median of the ratios of neighbouring steps, which is steadier than the ratio of medians.
With ``--runs`` everything is done so many times, with new processes: figures and ratios are then medians of
the runs', and the smallest and largest ratio are printed below.

The peer is plain PyTorch: DDP, DTensor, or PyTorch's pipelining with the same schedule on the same stages,
save in modes that end in ``_best`` and ``_auto``: there Hexad's ZB-V, or the schedule that it finds itself,
runs beside PyTorch's 1F1B. Modes ``zero1_2`` to ``zero3_2`` have several peers (``peers/sharded.py``); those
marked * keep whole gradients between microbatches, which Hexad's stages 2 and 3 do not. DeepSpeed takes part
where it is installed: ``pip install wheel && pip install --no-build-isolation deepspeed``.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from facts import facts
from programs import PLAIN, RANKS, ZERO, make_step, programs
from turns import Program, Step, serve, wall

MEASURES = ("step_seconds", "cpu_seconds", "peak_rss_mb")


def worker(program: str, mode: str, dtype: str) -> None:
    """One rank of a program."""

    def start() -> Step:
        step = make_step(program, mode, dtype)
        return lambda _: {"loss": step()}

    serve(start, RANKS[mode])


def compare(
    mode: str, steps: int, dtype: str, runs: int, checkouts: list[Path], more: list[str]
) -> dict[str, Any]:
    """All programs of a mode in turns, so many times.

    Returns:
        figures by program; ``ratios`` by peer, and their ``spread`` over the runs; ``best``: the fastest peer
        that is like for like; ``ratio`` to it; ``left_out``: peers that are not installed.
    """
    names, missing = programs(mode)
    commands = {name: [sys.executable, __file__, "--worker", name, mode, dtype] for name in (*names, *more)}
    for checkout in checkouts:
        script = str(checkout / "benchmarks" / "step_time.py")
        commands[checkout.resolve().name] = [sys.executable, script, "--worker", "hexad", mode, dtype]
    measurements = [once(commands, RANKS[mode], steps, run) for run in range(runs)]
    figures = {name: middle([run[name].figures() for run in measurements]) for name in commands}
    ratios = {
        name: [ratio(run["hexad"], run[name]) for run in measurements] for name in commands if name != "hexad"
    }
    best = min(filter(like_for_like, names[1:]), key=lambda name: figures[name]["step_seconds"])
    return figures | {
        "runs": runs,
        "ratios": {name: middle(values) for name, values in ratios.items()},
        "spread": {
            name: {
                key: [min(run[key] for run in values), max(run[key] for run in values)] for key in values[0]
            }
            for name, values in ratios.items()
        },
        "best": best,
        "ratio": middle(ratios[best]),
        "left_out": missing,
    }


def once(commands: dict[str, list[str]], ranks: int, steps: int, first: int) -> dict[str, Program]:
    """Start all programs, and let them alternate, a step each; which one comes first differs by run."""
    running: dict[str, Program] = {}
    try:
        for name, command in commands.items():
            source = Path(command[1]).parents[1] / "src"
            running[name] = Program([command] * ranks, {"PYTHONPATH": str(source)})
            running[name].wait()
        for turn in range(first, first + steps + 1):  # each comes first in turn
            start = turn % len(commands)
            for name in [*commands, *commands][start : start + len(commands)]:
                running[name].step()
        for program in running.values():
            program.close()
    finally:
        for program in running.values():
            program.kill()
    return running


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure."""
    return {key: median(run[key] for run in runs) for key in runs[0]}


def ratio(ours: Program, theirs: Program) -> dict[str, float]:
    """Hexad's figures over a peer's."""
    mine, other = ours.figures(), theirs.figures()
    ratios = {name: mine[name] / other[name] for name in MEASURES}
    pairs = zip(ours.steps[1:], theirs.steps[1:])
    return ratios | {"paired": median(wall(one) / wall(two) for one, two in pairs)}


def like_for_like(name: str) -> bool:
    """Whether a peer holds no more than Hexad does in the same stage."""
    from peers.sharded import PEERS

    return name not in PEERS or PEERS[name].like


COLUMNS = ("wall s", "CPU s", "MB", "loss", "last loss", "wall", "paired", "CPU", "MB")


def show(mode: str, measured: dict[str, Any]) -> None:
    """A line per program; the ratios behind each peer are Hexad's over its."""
    for name in ("hexad", *measured["ratios"]):
        label = name if name == "hexad" or like_for_like(name) else f"{name} *"
        figures, ratio = measured[name], measured["ratios"].get(name)
        line = f"{figures['step_seconds']:10.2f}{figures['cpu_seconds']:10.2f}{figures['peak_rss_mb']:10.0f}"
        line += f"{figures['first_loss']:10.5f}{figures['last_loss']:10.5f}"
        if ratio:
            line += "".join(
                f"{ratio[key]:10.2f}" for key in ("step_seconds", "paired", "cpu_seconds", "peak_rss_mb")
            )
        print(f"{mode:29s}{label:23s}{line}", flush=True)
        if ratio and measured["runs"] > 1:
            ends = [measured["spread"][name][key] for key in ("step_seconds", "paired", "cpu_seconds")]
            print(f"{'':102s}" + "".join(f" {low:.2f}-{high:.2f}" for low, high in ends), flush=True)
    if measured["left_out"]:
        print(f"{mode:29s}left out, not installed: {', '.join(measured['left_out'])}", flush=True)


def main() -> None:
    """Compare the modes asked for; a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=RANKS, default=PLAIN, metavar="MODE", help=_modes())
    parser.add_argument("--steps", type=int, default=7, help="timed steps per program and mode")
    parser.add_argument("--runs", type=int, default=1, help="how many times to start everything")
    parser.add_argument("--checkouts", nargs="+", type=Path, default=[], help="other commits of Hexad")
    parser.add_argument("--pointwise", action="store_true", help="compiled pointwise functions too")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    results: dict[str, Any] = facts() | {
        "dtype": options.dtype,
        "steps": options.steps,
        "runs": options.runs,
        "modes": {},
    }
    print(f"{'mode':29s}{'program':23s}" + "".join(f"{name:>10s}" for name in COLUMNS[:5]), end="")
    print("  ratios: " + "".join(f"{name:>10s}" for name in COLUMNS[5:])[10:])
    for mode in options.modes:
        figures = results["modes"][mode] = compare(
            mode,
            options.steps,
            options.dtype,
            options.runs,
            options.checkouts,
            ["hexad_pointwise"] if options.pointwise else [],
        )
        show(mode, figures)
        if options.json:  # after every mode: a long run that is stopped has not been in vain
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _modes() -> str:
    return f"of {', '.join((*PLAIN, *ZERO))} and pipelines: {', '.join(m for m in RANKS if 'pipe' in m)}"


if __name__ == "__main__":
    main()
