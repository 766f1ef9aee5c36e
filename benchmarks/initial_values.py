"""How long initial values take: nanoseconds per value on this host's CPU, against torch's own generator.

    python benchmarks/initial_values.py --threads 1 2 --output benchmarks/results/initial_values.json

``torch`` is ``normal_`` with a generator, as Hexad drew before its values followed from their places; it uses
one thread. The programs alternate; figures are the fastest of several repetitions.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from facts import facts

from hexad.parallel.normal import fill_normal
from hexad.parallel.rectangle import Rectangle


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--output", help="write the JSON document to this file too")
    args = parser.parse_args()
    values = torch.empty(4096, 4096)
    whole = Rectangle.whole("weight", tuple(values.shape))
    generator = torch.Generator().manual_seed(1)
    calls = {
        "hexad": lambda: fill_normal(values, whole, 0.02, 1),
        "torch": lambda: values.normal_(0.0, 0.02, generator=generator),
    }
    times: dict[str, dict[str, float]] = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.repetitions):
            for name, call in calls.items():
                times[name].append(seconds(call))
        figures = {name: min(seconds) / values.numel() * 1e9 for name, seconds in times.items()}
        times[str(threads)] = {**figures, "ratio": figures["hexad"] / figures["torch"]}
    text = json.dumps({**facts(), "nanoseconds_per_value_by_threads": times}, indent=2)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
