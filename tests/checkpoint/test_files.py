"""Chunks, files and rectangles: property tests with blocks of a few bytes, so that tensors have many."""

import os
import random
import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.checkpoint import tensor_file
from hexad.checkpoint.directory import write_manifest
from hexad.checkpoint.manifest import read_manifest, verify_files
from hexad.checkpoint.reader import Checkpoint
from hexad.checkpoint.tensor_file import Chunk, TensorFileWriter, to_write
from hexad.config import HexadError
from hexad.model.configuration import load_config

from ..weights import chunk as chunk_of
from ..weights import written

SHAPES = st.lists(st.integers(1, 11), min_size=1, max_size=3).map(tuple)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "BLOCK_BYTES", 48)
        patch.setattr(tensor_file, "_PART_BYTES", 80)
        yield


def write(directory: Path, ranks: list[list[Chunk]], hosts: Sequence[int] | None = None) -> Path:
    """A checkpoint of what each rank holds."""
    directory.mkdir(exist_ok=True)
    progress = {"step": 1, "samples": 2}
    index = written(directory, ranks, hosts)
    expected = {chunk.name: chunk.rectangle.shape for held in ranks for chunk in held}
    write_manifest(directory, index, expected, load_config(), progress, {"world": len(ranks)})
    return directory


def cut(name: str, whole: torch.Tensor, draw: random.Random) -> list[Chunk]:
    """A tensor in a grid of uneven rectangles."""
    edges = [sorted({0, n, *(draw.randrange(n) for _ in range(draw.randrange(3)))}) for n in whole.shape]
    spans = [list(pairwise(edge)) for edge in edges]
    pieces = [(tuple(b for b, _ in box), whole[tuple(slice(*s) for s in box)]) for box in product(*spans)]
    return [chunk_of(name, tuple(whole.shape), offset, values) for offset, values in pieces]


@settings(max_examples=60)
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), ranks=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_any_rectangle_of_any_division(
    shape: tuple[int, ...], dtype: torch.dtype, ranks: int, seed: int
) -> None:
    draw = random.Random(seed)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    held: list[list[Chunk]] = [[] for _ in range(ranks)]
    for chunk in cut("weight", whole, draw):
        # Some pieces are on one rank, some on several, which then share the writing.
        holders = draw.sample(range(ranks), draw.randint(1, ranks))
        for place, rank in enumerate(holders):
            held[rank].append(replace(chunk, holder=(place, len(holders))))
    with TemporaryDirectory() as scratch:
        path = write(Path(scratch) / "checkpoint", held, [draw.randrange(ranks) for _ in held])
        assert verify_files(path, read_manifest(path)) == []
        with Checkpoint(path) as checkpoint:
            assert torch.equal(checkpoint.read("weight"), whole)
            for _ in range(5):
                offset = tuple(draw.randrange(n) for n in shape)
                sizes = tuple(draw.randint(1, n - o) for n, o in zip(shape, offset))
                box = tuple(slice(o, o + s) for o, s in zip(offset, sizes))
                assert torch.equal(checkpoint.read("weight", offset, sizes), whole[box])
            if dtype in (torch.float32, torch.bfloat16, torch.float16):
                wide = torch.empty(shape, dtype=torch.float64)
                checkpoint.fill([chunk_of("weight", shape, (0,) * len(shape), wide)])
                assert torch.equal(wide, whole.double())


def test_holders_share_the_writing_evenly() -> None:
    """Of what all hold, each writes about as much, whatever the sizes; small ones go to different ranks."""
    big = torch.zeros(1000, 4)
    held = [list(to_write([chunk_of("big", (1000, 4), (0, 0), big, (rank, 7))])) for rank in range(7)]
    rows = [sum(chunk.tensor.shape[0] for chunk in mine) for mine in held]
    assert sum(rows) == 1000 and max(rows) - min(rows) <= 1
    small = [
        [
            chunk.name
            for chunk in to_write(chunk_of(f"w{i}", (3,), (0,), torch.zeros(3), (r, 7)) for i in range(70))
        ]
        for r in range(7)
    ]
    assert sorted(name for names in small for name in names) == sorted(f"w{i}" for i in range(70))
    assert max(map(len, small)) <= 20
    assert not list(to_write([chunk_of("copy", (3,), (0,), torch.zeros(3), None)]))


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "c", [[chunk_of("w", (600, 4), (0, 0), torch.randn(600, 4))]])
    read: list[int] = []
    block = Checkpoint._block

    def counted(self: Checkpoint, file: str, number: int, begin: int, out: torch.Tensor) -> None:
        read.append(out.numel())
        block(self, file, number, begin, out)

    monkeypatch.setattr(Checkpoint, "_block", counted)
    with Checkpoint(path) as checkpoint:
        checkpoint.read("w", (301, 1), (30, 2))
        header = checkpoint.manifest.files["rank-00000.safetensors"].header
    # Rows have 16 bytes, blocks 3 rows: 30 rows that begin inside one touch 11 at most.
    assert header in read and sum(read) <= header + 11 * 48


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("other", (5, 3), torch.float32, "tensor other is missing"),
        ("w", (5, 4), torch.float32, r"tensor w has shape \(5, 3\), the model has \(5, 4\)"),
        ("w", (5, 3), torch.bfloat16, "precision.dtype: .* stores w in float32, which does not fit"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    path = write(tmp_path / "c", [[chunk_of("w", (5, 3), (0, 0), torch.randn(5, 3))]])
    out = torch.empty(shape, dtype=dtype)
    with Checkpoint(path) as checkpoint, pytest.raises(HexadError, match=message):
        checkpoint.fill([chunk_of(name, shape, (0, 0), out)])


def test_a_save_that_does_not_cover_a_tensor_is_refused(tmp_path: Path) -> None:
    def part(row: int, rows: int) -> Chunk:
        return chunk_of("w", (5, 3), (row, 0), torch.randn(rows, 3))

    for held, message in (
        ([part(0, 2)], "tensor w: found 6 values, expected 15"),
        ([part(0, 2), part(1, 3)], r"tensor w: rectangles overlap from \[1, 0\] on"),  # 15, row 4 is not
        ([part(0, 2), part(3, 3)], "tensor w: a rectangle exceeds its shape"),
        ([chunk_of("w", (5, 3), (0, 0), torch.randn(5, 3), None)], r"tensor w of shape \(5, 3\) is not in"),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / message[:20], [held])
        assert not (tmp_path / message[:20] / "manifest.json").exists()


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("hexad.checkpoint.manifest.FORMATS", (99,))
        path = write(tmp_path / "c", [[chunk_of("w", (1,), (0,), torch.randn(1))]])
    with pytest.raises(HexadError, match="format 99, this version of Hexad reads formats 2 and 3") as caught:
        read_manifest(path)
    assert caught.type is HexadError  # whole, and not to be set aside by an older version


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    count = 90
    whole = torch.randn(count, 2)
    ranks = [[chunk_of("w", (count, 2), (row, 0), whole[row : row + 1])] for row in range(count)]
    path = write(tmp_path / "c", ranks)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, limits[1]))
        with Checkpoint(path) as checkpoint:
            assert torch.equal(checkpoint.read("w"), whole)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with Checkpoint(path) as checkpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", _denied)
        with pytest.raises(HexadError, match=r"rank-0000\d\.safetensors: cannot be read: denied") as caught:
            checkpoint.read("w")
    assert caught.type is HexadError  # a hiccup is no damage


def _denied(*_: object) -> int:
    raise PermissionError(13, "denied")


def test_a_writer_takes_no_more_and_no_fewer_values_than_declared(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "few", [("w", torch.float32, (4,))]) as writer:
        writer.write(torch.zeros(3))
        with pytest.raises(ValueError, match="fewer"):
            writer.close()
    writer = TensorFileWriter(tmp_path / "many", [("w", torch.float32, (4,))])
    with writer, pytest.raises(ValueError, match="more"):
        writer.write(torch.zeros(5))
