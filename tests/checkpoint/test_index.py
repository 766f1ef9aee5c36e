"""Where values lie, merged in a tree on saving and selected on loading: against flat lists of rectangles."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hexad.checkpoint import checkpointer, reader
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.index import FileRecord, Index, Need
from hexad.checkpoint.manifest import Manifest, read_manifest, verify_files
from hexad.checkpoint.tensor_file import Chunk, TensorFileWriter
from hexad.config import AgreedError
from hexad.model.configuration import load_config
from hexad.parallel.rectangle import Rectangle
from hexad.topology import mesh as mesh_module
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..pool import Pool

SHAPES = {"vector": (40,), "matrix": (24, 10), "cube": (6, 4, 8)}


def shares(world: int, draw: random.Random) -> list[list[Rectangle]]:
    """What each rank holds: a run of the elements of every tensor, cut anywhere, or columns of it."""
    held: list[list[Rectangle]] = [[] for _ in range(world)]
    for name, shape in SHAPES.items():
        whole = Rectangle.whole(name, shape)
        cuts = sorted(draw.choices(range(whole.numel + 1), k=world - 1))
        columns = len(shape) > 1 and draw.random() < 0.5
        for rank, (low, high) in enumerate(zip([0, *cuts], [*cuts, whole.numel])):
            if columns:
                low, high = low * shape[1] // whole.numel, high * shape[1] // whole.numel
                sizes = (shape[0], high - low, *shape[2:])
                held[rank] += [Rectangle(name, shape, (0, low, *[0] * (len(shape) - 2)), sizes)]
            else:
                held[rank] += [part for _, part in whole.flat_range(low, high)]
    return [[rectangle for rectangle in rectangles if rectangle.numel] for rectangles in held]


def index_of(number: int, rectangles: list[Rectangle]) -> Index:
    record = FileRecord(((4096, ""),), 8, bytes(8 * (1 + len(rectangles))))
    return Index.of_file(
        f"rank-{number}",
        record,
        [(part, "float32", 1 + place, place) for place, part in enumerate(rectangles)],
    )


def flat(index: Index) -> set[tuple[Any, ...]]:
    """(tensor, file, rectangle, block, begin) of everything."""
    names = list(index.files)
    return {
        (name, names[file], tuple(place[: len(shape)]), tuple(place[len(shape) :]), block, begin)
        for name, (_, shape) in index.tensors.items()
        for file, block, begin, *place in index.rows_of(name).tolist()
    }


@pytest.mark.parametrize("seed", range(20))
def test_merging_in_any_tree_keeps_every_rectangle(seed: int) -> None:
    draw = random.Random(seed)
    held = shares(7, draw)
    parts = [index_of(rank, rectangles) for rank, rectangles in enumerate(held)]
    one = reduce(Index.merge, parts)
    two = reduce(Index.merge, parts[:2]).merge(
        reduce(Index.merge, parts[2:5]).merge(parts[5]).merge(parts[6])
    )
    assert flat(one) == flat(two) == set().union(*map(flat, parts))
    assert list(one.files) == list(two.files) == [f"rank-{rank}" for rank in range(7)]
    assert all(two.gap(name) is None for name in two.tensors)
    manifest = Manifest({"step": 1, "samples": 1}, {}, one, {})
    assert flat(Manifest.decode(manifest.encode()).index) == flat(one)


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_is_given_every_rectangle_that_it_needs(seed: int) -> None:
    """And of those that it does not need few: it holds the same layout here, or another."""
    draw = random.Random(seed)
    whole = reduce(Index.merge, [index_of(rank, held) for rank, held in enumerate(shares(6, draw))])
    wanted = shares(5, draw)
    needs = [Need.of(rectangles) for rectangles in wanted]
    above = reduce(Need.merge, needs[:3])
    part = whole.select(reduce(Need.merge, needs)).select(above)
    for rectangles, need in zip(wanted[:3], needs):
        received = flat(part.select(need))
        assert received <= flat(whole)
        for name, file, offset, sizes, *rest in flat(whole):
            stored = Rectangle(name, SHAPES[name], offset, sizes)
            if any(rectangle.name == name and rectangle.intersection(stored) for rectangle in rectangles):
                assert (name, file, offset, sizes, *rest) in received
        boxes = [tuple(box) for box in need.boxes.tolist()]
        assert len(boxes) == len(need.names) == len({rectangle.name for rectangle in rectangles})
    assert set(part.files) == {file for _, file, *_ in flat(part)}


def test_neighbours_need_one_box_together() -> None:
    """So that what is passed up the tree does not grow with the ranks."""
    rows = [Need.of([Rectangle("matrix", (64, 10), (4 * rank, 0), (4, 10))]) for rank in range(16)]
    assert reduce(Need.merge, rows).boxes.tolist() == [[0, 0, 0, 64, 10]]
    halves = [
        Need.of([Rectangle("matrix", (64, 10), (4 * (rank // 2), 5 * (rank % 2)), (4, 5))])
        for rank in range(32)
    ]
    assert len(reduce(Need.merge, halves).boxes) == 2


@contextmanager
def small_groups(ranks: int = 2) -> Iterator[None]:
    mesh_module.FAN_OUT, before = ranks, mesh_module.FAN_OUT
    try:
        yield
    finally:
        mesh_module.FAN_OUT = before


def _saved_and_loaded(directory: str) -> tuple[int, int, int, int]:
    """How often this rank merges, reads the manifest and encodes it, and rectangles that it was given."""
    counts = {"merge": 0, "read": 0, "encode": 0}
    with small_groups():
        mesh = Mesh.create(Layout(world=4), torch.device("cpu"))
    rank, shape = mesh.rank, (64, 8)
    values = torch.arange(512.0).view(shape)
    chunks = [
        Chunk(
            Rectangle(f"model.{name}", shape, (16 * rank, 0), (16, 8)),
            values[16 * rank : 16 * rank + 16].clone(),
        )
        for name in "abc"
    ]
    merge, read, encode = Index.merge, read_manifest, Manifest.encode

    def counted(name: str, call: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            counts[name] += 1
            return call(*arguments)

        return wrapped

    Index.merge = counted("merge", merge)  # type: ignore[method-assign]
    reader.read_manifest = counted("read", read)
    Manifest.encode = counted("encode", encode)  # type: ignore[method-assign]
    try:
        saved = Checkpointer(load_config({"run": {"dir": directory}}), mesh)
        saved.save(chunks, {"step": 1, "samples": 1})
        saved.wait()
        for chunk in chunks:
            chunk.tensor.zero_()
        manifest = saved.load(Path(directory) / "checkpoints/step-00000001", chunks)
        saved.close()
    finally:
        Index.merge, reader.read_manifest, Manifest.encode = merge, read, encode  # type: ignore[method-assign]
    assert all(torch.equal(chunk.tensor, values[16 * rank : 16 * rank + 16]) for chunk in chunks)
    assert manifest.step == 1 and manifest.config["run"]["dir"] == directory
    return counts["merge"], counts["read"], counts["encode"], len(manifest.index.rows)


def _of_hosts(directory: str, hosts: str) -> None:
    """Save and load where rank i is on host hosts[i]; ranks hold different numbers of rows."""
    with small_groups(4):
        mesh = Mesh.create(Layout(world=5), torch.device("cpu"))
    rank = mesh.rank
    values = torch.arange(120.0).view(15, 8)[rank * (rank + 1) // 2 :][: rank + 1]
    rectangle = Rectangle("model.a", (15, 8), (rank * (rank + 1) // 2, 0), (rank + 1, 8))
    # The first rank leaves its row to the second: another one writes its host's header.
    chunks = [Chunk(rectangle, values.clone(), (0, 1) if rank else None)]
    if rank == 1:
        row = Rectangle("model.a", (15, 8), (0, 0), (1, 8))
        chunks.append(Chunk(row, torch.arange(8.0).view(1, 8)))
    real, checkpointer.host_identity = checkpointer.host_identity, lambda: hosts[rank]
    try:
        saved = Checkpointer(load_config({"run": {"dir": directory}}), mesh)
        saved.save(chunks, {"step": 1, "samples": 1})
        saved.wait()
        wanted = [chunk.tensor.clone() for chunk in chunks]
        for chunk in chunks:
            chunk.tensor.zero_()
        saved.load(Path(directory) / "checkpoints/step-00000001", chunks)
        saved.close()
    finally:
        checkpointer.host_identity = real
    assert all(torch.equal(chunk.tensor, values) for chunk, values in zip(chunks, wanted))


@pytest.mark.parametrize(
    ("hosts", "firsts", "sections"),
    [
        ("aabbb", (0, 2, 4), (1, 2, 1)),  # the last rank is alone in its group of the tree
        ("aaaaa", (0, 4), (3, 1)),
        ("ababa", (0, 1, 4), (1, 2, 1)),
        ("abcde", (1, 2, 3, 4), (1, 1, 1, 1)),
    ],
)
def test_the_ranks_of_a_host_write_one_file(
    pool: Pool, tmp_path: Path, hosts: str, firsts: tuple[int, ...], sections: tuple[int, ...]
) -> None:
    """Each a section of it, but for the first rank, which has nothing to write."""
    pool.run(5, _of_hosts, str(tmp_path), hosts)
    path = tmp_path / "checkpoints/step-00000001"
    names = [f"rank-{rank:05d}.safetensors" for rank in firsts]
    assert sorted(file.name for file in path.glob("*.safetensors")) == names
    manifest = read_manifest(path)
    assert tuple(len(manifest.files[name].sections) for name in names) == sections
    assert verify_files(path, manifest) == []
    for name in names:
        with safe_open(path / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                first = int(key.partition("[")[2].partition(":")[0])
                assert file.get_tensor(key)[0, 0] == 8 * first
        content = bytearray((path / name).read_bytes())
        content[-1] ^= 1
        (path / name).write_bytes(content)
    problems = verify_files(path, manifest)
    assert len(problems) == len(names)
    for name in names:
        assert any(f"{name}: its checksum does not match its content" in problem for problem in problems)


def test_the_manifest_is_gathered_in_a_tree_and_sent_in_parts(pool: Pool, tmp_path: Path) -> None:
    counts = pool.run(4, _saved_and_loaded, str(tmp_path))
    merges, reads, encoded, given = zip(*counts)
    assert merges == (3, 0, 1, 0)  # rank 2 merges what rank 3 has written
    assert reads == (1, 0, 0, 0)
    assert encoded == (1, 0, 0, 0)
    assert given == (12, 3, 3, 3)


@pytest.mark.parametrize("seed", range(20))
def test_a_gap_and_an_overlap_are_found(seed: int) -> None:
    """Against counting how often every value is covered; the number of values is right."""
    draw = random.Random(seed)
    for name, shape in SHAPES.items():
        held = [part for rank in shares(4, draw) for part in rank if part.name == name]
        moved = draw.choice([part for part in held if part.sizes != shape] or held)
        offset = tuple(draw.randint(0, size - part) for size, part in zip(shape, moved.sizes))
        held[held.index(moved)] = replace(moved, offset=offset)
        cover = torch.zeros(shape, dtype=torch.int64)
        for part in held:
            cover[part.slices] += 1
        wrong = (cover != 1).nonzero().tolist()
        gap = index_of(0, held).gap(name)
        assert (gap is None) == (not wrong)
        if gap is not None:
            overlap = bool(cover[tuple(wrong[0])] > 1)
            assert gap == (
                f"rectangles overlap from {wrong[0]} on" if overlap else f"no rectangle covers {wrong[0]}"
            )


def test_a_manifest_is_written_without_torch() -> None:
    code = "import sys, hexad.checkpoint.directory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


def _refused(directory: str, again: bool = True) -> str:
    mesh = Mesh.create(Layout(world=2), torch.device("cpu"))
    saved = Checkpointer(load_config({"run": {"dir": directory}}), mesh)
    chunks = [Chunk(Rectangle(f"model.{n}", (4,), (2 * mesh.rank,), (2,)), torch.zeros(2)) for n in "vw"]
    real, TensorFileWriter.write = TensorFileWriter.write, _full  # type: ignore[method-assign]
    try:
        saved.save(chunks, {"step": 1, "samples": 1})
        saved.wait()
    except AgreedError as error:
        TensorFileWriter.write = real  # type: ignore[method-assign]
        if again:
            saved.save(chunks, {"step": 1, "samples": 1})
            saved.wait()
        return str(error)
    finally:
        TensorFileWriter.write = real  # type: ignore[method-assign]
        saved.close()
    return ""


def _full(writer: TensorFileWriter, values: torch.Tensor) -> None:
    """Both ranks write one file; the second has no room for its second tensor."""
    if torch.distributed.get_rank() == 1 and writer._blocks:
        raise OSError(28, "No space left on device")
    writer._take(memoryview(values.numpy()).cast("B"))


def _lost(directory: str) -> tuple[str, list[str]]:
    """A save whose file is shorter on disk than what was written, as after another client's changes."""
    mesh = Mesh.create(Layout(world=2), torch.device("cpu"))
    saved = Checkpointer(load_config({"run": {"dir": directory}}), mesh)
    chunk = Chunk(Rectangle("model.w", (4,), (2 * mesh.rank,), (2,)), torch.zeros(2))
    real = checkpointer.write_manifest

    def cut(path: Path, *rest: Any) -> None:
        real(path, *rest)
        os.truncate(path / "rank-00000.safetensors", 100)

    checkpointer.write_manifest = cut  # type: ignore[assignment]
    try:
        saved.save([chunk], {"step": 1, "samples": 1})
        saved.wait()
    except AgreedError as error:
        return str(error), os.listdir(Path(directory) / "checkpoints")
    finally:
        checkpointer.write_manifest = real
        saved.close()
    return "", []


def test_a_file_that_is_not_whole_is_not_committed(pool: Pool, tmp_path: Path) -> None:
    (one, left), (two, _) = pool.run(2, _lost, str(tmp_path))
    assert one == two and "rank-00000.safetensors has 100 bytes of" in one
    assert left == []


def test_an_error_of_any_rank_goes_up_the_tree(pool: Pool, tmp_path: Path) -> None:
    one, two = pool.run(2, _refused, str(tmp_path))
    assert one == two and "rank 1: No space left on device; there is no earlier checkpoint" in one
    path = tmp_path / "checkpoints/step-00000001"
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, "latest"}
    assert verify_files(path, read_manifest(path)) == []
    one, two = pool.run(2, _refused, str(tmp_path), False)
    assert one == two and "No space left on device; earlier checkpoints are intact" in one
    os.truncate(path / "rank-00000.safetensors", 100)
    one, _ = pool.run(2, _refused, str(tmp_path), False)
    assert "No space left on device; of earlier checkpoints, step-00000001 cannot be read or lack data" in one
