"""Writing a checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from hexad.config import Config, dump_config
from hexad.parallel.rectangle import Rectangle

from .chunks import Chunk
from .directory import write_durably
from .manifest import MANIFEST_FILE, FileRecord, FileTable, Manifest, Stored, StoredTensor
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


def write_manifest(
    directory: Path,
    shards: Iterable[ShardFile],
    expected: Mapping[str, tuple[int, ...]],
    config: Config,
    progress: Mapping[str, Any],
    origin: Mapping[str, Any],
    others: Mapping[str, FileRecord] | None = None,
) -> Manifest:
    """Write ``config.yaml`` and ``manifest.json`` beside the tensor files of a checkpoint.

    Args:
        directory: of the checkpoint.
        shards: its tensor files.
        expected: name and shape of every tensor that they must cover.
        config: resolved.
        progress: as of :meth:`hexad.Engine.progress`.
        origin: see :class:`Manifest`.
        others: further files that exist already, by name.

    Raises:
        OSError: they cannot be written.
        ValueError: the shards do not cover every tensor exactly once.
    """
    text = dump_config(config).encode()
    write_durably(directory / "config.yaml", text)
    files = {"config.yaml": FileRecord(len(text), xxhash.xxh3_128_hexdigest(text)), **(others or {})}
    stored: dict[str, list[Stored]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for shard in shards:
        files[shard.file] = shard.record
        begin, block = shard.record.header, 1
        for part in shard.parts:
            rectangle = part.rectangle
            kinds[rectangle.name] = (part.dtype, rectangle.shape)
            stored.setdefault(rectangle.name, []).append(Stored(shard.file, rectangle, begin, block))
            dtype: torch.dtype = getattr(torch, part.dtype)
            begin += rectangle.numel * dtype.itemsize
            block += block_count(rectangle.sizes, dtype.itemsize)
    table = FileTable.of(files)
    tensors = {
        name: StoredTensor(*kinds[name], StoredTensor.pack(parts, table.names), table)
        for name, parts in stored.items()
    }
    tree = config.model_dump(mode="json", by_alias=True)
    manifest = Manifest(dict(progress), tree, tensors, files, dict(origin))
    manifest.check_coverage(expected)
    write_durably(directory / MANIFEST_FILE, manifest.encode())
    return manifest
