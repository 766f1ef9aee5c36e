"""A rank's part of a checkpoint as chunks, rectangles of global tensors, and the tensor files that hold them:
safetensors, written sequentially, with checksums.

The `safetensors <https://github.com/huggingface/safetensors>`_ package reads them; its writer needs all
tensors in memory at once, and neither its reader nor its writer detects a flipped bit.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from hexad.parallel.rectangle import Rectangle

from .index import FileRecord, Index

_PART_BYTES = 4 * 2**20
"""Copies smaller than this are written by one of the ranks that hold them, larger ones by several."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor, with its values.

    Attributes:
        rectangle: which.
        tensor: its values; saving reads them, loading overwrites them.
        holder: (i, n): this is rank number i of n that hold the same rectangle; None where ranks that are not
            among them write it.
        rounded: loading may round values to the tensor's format; otherwise floats are only widened.
        steady: the values change in an update only.
    """

    rectangle: Rectangle
    tensor: Tensor
    holder: tuple[int, int] | None = (0, 1)
    rounded: bool = False
    steady: bool = False

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether values of this format may be loaded."""
        floats = dtype.is_floating_point and self.tensor.dtype.is_floating_point
        return (self.rounded and floats) or torch.promote_types(dtype, self.tensor.dtype) == self.tensor.dtype

    @property
    def name(self) -> str:
        """Name of the global tensor."""
        return self.rectangle.name

    def rows(self, begin: int, end: int) -> Chunk:
        """The chunk of rows ``begin`` to ``end - 1``."""
        return replace(self, rectangle=self.rectangle.rows(begin, end), tensor=self.tensor[begin:end])


def to_write(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the parts that this rank writes. All holders together write everything once and about the same
    amount each: a large chunk is split by rows, a small one written by one holder. Needs no communication."""
    for chunk in chunks:
        if chunk.holder is None or not chunk.tensor.numel():
            continue
        mine, holders = chunk.holder
        rows = chunk.tensor.shape[0]
        parts = max(1, min(holders, rows, chunk.tensor.nbytes // _PART_BYTES))
        # Holders of small chunks alternate by name and offset (not by Python's hash, which differs by rank).
        first = zlib.crc32(f"{chunk.name}{chunk.rectangle.offset}".encode())
        part = (mine - first) % holders
        if part < parts:
            yield chunk.rows(rows * part // parts, rows * (part + 1) // parts)


BLOCK_BYTES = 2**20
"""Checksums cover blocks of complete rows of about this size: a reader reads complete blocks."""

SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of the formats that checkpoints hold."""


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a format, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def rows_per_block(sizes: Sequence[int], itemsize: int) -> int:
    """How many rows (of dim 0) of a stored rectangle are checked together."""
    return max(1, BLOCK_BYTES // max(1, math.prod(sizes[1:]) * itemsize))


def block_count(sizes: Sequence[int], itemsize: int) -> int:
    """The number of blocks of a stored rectangle."""
    return -(-(sizes[0] if sizes else 1) // rows_per_block(sizes, itemsize))


TensorEntry = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor in a file."""


class TensorFileWriter:
    """Writes one safetensors file, or a section of one. Used as a context manager, or closed by hand.

    Args:
        path: of the file.
        tensors: everything that the file will hold, in that order.
        metadata: texts for the header.
        written: those that this writer writes; others write the rest, at the same time and into the same
            file. The writer of the first tensor writes the header. By default all: then the file must not
            exist.

    Raises:
        OSError: the file cannot be created; so do :meth:`write` and :meth:`close` for a full disk.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[TensorEntry],
        metadata: Mapping[str, str] | None = None,
        written: slice | None = None,
    ) -> None:
        header = _header(tensors, metadata or {})
        self.header = len(header)
        mine = tensors if written is None else tensors[written]
        self._expected = (size for _, dtype, shape in mine for size in _block_sizes(shape, dtype.itemsize))
        self._whole = xxhash.xxh3_128()
        self._blocks: list[bytes] = []
        self._block = xxhash.xxh3_64()
        self._missing = 0
        self._size = 0
        alone = written is None
        self._file = open(path, "xb" if alone else "wb", 0, opener=None if alone else _beside_others)  # noqa: SIM115 (closed by close)
        try:
            if written is None or not written.start:
                self._missing = self.header
                self._take(memoryview(header))
            else:
                self._file.seek(self.header + sum(map(_nbytes, tensors[: written.start])))
        except BaseException:
            self._file.close()
            raise

    def write(self, values: Tensor) -> None:
        """Write the next values, in the order declared; a tensor may come in any number of calls.

        Raises:
            ValueError: more than declared.
        """
        flat = values.detach().contiguous().to("cpu").flatten()
        self._take(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def close(self) -> FileRecord:
        """Flush to disk. Returns the file's entry in a manifest, as far as it was written here.

        Raises:
            ValueError: fewer values were written than declared.
        """
        with self._file:
            if self._missing or next(self._expected, None) is not None:
                raise ValueError("fewer values than the header declares")
            os.fsync(self._file.fileno())
        section = self._size, self._whole.hexdigest()
        return FileRecord((section,), self.header, b"".join(self._blocks))

    def _take(self, data: memoryview) -> None:
        """Hash and write, block by block, while the data is in the processor's cache."""
        while data.nbytes:
            if not self._missing:
                self._missing = next(self._expected, 0)
                if not self._missing:
                    raise ValueError("more values than the header declares")
            part, data = data[: self._missing], data[self._missing :]
            self._block.update(part)
            self._whole.update(part)
            self._size += part.nbytes
            self._missing -= part.nbytes
            while part.nbytes:
                part = part[self._file.write(part) :]
            if not self._missing:
                self._blocks.append(self._block.digest())
                self._block.reset()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _beside_others(path: str, flags: int) -> int:
    """Open a file that others may have created and begun to write."""
    return os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)


def _nbytes(tensor: TensorEntry) -> int:
    _, dtype, shape = tensor
    return math.prod(shape) * dtype.itemsize


def _block_sizes(shape: Sequence[int], itemsize: int) -> Iterator[int]:
    """Bytes of each block of a tensor."""
    rows, width = (shape[0] if shape else 1), math.prod(shape[1:]) * itemsize
    step = rows_per_block(shape, itemsize)
    for row in range(0, rows, step):
        if width:
            yield min(step, rows - row) * width


def _header(tensors: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The header of a file, length and JSON: padded with spaces, so that values are aligned to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for tensor in tensors:
        name, dtype, shape = tensor
        end = begin + _nbytes(tensor)
        entries[name] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class FilePart:
    """A rectangle in a file."""

    rectangle: Rectangle
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Name of the rectangle in the file: ``model.norm.weight[0:64]``."""
        ranges = (f"{part.start}:{part.stop}" for part in self.rectangle.slices)
        return f"{self.rectangle.name}[{','.join(ranges)}]"


@dataclass(frozen=True)
class TensorFile:
    """A tensor file that the ranks of a host write together, each a section of it.

    Attributes:
        name: of the file.
        parts: of all of them, in the order of the ranks.
        section: the numbers of this rank's parts.
    """

    name: str
    parts: tuple[FilePart, ...]
    section: slice

    @classmethod
    def of_host(cls, rank: int, parts: Mapping[int, Sequence[FilePart]]) -> TensorFile:
        """The file that some ranks of a host write, named by the first; ``parts``: of each, by rank."""
        ranks = sorted(parts)
        before = sum(len(parts[other]) for other in ranks if other < rank)
        together = tuple(part for other in ranks for part in parts[other])
        return cls(f"rank-{ranks[0]:05d}.safetensors", together, slice(before, before + len(parts[rank])))

    def index(self, record: FileRecord) -> Index:
        """The index of this rank's values; ``record``: of the section that it has written."""
        begin, block, places = record.header, 1, []
        for part in self.parts:
            places.append((part.rectangle, dtype_name(part.dtype), block, begin))
            begin += part.rectangle.numel * part.dtype.itemsize
            block += block_count(part.rectangle.sizes, part.dtype.itemsize)
        return Index.of_file(self.name, record, places[self.section])


def write_shard(directory: Path, file: TensorFile, values: Iterable[Tensor]) -> Index:
    """Write the values of this rank's parts of a file, in order and in any slices; returns where they are.

    Raises:
        OSError: the disk is full, or the directory is gone or closed.
    """
    count = len(file.parts[file.section])
    if not count:
        return Index.empty({})
    tensors = [(part.key, part.dtype, part.rectangle.sizes) for part in file.parts]
    written = None if count == len(tensors) else file.section
    with TensorFileWriter(directory / file.name, tensors, written=written) as writer:
        for tensor in values:
            writer.write(tensor)
        return file.index(writer.close())
