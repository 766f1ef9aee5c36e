"""Communication hidden behind compute: two ranks over a slow link, data parallel or tensor parallel.

    sudo python benchmarks/overlap.py [--megabits 1000] [--zero 0 1 2 3] [--json FILE] [--output PICTURE]
    sudo python benchmarks/overlap.py --tensor [--megabits 4000] [--json FILE]

The ranks live in two network namespaces joined by a link (veth); ``tc`` limits its bandwidth both ways.
A round of the 32M-parameter llama has these steps, one after the other:

- free: large collectives are left out, which gives the seconds of computation;
- full: the link without its limit;
- overlapped: the limited link, Hexad as it is;
- waiting: the limited link, every collective waited for where it starts ("before");
- alone: the limited link, all of a step's collectives and nothing else.

With ``--tensor`` (tensor 2, with and without sequence parallel, in one chunk and in four) a layer waits for
its collectives; a further kind is ``at_once``: row-parallel layers' weight gradients computed where they
arise, not beside a collective. ``waited`` are the seconds of a step that a
rank spends in waits, the median of both ranks and of the rounds.

Exposed communication is overlapped (or waiting) - free; the share hidden is 1 - exposed / alone. Ideal is the
ledger's bytes over the bandwidth. All are medians over the rounds. Namespaces are removed in every case.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from facts import facts
from link import Link, exposed, why_not
from programs import hexad_engine
from turns import Step, serve

RANKS = 2


TENSOR = {
    f"tensor 2{' + sequence' * sequence}, {chunks} chunk{'s' * (chunks > 1)}": {
        "tensor": 2,
        "sequence": sequence,
        "tensor_chunks": chunks,
    }
    for sequence in (True, False)
    for chunks in (1, 4)
}


def worker(parallel: dict[str, Any], dtype: str) -> None:
    """One rank: a command per step, a mode of :class:`traffic.Traffic`, ``alone`` or ``at_once``."""

    def start() -> Step:
        from traffic import Traffic

        from hexad.comm import Trace
        from hexad.parallel.data.gradients import Gradients

        traffic, set_aside, trace = Traffic(), Gradients.set_aside, Trace()
        engine, batch = hexad_engine(parallel, RANKS, dtype)
        for axis in engine.mesh.axes.values():
            axis.trace = trace

        def step(command: str) -> dict[str, Any]:
            if command == "alone":
                traffic.be("overlapped")
                traffic.replay()
                return {}
            Gradients.set_aside = Gradients.contribute if command == "at_once" else set_aside  # type: ignore[assignment,method-assign]
            traffic.be("overlapped" if command == "at_once" else command)
            before, waited = sum(engine.mesh.sent_bytes().values()), trace.waited
            result = engine.train_step(batch)
            sent = sum(engine.mesh.sent_bytes().values()) - before
            waited = trace.waited - waited
            return {"loss": result.loss, "sent": sent, "skipped": result.skipped, "waited": waited}

        return step

    serve(start, RANKS)


def measure(
    link: Link, parallel: dict[str, Any], rounds: int, megabits: float, dtype: str, kinds: Sequence[str]
) -> dict[str, Any]:
    """One layout: medians over the rounds, in seconds."""
    program = link.program([sys.executable, __file__, "--worker", json.dumps(parallel), dtype])
    try:
        program.wait()
        first = program.step("overlapped")
        recorded = program.step("recording")
        seconds = link.in_turns(program, kinds, rounds, megabits)
        last = program.steps[-rounds * len(kinds) :]
        program.close()
    finally:
        program.kill()
    sent = max(rank["sent"] for rank in recorded)
    figures: dict[str, Any] = {name: median(times) for name, times in seconds.items()}
    figures |= {"sent_bytes": sent, "ideal": sent * 8 / (megabits * 1e6), "loss": first[0]["loss"]}
    for place, name in enumerate(seconds):  # in the order of a round
        steps = [step for step in last[place :: len(kinds)] if "waited" in step[0]]
        if steps:
            figures[f"waited_{name}"] = median(median(rank["waited"] for rank in step) for step in steps)
    return figures | shares(seconds) | {"rounds": seconds}


def shares(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Exposed seconds and the hidden share of communication, from each round's own steps."""
    parts = {}
    for name in seconds.keys() & {"overlapped", "waiting", "at_once"}:
        parts[f"exposed_{name}"] = exposed(seconds, name)
        if "alone" in seconds:
            parts[f"hidden_{name}"] = 1 - parts[f"exposed_{name}"] / median(seconds["alone"])
    return parts


def show(stage: str, figures: dict[str, Any]) -> None:
    """A line of the table."""
    seconds = [figures[name] for name in ("free", "full", "waiting", "overlapped", "ideal", "alone")]
    line = "".join(f"{value:11.2f}" for value in seconds)
    line += f"{figures['hidden_waiting']:11.0%}{figures['hidden_overlapped']:11.0%}"
    print(f"zero {stage:4s}{figures['sent_bytes'] / 1e6:9.1f}{line}", flush=True)


def main() -> None:
    """Measure the stages asked for; a table, JSON, a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zero", nargs="+", type=int, choices=range(4), default=list(range(4)))
    parser.add_argument("--tensor", action="store_true", help="tensor parallel instead of ZeRO")
    parser.add_argument("--megabits", type=float, default=1000.0, help="bandwidth of each direction, Mbit/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--output", type=Path, help="also draw them (.png, .svg)")
    parser.add_argument("--draw", type=Path, help="draw this result file, measure nothing")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker[0]), options.worker[1])
        return
    if options.draw:
        results = json.loads(options.draw.read_text(encoding="utf-8"))
    elif problem := why_not():
        sys.exit(f"overlap.py: {problem}")
    else:
        results = tensor_parallel(options) if options.tensor else measured(options.zero, options)
    if options.output:
        from overlap_figure import draw

        draw(results, options.output)


def measured(stages: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """All stages over one link."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    results: dict[str, Any] = facts() | {"megabits": options.megabits, "dtype": options.dtype, "stages": {}}
    names = ("free", "full", "waiting", "overlap", "ideal", "alone", "hidden:", "overlap")
    print(f"{'':9s}{'MB sent':>9s}" + "".join(f"{name:>11s}" for name in names), flush=True)
    with Link() as link:
        for stage in stages:
            kinds = "full", "overlapped", "waiting", "alone", "free"
            figures = measure(link, {"zero": stage}, options.rounds, options.megabits, options.dtype, kinds)
            results["stages"][str(stage)] = figures
            show(str(stage), figures)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def tensor_parallel(options: argparse.Namespace) -> dict[str, Any]:
    """Tensor parallel layouts over one link."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: dict[str, Any] = facts() | {"megabits": options.megabits, "dtype": options.dtype, "layouts": {}}
    kinds = "overlapped", "at_once", "free"
    columns = ("MB sent", *kinds, "waited, at once", "waited")
    print(f"{'':30s}" + "".join(f"{name:>18s}" for name in columns), flush=True)
    with Link() as link:
        for name, parallel in TENSOR.items():
            figures = measure(link, parallel, options.rounds, options.megabits, options.dtype, kinds)
            results["layouts"][name] = figures
            cells = [f"{figures['sent_bytes'] / 1e6:18.1f}", *(f"{figures[kind]:18.2f}" for kind in kinds)]
            cells += [f"{figures[f'waited_{kind}']:18.2f}" for kind in ("at_once", "overlapped")]
            print(f"{name:30s}" + "".join(cells), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
