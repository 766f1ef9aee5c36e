"""Writing a checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from hexad.config import Config, dump_config

from .chunks import Chunk
from .directory import write_durably
from .manifest import MANIFEST_FILE, Entry, FileRecord, Manifest, StoredTensor
from .tensor_file import TensorFileWriter, block_count


@dataclass(frozen=True)
class Rectangle:
    """What of a global tensor a file holds: ``dtype`` in torch's word."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, chunk: Chunk) -> Rectangle:
        """That of a chunk."""
        dtype = str(chunk.tensor.dtype).removeprefix("torch.")
        return cls(chunk.name, dtype, chunk.shape, chunk.offset, tuple(chunk.tensor.shape))

    @property
    def key(self) -> str:
        """Its name in the file: ``model.norm.weight[0:64]``."""
        ranges = (f"{o}:{o + s}" for o, s in zip(self.offset, self.sizes))
        return f"{self.name}[{','.join(ranges)}]"


@dataclass(frozen=True)
class Share:
    """A tensor file as it was written, and the rectangles it holds, in its order."""

    file: str
    record: FileRecord
    rectangles: tuple[Rectangle, ...]


def open_share(directory: Path, number: int, rectangles: Sequence[Rectangle]) -> TensorFileWriter:
    """A writer of ``rank-<number>.safetensors``, which takes the rectangles' values in their order."""
    tensors = [(r.key, getattr(torch, r.dtype), r.sizes) for r in rectangles]
    return TensorFileWriter(directory / share_name(number), tensors)


def share_name(number: int) -> str:
    """The file that rank ``number`` writes."""
    return f"rank-{number:05d}.safetensors"


def write_share(directory: Path, rank: int, chunks: Sequence[Chunk]) -> Share | None:
    """Write what this rank has to write; None, and no file, where that is nothing.

    Raises:
        OSError: the disk is full, or the directory is gone or closed.
    """
    if not chunks:
        return None
    rectangles = tuple(Rectangle.of(chunk) for chunk in chunks)
    with open_share(directory, rank, rectangles) as writer:
        for chunk in chunks:
            writer.write(chunk.tensor)
        return Share(share_name(rank), writer.close(), rectangles)


def write_manifest(
    directory: Path,
    shares: Iterable[Share],
    expected: Mapping[str, tuple[int, ...]],
    config: Config,
    progress: Mapping[str, Any],
    origin: Mapping[str, Any],
    others: Mapping[str, FileRecord] | None = None,
) -> Manifest:
    """Write ``config.yaml`` and ``manifest.json`` beside the tensor files of a checkpoint.

    Args:
        directory: of the checkpoint.
        shares: its tensor files.
        expected: name and shape of every tensor that they must cover.
        config: resolved.
        progress: as of :meth:`hexad.Engine.progress`.
        origin: see :class:`Manifest`.
        others: further files that stand there already, by name.

    Raises:
        OSError: they cannot be written.
        ValueError: the shares do not cover every tensor exactly once.
    """
    text = dump_config(config).encode()
    write_durably(directory / "config.yaml", text)
    files = {"config.yaml": FileRecord(len(text), xxhash.xxh3_128_hexdigest(text)), **(others or {})}
    stored: dict[str, list[Entry]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, share in enumerate(shares, start=len(files)):
        files[share.file] = share.record
        begin, block = share.record.header, 1
        for rectangle in share.rectangles:
            kinds[rectangle.name] = (rectangle.dtype, rectangle.shape)
            entry = number, rectangle.offset, rectangle.sizes, begin, block
            stored.setdefault(rectangle.name, []).append(entry)
            dtype: torch.dtype = getattr(torch, rectangle.dtype)
            begin += torch.Size(rectangle.sizes).numel() * dtype.itemsize
            block += block_count(rectangle.sizes, dtype.itemsize)
    names = list(files)
    tensors = {
        name: StoredTensor(*kinds[name], StoredTensor.pack(entries), names)
        for name, entries in stored.items()
    }
    tree = config.model_dump(mode="json", by_alias=True)
    manifest = Manifest(dict(progress), tree, tensors, files, dict(origin))
    manifest.check_coverage(expected)
    write_durably(directory / MANIFEST_FILE, manifest.encode())
    return manifest
