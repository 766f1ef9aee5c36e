"""Saving and loading a checkpoint against the disk itself, and against torch.distributed.checkpoint.

    python benchmarks/checkpoint_io.py [--ranks 2] [--hidden 1024] [--rounds 7] [--directory DIR]
                                       [--json FILE]

Every rank holds its share (ZeRO 1) of a llama's weights and AdamW state. A round of steps, one after another:

- raw_write: each rank writes the bytes it holds to a file and calls fsync;
- hexad_save, dcp_save: the same state, synchronously, fsync included (DCP: ``FileSystemWriter``);
- pause: how long an asynchronous save keeps the training waiting; the write that follows is not counted;
- raw_read, hexad_load, dcp_load: from the page cache; the raw read goes into memory that is there already;
- raw_read_cold, hexad_load_cold, dcp_load_cold: after the files were dropped from the page cache.

All are medians over the rounds but the first. ``transient_bytes`` is what loading needs beside the state it
fills: the peak of resident memory while loading less what is resident before or afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from facts import facts
from turns import Program, Step, serve, wall

SAVES = ("raw_write", "hexad_save", "dcp_save", "pause")
LOADS = ("raw_read", "hexad_load", "dcp_load")
STEPS = (*SAVES, *LOADS, *(f"{name}_cold" for name in LOADS))


def worker(ranks: int, hidden: int, directory: Path) -> None:
    """One rank; a command per step."""

    def start() -> Step:
        import torch

        from hexad import Engine, Layout, Mesh, load_config
        from hexad.checkpoint.checkpointer import Checkpointer

        config = load_config(
            {
                "run": {"device": "cpu", "dir": str(directory)},
                "model": {"layers": 8, "hidden": hidden, "heads": 8, "vocab": 8192},
                "parallel": {"zero": 1},
                "precision": {"dtype": "fp32"},
                "checkpoint": {"keep": 1},
            }
        )
        mesh = Mesh.create(Layout.from_settings(config.parallel, ranks), torch.device("cpu"))
        engine = Engine(config, mesh)
        for chunk in engine.chunks():
            chunk.tensor.normal_()
        return Rank(engine, directory, lambda settings: Checkpointer(settings, mesh)).step

    serve(start, ranks)


class Rank:
    """The steps of one rank; see this file's first lines."""

    def __init__(self, engine: Any, directory: Path, checkpointer: Callable[[Any], Any]) -> None:
        config = engine.config
        later = config.checkpoint.model_copy(update={"asynchronous": False})
        self.engine = engine
        self.directory = directory
        self.rank = engine.mesh.rank
        self.asynchronous = checkpointer(config)
        self.synchronous = checkpointer(config.model_copy(update={"checkpoint": later}))
        self.chunks = engine.chunks()
        self.raw = directory / f"raw-{self.rank}"
        self.dcp = directory / "dcp"
        self.room = [bytearray(chunk.tensor.nbytes) for chunk in self.chunks]

    def step(self, command: str) -> dict[str, Any]:
        """One step."""
        share = {"share_bytes": sum(chunk.tensor.nbytes for chunk in self.chunks)}
        if command == "settle":
            self.asynchronous.wait()
            self._drop()
            return share
        if command == "drop":
            self._drop()
            return share
        before = _resident()
        with Watch() if command in LOADS else nullcontext() as watch:
            getattr(self, command.removesuffix("_cold"))()
        return share | {"transient_bytes": watch.peak - max(before, _resident()) if watch else 0}

    def _drop(self) -> None:
        """Forget the files' pages, which are on disk."""
        if self.rank == 0:
            for path in self.directory.rglob("*"):
                if path.is_file():
                    handle = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(handle)

    def raw_write(self) -> None:
        with open(self.raw, "wb", buffering=0) as file:
            for chunk in self.chunks:
                file.write(memoryview(chunk.tensor.numpy().reshape(-1)).cast("B"))
            os.fsync(file.fileno())

    def raw_read(self) -> None:
        with open(self.raw, "rb", buffering=0) as file:
            for room in self.room:
                file.readinto(room)

    def hexad_save(self) -> None:
        self.synchronous.save(self.chunks, self.engine.progress())

    def pause(self) -> None:
        self.asynchronous.save(self.chunks, self.engine.progress())

    def hexad_load(self) -> None:
        self.synchronous.load(self.synchronous.find(), self.chunks)

    def dcp_save(self) -> None:
        from torch.distributed import checkpoint as dcp

        writer = dcp.FileSystemWriter(self.dcp, sync_files=True, overwrite=True)
        dcp.save(self._state(), storage_writer=writer)

    def dcp_load(self) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.load(self._state(), checkpoint_id=str(self.dcp))

    def _state(self) -> dict[str, Any]:
        """The rank's tensors under names of their own: DCP's least work, without any resharding."""
        return {f"{self.rank}.{number}": chunk.tensor for number, chunk in enumerate(self.chunks)}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """The largest resident memory while something runs, in bytes, looked at every millisecond."""

    def __enter__(self) -> Watch:
        self.peak = _resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def measure(ranks: int, hidden: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Seconds of each step, and the ratios."""
    command = [
        sys.executable,
        __file__,
        "--worker",
        str(directory),
        "--ranks",
        str(ranks),
        "--hidden",
        str(hidden),
    ]
    program = Program([command] * ranks)
    program.wait()
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    transient: dict[str, int] = {}
    for number in range(rounds):
        for name in STEPS:
            program.step("drop" if name.endswith("_cold") else "settle")
            figures = program.step(name)
            if number:
                seconds[name].append(wall(figures))
                transient[name] = max(transient.get(name, 0), *(rank["transient_bytes"] for rank in figures))
    share = max(rank["share_bytes"] for rank in figures)
    total = sum(rank["share_bytes"] for rank in figures)
    program.close()
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "ranks": ranks,
        "bytes": total,
        "share_bytes": share,
        "seconds": medians,
        "bandwidth_over_raw": {
            "save": medians["raw_write"] / medians["hexad_save"],
            "load": medians["raw_read"] / medians["hexad_load"],
            "load_cold": medians["raw_read_cold"] / medians["hexad_load_cold"],
            "dcp_save": medians["raw_write"] / medians["dcp_save"],
            "dcp_load": medians["raw_read"] / medians["dcp_load"],
            "dcp_load_cold": medians["raw_read_cold"] / medians["dcp_load_cold"],
        },
        "pause_over_synchronous": medians["pause"] / medians["hexad_save"],
        "transient_over_share": {name: transient[name] / share for name in ("hexad_load", "dcp_load")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.ranks, options.hidden, options.worker)
        return
    directory = Path(tempfile.mkdtemp(prefix="hexad-io-", dir=options.directory))
    try:
        results = facts() | measure(options.ranks, options.hidden, options.rounds, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    text = json.dumps(results, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
