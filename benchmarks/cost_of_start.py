"""What starting, saving and resuming a run of thousands of ranks costs its first rank; on one machine.

    python benchmarks/cost_of_start.py --world 10000 --json benchmarks/results/cost_of_start.json

The ranks' shards of a synthetic Llama 70B (weights and two moments, sharded over the data ranks) are computed
here. What would reach the first rank through the tree of agreements is written to files, and a fresh process
does what the first rank does with it: merge, write the manifest, choose the checkpoint, read the manifest,
send every rank its part. Reported are the seconds of that process and the memory that it had used at most
after each part, beside connections, what goes through the store (counted at real process groups of each size)
and files.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, reduce
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from facts import facts

from hexad.checkpoint.directory import CheckpointDirectory, write_manifest
from hexad.checkpoint.index import FileRecord, Index, Need
from hexad.checkpoint.manifest import manifest_checksum, read_manifest
from hexad.checkpoint.tensor_file import FilePart, TensorFile, block_count
from hexad.comm.agreement import _lowest
from hexad.model.configuration import load_config
from hexad.parallel.rectangle import Rectangle
from hexad.topology.layout import FAN_OUT, Layout, tree_groups
from hexad.topology.mesh import connected

LAYERS, HIDDEN, FFN, KEYS, VOCAB = 80, 8192, 28672, 1024, 128256
HOST = 8
"""Ranks of a host."""
HEADER = 1 << 16
"""Bytes of the header of a host's file."""
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
# Name, shape, and the dim that the tensor axis divides.
LAYER = [
    ("attention.q.weight", (HIDDEN, HIDDEN), 0),
    ("attention.k.weight", (KEYS, HIDDEN), 0),
    ("attention.v.weight", (KEYS, HIDDEN), 0),
    ("attention.output.weight", (HIDDEN, HIDDEN), 1),
    ("ffn.gate.weight", (FFN, HIDDEN), 0),
    ("ffn.up.weight", (FFN, HIDDEN), 0),
    ("ffn.down.weight", (HIDDEN, FFN), 1),
    ("attention_norm.weight", (HIDDEN,), None),
    ("ffn_norm.weight", (HIDDEN,), None),
]
Weights = list[tuple[str, tuple[int, ...], int | None]]


def buckets(stage: int, stages: int) -> Iterator[Weights]:
    """A bucket per layer of a pipeline stage, and those of embedding and head."""
    if stage == 0:
        yield [("embedding.weight", (VOCAB, HIDDEN), 0)]
    for layer in range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages):
        yield [(f"layers.{layer}.{name}", shape, dim) for name, shape, dim in LAYER]
    if stage == stages - 1:
        yield [("head.weight", (VOCAB, HIDDEN), 0), ("norm.weight", (HIDDEN,), None)]


def held(layout: Layout, rank: int) -> list[Rectangle]:
    """What a rank holds of the weights: its tensor shard of a bucket, of that its data rank's flat shard."""
    place = {name: layout.group(rank, name).index(rank) for name in ("tensor", "pipeline", "data")}
    rectangles = []
    for bucket in buckets(place["pipeline"], layout.pipeline):
        parts = []
        for name, shape, dim in bucket:
            offset, sizes = [0] * len(shape), list(shape)
            if dim is not None:
                sizes[dim] //= layout.tensor
                offset[dim] = place["tensor"] * sizes[dim]
            parts.append(Rectangle(name, shape, tuple(offset), tuple(sizes)))
        share = -(-sum(part.numel for part in parts) // layout.data)
        low, high, begin = place["data"] * share, (place["data"] + 1) * share, 0
        for part in parts:
            first, last = max(low - begin, 0), min(high - begin, part.numel)
            rectangles += [piece for _, piece in part.flat_range(first, last)] if first < last else []
            begin += part.numel
    return rectangles


@lru_cache(2 * HOST)
def written(layout: Layout, rank: int) -> list[FilePart]:
    """What a rank writes, in float32: of what the tensor ranks hold alike, the first writes all."""
    first = layout.group(rank, "tensor")[0] == rank
    rectangles = held(layout, rank)
    rectangles = [
        rectangle for rectangle in rectangles if first or not rectangle.name.endswith("norm.weight")
    ]
    return [
        FilePart(rectangle.named(f"{kind}.{rectangle.name}"), torch.float32)
        for kind in KINDS
        for rectangle in rectangles
    ]


def index_of(layout: Layout, rank: int) -> Index:
    """The section that a rank writes of its host's file."""
    begin = rank - rank % HOST
    near = range(begin, min(begin + HOST, layout.world))
    own = written(layout, rank)
    first = rank == begin  # which writes the header
    size = first * HEADER + sum(4 * part.rectangle.numel for part in own)
    blocks = first + sum(block_count(part.rectangle.sizes, 4) for part in own)
    record = FileRecord(((size, "0" * 32),), HEADER, os.urandom(8 * blocks))
    return TensorFile.of_host(rank, {other: written(layout, other) for other in near}).index(record)


def need_of(rectangles: list[Rectangle]) -> Need:
    """What a rank needs on loading: weights and moments of what it holds."""
    return Need.of(rectangle.named(f"{kind}.{rectangle.name}") for kind in KINDS for rectangle in rectangles)


def messages(layout: Layout, directory: Path) -> tuple[int, int]:
    """Write what the first rank receives, by level and sender; returns the bytes of all messages up the tree
    on saving, and on loading."""
    sent = Counter[str]()

    def subtree(rank: int, levels: int) -> tuple[Index, Need]:
        """What a rank passes on: of the ranks below it in so many levels."""
        rectangles = held(layout, rank)
        index, need = index_of(layout, rank), need_of(rectangles)
        for level, group in enumerate(list(tree_groups(rank, layout.world, FAN_OUT))[:levels]):
            for other in group[1:]:
                below = sum(
                    1 for tree_group in tree_groups(other, layout.world, FAN_OUT) if tree_group[0] == other
                )
                theirs = subtree(other, below)
                for name, their in zip(("save", "load"), theirs):
                    content = pickle.dumps(their)
                    sent[name] += len(content)
                    if rank == 0:
                        (directory / f"{name}-{level}-{other:05d}").write_bytes(content)
                index, need = index.merge(theirs[0]), need.merge(theirs[1])
        return index, need

    groups = list(tree_groups(0, layout.world, FAN_OUT))
    subtree(0, len(groups))
    rectangles = held(layout, 0)
    own = index_of(layout, 0), need_of(rectangles)
    (directory / "own").write_bytes(pickle.dumps(own))
    return sent["save"], sent["load"]


class Clock:
    """Seconds of the parts of a process, and the memory that it had used at most after each."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.parts[name] = {"seconds": round(seconds, 3), "peak_mb": round(peak_memory())}


def peak_memory() -> float:
    """Largest resident memory of this program, in MB; ``getrusage`` counts what was there before ``exec``."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def first_rank(directory: Path, world: int) -> dict[str, Any]:
    """What the first rank does with what it receives."""
    clock, run = Clock(), CheckpointDirectory(directory / "run")
    run.path.mkdir(parents=True)
    own_index, own_need = pickle.loads((directory / "own").read_bytes())
    levels = len(list(tree_groups(0, world, FAN_OUT)))
    files = {
        name: [sorted(directory.glob(f"{name}-{level}-*")) for level in range(levels)]
        for name in ("save", "load")
    }
    with clock.part("Python and its imports"):
        pass
    with clock.part("agree on settings"):
        settings = sha256(repr(load_config().model_dump()).encode()).digest()
        hashes = [pickle.dumps({settings: rank}) for rank in range(levels * FAN_OUT)]
        assert len(reduce(_lowest, map(pickle.loads, hashes))) == 1
    with clock.part("merge what was written"):
        index = own_index
        for level in range(levels):
            for file in files["save"][level]:
                index = index.merge(pickle.loads(file.read_bytes()))
    path = run.path / "step-00000001"
    path.mkdir()
    with clock.part("manifest"):
        origin = {"world": world}
        write_manifest(path, index, {}, load_config(), {"step": 1, "samples": 1}, origin)
    rectangles, merged_files = len(index.rows), len(index.files)
    del index
    with clock.part("remove old checkpoints"):
        run.tidy(3)
    with clock.part("choose the checkpoint"):
        chosen = run.newest()
        assert chosen == path and manifest_checksum(path) is not None
    with clock.part("read the manifest"):
        manifest = read_manifest(path)
        part = manifest.index
    sent, received = [], 0
    with clock.part("send every rank its part"):
        needs, below = own_need, []
        for level in range(levels):
            others = [pickle.loads(file.read_bytes()) for file in files["load"][level]]
            below.append((needs, others))
            needs = reduce(Need.merge, others, needs)
        for own, others in reversed(below):
            sent += [len(pickle.dumps(part.select(other))) for other in others]
            part = part.select(own)
        received = len(part.rows)
    return {
        "rectangles": rectangles,
        "tensor_files": merged_files,
        "manifest_bytes": (path / "manifest.json").stat().st_size,
        "rectangles_of_the_first_rank": received,
        "bytes_sent_on_loading": sum(sent),
        "largest_message_on_loading": max(sent),
        "parts": clock.parts,
    }


class Counted(dist.Store):  # type: ignore[misc]
    """A store that counts what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bytes, self.calls = dist.HashStore(), 0, 0

    def _count(self, name: str, key: str, value: bytes | str = b"") -> None:
        self.bytes += len(name) + len(key) + len(value)
        self.calls += 1

    def set(self, key: str, value: Any) -> None:
        self._count("set", key, value)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self.inner.get(key)
        self._count("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._count("add", key, b"12345678")
        return int(self.inner.add(key, amount))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        for key in keys:
            self._count("wait", key)
        self.inner.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self.inner.multi_get(keys)
        self._count("multi_get", "".join(keys), b"".join(values))
        return values

    def has_extended_api(self) -> bool:
        return True


def through_the_store(world: int) -> dict[str, int]:
    """Calls and bytes that connecting the tree costs, from real groups of the sizes that it has."""
    sizes = Counter(
        len(group) for rank in range(world) for group in tree_groups(rank, world, FAN_OUT) if group[0] == rank
    )
    total = {"calls": 0, "bytes": 0}
    for size, groups in sizes.items():
        store, groups_made = Counted(), []

        # All are kept until the last is connected: one that is gone would be a lost peer.
        def join(
            rank: int, size: int = size, store: Counted = store, groups_made: list[Any] = groups_made
        ) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
            named = dist.PrefixStore("hexad/tree/1/0-1", store)
            groups_made.append(connected(named, rank, size, options))

        run_together(join, size)
        assert len(groups_made) == size, "a rank could not connect"
        total["calls"] += groups * store.calls
        total["bytes"] += groups * store.bytes
    return total


def run_together(action: Callable[[int], None], count: int) -> None:
    """An action of so many ranks, each in a thread."""
    threads = [threading.Thread(target=action, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def store_seconds(calls: int) -> float:
    """Seconds in which one thread of torch's TCPStore answers so many calls, measured with one client: half
    of them write an address, half read those of a group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    count, seconds, keys = 2000, [], [f"key-{number}" for number in range(FAN_OUT)]
    for _ in range(5):
        for key in keys:
            store.set(key, "x" * 100)
        begin = time.perf_counter()
        for number in range(count // 2):
            store.set(keys[number % FAN_OUT], "x" * 100)
            store.multi_get(keys)
        seconds.append(time.perf_counter() - begin)
    return calls * min(seconds) / count


def main() -> None:
    """Parse, simulate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=10_000)
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--pipeline", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--first-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_rank:
        print(json.dumps(first_rank(args.first_rank, args.world)))
        return
    world = args.world - args.world % (args.tensor * args.pipeline)
    layout = Layout(world=world, tensor=args.tensor, pipeline=args.pipeline)
    connections = [sum(len(g) - 1 for g in tree_groups(rank, world, FAN_OUT)) for rank in range(world)]
    store = through_the_store(world)
    with tempfile.TemporaryDirectory() as name:
        saved, loaded = messages(layout, Path(name))
        command = [sys.executable, __file__, "--first-rank", name, "--world", str(world)]
        figures = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    result = facts() | {
        "layout": {"world": world, "tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data},
        "parameters": sum(prod(shape) for bucket in buckets(0, 1) for _, shape, _ in bucket),
        "connections_per_rank": {"most": max(connections), "median": sorted(connections)[world // 2]},
        "store": store
        | {
            "calls_per_rank": round(store["calls"] / world, 2),
            "calls_per_host": round(store["calls"] / world * HOST, 1),
            "sockets": {"of_a_rank": 1, "of_a_host": HOST, "of_the_first_rank": world},
            "seconds_of_one_server": round(store_seconds(store["calls"]), 2),
        },
        "files": {"checkpoint": figures["tensor_files"] + 2, "run_directory": world + 4, "directories": 3},
        "tree_bytes": {"saving": saved, "loading": loaded},
        "first_rank": figures,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
