"""How long a large data set takes to open, by several ranks at once on one file system.

Writes an index of many documents over a sparse ``.bin`` (zeros, which take no disk space), without
``.hexad.json``, then starts processes at the same time, each of which opens it as a rank does
(``DataLoader``, ``prepare``, the first step of its data rank). Prints one JSON document:

- ``open_seconds``: ``DataLoader(...)`` until it is ready, of the slowest rank;
- ``index_seconds``: ``prepare``: one rank writes the epoch's index, the others wait;
- ``step_seconds``: the first step's microbatches;
- ``indexes_written``: by all ranks together;
- ``again_seconds``: all three where the index exists, as after a restart;
- ``peak_rss_mb``: of the largest rank; mapped files count.

    python benchmarks/data_start.py --documents 1e8 --ranks 4 --output benchmarks/results/data_start.json
"""

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from facts import facts

from hexad.dataset.indexed import DTYPES, HEADER, MAGIC, VERSION
from hexad.dataset.load.loader import DataLoader
from hexad.dataset.load.samples import SampleSource
from hexad.dataset.sidecar import bin_path, idx_path

_CHUNK = 1 << 22
_UINT16 = 8


def write(prefix: Path, documents: int) -> int:
    """Documents of 1 to 255 tokens, all zero; returns the number of tokens."""
    size = DTYPES[_UINT16].itemsize
    starts = range(0, documents, _CHUNK)
    with idx_path(prefix).open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, _UINT16, documents, documents + 1))
        for start in starts:
            stream.write(_lengths(start, documents).astype("<i4").tobytes())
        total = 0
        for start in starts:
            ends = total + np.cumsum(_lengths(start, documents))
            stream.write((size * np.concatenate(([total], ends[:-1]))).astype("<i8").tobytes())
            total = int(ends[-1])
        for start in range(0, documents + 1, _CHUNK):
            stream.write(np.arange(start, min(start + _CHUNK, documents + 1), dtype="<i8").tobytes())
    bin_path(prefix).touch()
    os.truncate(bin_path(prefix), total * size)
    return total


def _lengths(start: int, documents: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return 1 + np.arange(start, min(start + _CHUNK, documents)) * 40503 % 255


class Counting(SampleSource):
    """Counts the indexes that this process writes."""

    written = 0

    def _write(self, path: Path, epoch: int) -> None:
        Counting.written += 1
        super()._write(path, epoch)


def rank(number: int, ranks: int, prefix: str, begin: Any, results: Any) -> None:
    """Open the data as a data rank and report the seconds of each part."""
    import hexad.dataset.load.whole_samples as module

    assert module.SampleSource is SampleSource  # what loaders make
    module.SampleSource = Counting  # type: ignore[misc]
    begin.wait()
    times = [time.perf_counter()]
    with DataLoader(
        prefix, sequence=4096, micro=1, global_batch=ranks, seed=1, data_rank=number, data_size=ranks
    ) as loader:
        times.append(time.perf_counter())
        loader.prepare(0)
        times.append(time.perf_counter())
        loader.step(0)
        times.append(time.perf_counter())
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    results.put((*np.diff(times), Counting.written, rss))


def start(ranks: int, prefix: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A row per rank, started at the same time."""
    context = multiprocessing.get_context("spawn")
    begin, results = context.Barrier(ranks), context.Queue()
    arguments = [(number, ranks, str(prefix), begin, results) for number in range(ranks)]
    processes = [context.Process(target=rank, args=argument) for argument in arguments]
    for process in processes:
        process.start()
    rows = [results.get(timeout=1800) for _ in processes]
    for process in processes:
        process.join()
    return np.array(rows)


def main() -> None:
    """Parse, write, start twice, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--documents", type=lambda text: int(float(text)), default=100_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    parser.add_argument("--output", help="write the JSON document to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        prefix = Path(directory) / "synthetic"
        tokens = write(prefix, args.documents)
        first, again = start(args.ranks, prefix), start(args.ranks, prefix)
    figures = {
        **facts(),
        "documents": args.documents,
        "tokens": tokens,
        "ranks": args.ranks,
        **{f"{name}_seconds": first[:, i].max() for i, name in enumerate(("open", "index", "step"))},
        "indexes_written": int(first[:, 3].sum()),
        "again_seconds": again[:, :3].sum(1).max(),
        "again_indexes_written": int(again[:, 3].sum()),
        "peak_rss_mb": max(first[:, 4].max(), again[:, 4].max()),
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
