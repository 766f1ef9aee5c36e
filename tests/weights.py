"""Whole global tensors as a source of weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch

from hexad.checkpoint.index import Index
from hexad.checkpoint.tensor_file import Chunk, FilePart, TensorFile, to_write, write_shard
from hexad.config import HexadError
from hexad.parallel.rectangle import Rectangle


@dataclass(frozen=True)
class WholeTensors:
    """Tensors by our global name, in memory."""

    tensors: Mapping[str, torch.Tensor]

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Copy the rectangles that a rank holds."""
        for chunk in chunks:
            whole = self.tensors[chunk.name.removeprefix("model.")]
            shape = chunk.rectangle.shape
            if tuple(whole.shape) != shape:
                raise HexadError(f"{chunk.name}: found {tuple(whole.shape)}, expected {shape}")
            chunk.tensor.copy_(whole[chunk.rectangle.slices])


def chunk(
    name: str,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    tensor: torch.Tensor,
    holder: tuple[int, int] | None = (0, 1),
) -> Chunk:
    """The rectangle that begins at ``offset``."""
    return Chunk(Rectangle(name, shape, offset, tuple(tensor.shape)), tensor, holder)


def written(directory: Path, held: Sequence[Sequence[Chunk]], hosts: Sequence[int] | None = None) -> Index:
    """Write what ranks hold, as they would; ``hosts``: of each rank, by default all have their own."""
    mine = [list(to_write(chunks)) for chunks in held]
    hosts = range(len(held)) if hosts is None else hosts
    records = {}
    # The last rank is the first to write: none waits for another.
    for rank in reversed(range(len(held))):
        near = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        parts = {other: [FilePart(c.rectangle, c.tensor.dtype) for c in mine[other]] for other in near}
        file = TensorFile.of_host(rank, parts)
        records[rank] = write_shard(directory, file, (chunk.tensor for chunk in mine[rank]))
    return reduce(Index.merge, [records[rank] for rank in sorted(records)], Index.empty({}))
