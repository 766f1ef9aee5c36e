"""How evenly context ranks share the attention of real text, and how much they send for it.

Documents are source files of Python's standard library, as bytes and as tokens of a BPE trained on them, and
the docstrings in them. They are cut into samples as a run's loader does with isolated documents. For every
sample and ``parallel.context_balance``, in one JSON document:

- ``slowest``: work (pairs of query and key) of the slowest rank over the mean, median and largest;
- ``received``: tokens whose keys and values a rank receives, the mean over ranks, over an all-gather's;
- ``milliseconds`` that dividing takes, median and largest.

``benchmarks/report.py`` makes the table. The pictures are of a sample: ``hexad show context``.

    python benchmarks/context_balance.py --json benchmarks/results/context_balance.json --pictures docs/images
"""

import argparse
import ast
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from facts import facts

from hexad.dataset.build.builder import build
from hexad.dataset.build.corpus import standard_library_files
from hexad.dataset.load.loader import DataLoader
from hexad.dataset.text.tokenizer_training import train_bpe
from hexad.model.configuration import load_config
from hexad.parallel.context.balance import received, work_of
from hexad.parallel.context.slice import divide
from hexad.planning import planned_layout, resolve
from hexad.show.context import Division, context_figure
from hexad.show.figure import save_figure

BALANCES = ("none", "zigzag", "work")
VOCAB = 4096

Bounds = tuple[int, ...]


def main() -> None:
    """Parse, build the data, divide, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sequence", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--json", help="write the JSON document to this file too")
    parser.add_argument("--pictures", help="directory for the pictures of a sample of BPE tokens")
    args = parser.parse_args()
    figures: dict[str, Any] = {**facts(), "sequence": args.sequence, "ranks": args.ranks, "sets": {}}
    with tempfile.TemporaryDirectory() as directory:
        for name, make in SETS.items():
            samples = list(documents(make(Path(directory)), args.sequence, args.samples))
            figures["sets"][name] = measured(samples, args.ranks)
            if args.pictures and name == "source, BPE":
                draw(samples[0], args.ranks, Path(args.pictures))
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")


def source_bytes(directory: Path) -> str:
    """Files as bytes."""
    return str(build(standard_library_files(), directory / "bytes", "byte").prefix)


def source_bpe(directory: Path) -> str:
    """Files as tokens of a BPE."""
    files, tokenizer = standard_library_files(), directory / "tokenizer"
    train_bpe((path.read_text(encoding="utf-8") for path in files), VOCAB, tokenizer)
    return str(build(files, directory / "bpe", str(tokenizer)).prefix)


def docstrings(directory: Path) -> str:
    """Docstrings as bytes."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    path = directory / "docstrings.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        for file in standard_library_files():
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    stream.write(json.dumps({"text": text}) + "\n")
    return str(build([path], directory / "docstrings", "byte").prefix)


SETS: dict[str, Callable[[Path], str]] = {
    "source, bytes": source_bytes,
    "source, BPE": source_bpe,
    "docstrings, bytes": docstrings,
}


def documents(prefix: str, sequence: int, count: int) -> Iterator[Bounds]:
    """Where documents begin in samples of one epoch, and their length; ``count`` samples at most."""
    with DataLoader(
        prefix, sequence=sequence, documents="isolate", micro=1, global_batch=1, seed=1
    ) as loader:
        for number in range(min(count, loader.samples)):
            (microbatch,) = loader.step(number)
            assert microbatch.documents is not None
            yield microbatch.documents


def measured(samples: list[Bounds], ranks: int) -> dict[str, Any]:
    """Figures of a data set."""
    lengths = np.concatenate([np.diff(bounds) for bounds in samples])
    figures: dict[str, Any] = {
        "samples": len(samples),
        "documents_per_sample": len(lengths) / len(samples),
        "document_tokens": {"median": float(np.median(lengths)), "largest": int(lengths.max())},
    }
    for balance in BALANCES:
        rows = [_divided(bounds, ranks, balance) for bounds in samples]
        slowest, part, milliseconds = (np.array(column) for column in zip(*rows))
        figures[balance] = {
            "slowest": {"median": float(np.median(slowest)), "largest": float(slowest.max())},
            "received": float(part.mean()),
            "milliseconds": {
                "median": float(np.median(milliseconds)),
                "largest": float(milliseconds.max()),
            },
        }
    return figures


def _divided(bounds: Bounds, ranks: int, balance: Any) -> tuple[float, float, float]:
    """(Work of the slowest rank over the mean, tokens received over an all-gather's, milliseconds)."""
    total = bounds[-1]
    start = time.perf_counter()
    slice_ = divide(1, total, bounds, ranks, balance)
    seconds = time.perf_counter() - start
    work = [work_of(bounds, runs) for runs in slice_.runs]
    tokens = [received(bounds, runs) for runs in slice_.runs]
    part = sum(tokens) / (ranks * (total - slice_.share))
    return max(work) * ranks / sum(work), part, 1e3 * seconds


def draw(bounds: Bounds, ranks: int, directory: Path) -> None:
    """A sample as ``hexad show context`` draws it, by work and by zigzag, for an 8B model."""
    for balance, name in (("work", "context-balance"), ("zigzag", "context-balance-zigzag")):
        config = load_config(
            {
                "model": {"preset": "llama3-8b"},
                "data": {"sequence": bounds[-1], "documents": "isolate"},
                "batch": {"micro": 1, "global": 1},
                "parallel": {"context": ranks, "context_balance": balance},
            }
        )
        resolved = resolve(config, planned_layout(config), vocab=128_256)
        division = Division.of(resolved, bounds, "files of Python's library")
        save_figure(context_figure(division), directory / f"{name}.png")


if __name__ == "__main__":
    main()
