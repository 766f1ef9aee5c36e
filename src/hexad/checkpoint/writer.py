"""Writing a checkpoint's tensor files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        """The part that a chunk fills."""
        return cls(chunk.rectangle, dtype_name(chunk.tensor.dtype))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The ``torch.dtype``."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def key(self) -> str:
        """Its name in the file: ``model.norm.weight[0:64]``."""
        ranges = (f"{part.start}:{part.stop}" for part in self.rectangle.slices)
        return f"{self.rectangle.name}[{','.join(ranges)}]"


@dataclass(frozen=True)
class TensorFile:
    """A tensor file that the ranks of a host write together, each a section of it.

    Attributes:
        name: of the file.
        parts: of all of them, in the order of the ranks.
        own: this rank's.
    """

    name: str
    parts: tuple[Part, ...]
    own: slice

    @classmethod
    def alone(cls, parts: Iterable[Part]) -> TensorFile:
        """A checkpoint's only one, written by one process."""
        parts = tuple(parts)
        return cls(_name(0), parts, slice(0, len(parts)))

    @classmethod
    def of_host(cls, rank: int, parts: Mapping[int, Sequence[Part]]) -> TensorFile:
        """That of some ranks of a host; ``parts``: of each of them, by rank."""
        ranks = sorted(parts)
        before = sum(len(parts[each]) for each in ranks if each < rank)
        together = tuple(part for each in ranks for part in parts[each])
        return cls(_name(ranks[0]), together, slice(before, before + len(parts[rank])))

    def open(self, directory: Path) -> TensorFileWriter:
        """A writer, to be given the values of this rank's parts in order."""
        tensors = [(part.key, part.torch_dtype, part.rectangle.sizes) for part in self.parts]
        own = None if len(self.parts) == self.own.stop - self.own.start else self.own
        return TensorFileWriter(directory / self.name, tensors, own=own)

    def index(self, record: FileRecord) -> Index:
        """Where this rank's values are; ``record``: of the section that it has written."""
        begin, block, places = record.header, 1, []
        for part in self.parts:
            places.append((part.rectangle, part.dtype, block, begin))
            begin += part.rectangle.numel * part.torch_dtype.itemsize
            block += block_count(part.rectangle.sizes, part.torch_dtype.itemsize)
        return Index.of_file(self.name, record, places[self.own])


def _name(rank: int) -> str:
    """Of the file of a host whose first rank that is."""
    return f"rank-{rank:05d}.safetensors"


def write_shard(directory: Path, file: TensorFile, chunks: Sequence[Chunk]) -> Index:
    """Write this rank's chunks to its host's file; returns where they are.

    Raises:
        OSError: the disk is full, or the directory is gone or closed.
    """
    if not chunks:
        return Index.empty({})
    with file.open(directory) as writer:
        for chunk in chunks:
            writer.write(chunk.tensor)
        return file.index(writer.close())
