"""Writing a checkpoint's tensor files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hexad.parallel.rectangle import Rectangle

from .chunks import Chunk
from .index import Index
from .manifest import FileRecord
from .tensor_file import TensorFileWriter, block_count, dtype_name


@dataclass(frozen=True)
class Part:
    """A rectangle in a file; ``dtype`` is torch's name."""

    rectangle: Rectangle
    dtype: str

    @classmethod
    def of(cls, chunk: Chunk) -> Part:
        """That of a chunk."""
        return cls(chunk.rectangle, dtype_name(chunk.tensor.dtype))

    @property
    def key(self) -> str:
        """Its name in the file: ``model.norm.weight[0:64]``."""
        ranges = (f"{part.start}:{part.stop}" for part in self.rectangle.slices)
        return f"{self.rectangle.name}[{','.join(ranges)}]"


@dataclass(frozen=True)
class ShardFile:
    """A tensor file that was written, and its parts in order."""

    file: str
    record: FileRecord
    parts: tuple[Part, ...]

    def index(self) -> Index:
        """Where its values are."""
        begin, block, places = self.record.header, 1, []
        for part in self.parts:
            places.append((part.rectangle, part.dtype, block, begin))
            dtype: torch.dtype = getattr(torch, part.dtype)
            begin += part.rectangle.numel * dtype.itemsize
            block += block_count(part.rectangle.sizes, dtype.itemsize)
        return Index.of_file(self.file, self.record, places)


def open_shard(directory: Path, number: int, parts: Sequence[Part]) -> TensorFileWriter:
    """A writer of ``rank-<number>.safetensors``, to be given the values of ``parts`` in order."""
    tensors = [(part.key, getattr(torch, part.dtype), part.rectangle.sizes) for part in parts]
    return TensorFileWriter(directory / shard_name(number), tensors)


def shard_name(number: int) -> str:
    """The file that rank ``number`` writes."""
    return f"rank-{number:05d}.safetensors"


def write_shard(directory: Path, rank: int, chunks: Sequence[Chunk]) -> ShardFile | None:
    """Write this rank's chunks; None, and no file, if there are none.

    Raises:
        OSError: the disk is full, or the directory is gone or closed.
    """
    if not chunks:
        return None
    parts = tuple(Part.of(chunk) for chunk in chunks)
    with open_shard(directory, rank, parts) as writer:
        for chunk in chunks:
            writer.write(chunk.tensor)
        return ShardFile(shard_name(rank), writer.close(), parts)
