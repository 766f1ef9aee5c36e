"""Reading a checkpoint: any rectangle of any tensor, only the blocks it needs, verified; alone, or on all
ranks together, of which the first reads the manifest and sends each rank its part."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import sub
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from hexad.comm import agreed, from_first, scattered
from hexad.config import HexadError
from hexad.parallel.rectangle import Rectangle
from hexad.topology.mesh import Axis

from .directory import wait_until_visible
from .index import GlobalTensor, Index, Need
from .manifest import (
    Manifest,
    check_file,
    check_size,
    damaged,
    manifest_checksum,
    read_manifest,
    unreadable,
)
from .tensor_file import Chunk, dtype_name, rows_per_block

_OPEN_FILES = 8
"""Files of a checkpoint that are open at once: parts are read in the files' order."""


class _Part(NamedTuple):
    """The rectangle that a chunk and a stored one have in common; parts are read in the order of files and
    bytes.

    Attributes:
        span: the bytes of the file that hold the rows of the common rectangle.
        begin, block: the byte where the values of the stored rectangle begin, and the number of their first
            block among the file's.
        chunk: to fill.
        dtype: of the stored values.
    """

    file: str
    span: tuple[int, int]
    begin: int
    block: int
    chunk: Chunk
    stored: Rectangle
    common: Rectangle
    dtype: torch.dtype


class Checkpoint:
    """A checkpoint opened for reading. Used as a context manager, which closes its files.

    Args:
        path: of the checkpoint.
        verify: check the values' checksums while reading; the sizes of files that are read always are.
        manifest: the part of it that is needed, if it was read and verified elsewhere.

    Attributes:
        manifest: what it holds.

    Raises:
        DamagedCheckpoint: its manifest or its configuration is damaged.
    """

    def __init__(self, path: Path, verify: bool = True, manifest: Manifest | None = None) -> None:
        self.path = path
        self.verify = verify
        self.manifest = manifest or read_manifest(path)
        # Tensor files are opened when they are needed: there may be thousands of them.
        if manifest is None and verify:
            for name, record in self.manifest.files.items():
                if not record.header:
                    check_file(path, name, record)
        self._files: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Overwrite the tensors of ``chunks``, reading only what they hold. Floats may be widened.

        Raises:
            HexadError: a tensor is missing, or has another shape or a format that does not fit.
            DamagedCheckpoint: a file is missing, too short, or fails its checksum.
        """
        every = (part for chunk in chunks for part in self._parts(chunk))
        parts = sorted(every, key=lambda part: (part.file, part.span))
        for part, after in zip_longest(parts, parts[1:]):
            if after is not None:
                self._announce(after)
            self._read(part)

    def _parts(self, chunk: Chunk) -> Iterator[_Part]:
        """The parts of stored rectangles that make up a chunk."""
        self._check(chunk)
        if not chunk.tensor.numel():
            return
        shape, names, values = chunk.rectangle.shape, list(self.manifest.files), 0
        dtype = _dtype(self.manifest.tensors[chunk.name].dtype)
        for file, block, begin, *place in self.manifest.index.touching(chunk.rectangle).tolist():
            stored = Rectangle(chunk.name, shape, tuple(place[: len(shape)]), tuple(place[len(shape) :]))
            common = chunk.rectangle.intersection(stored)
            assert common is not None
            width = math.prod(stored.sizes[1:]) * dtype.itemsize
            first = begin + (common.offset[0] - stored.offset[0]) * width
            span = first, first + common.sizes[0] * width
            values += common.numel
            yield _Part(names[file], span, begin, block, chunk, stored, common, dtype)
        if values != chunk.tensor.numel():
            raise damaged(self.path, f"tensor {chunk.name} is incomplete")

    def read(
        self, name: str, offset: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """A rectangle of a tensor (by default all of it), in the format it is stored in.

        Raises:
            HexadError: as for :meth:`fill`.
        """
        tensor = self._tensor(name)
        begin = tuple(offset) if offset is not None else (0,) * len(tensor.shape)
        rectangle = Rectangle(name, tensor.shape, begin, tuple(tensor.shape if sizes is None else sizes))
        files = list(self.manifest.files.items())
        for number in {row[0] for row in self.manifest.index.touching(rectangle).tolist()}:
            check_size(self.path, *files[number])  # before memory is allocated for what a manifest claims
        out = torch.empty(rectangle.sizes, dtype=_dtype(tensor.dtype))
        self.fill([Chunk(rectangle, out)])
        return out

    def _tensor(self, name: str) -> GlobalTensor:
        if name not in self.manifest.tensors:
            raise HexadError(f"checkpoint {self.path}: tensor {name} is missing")
        return self.manifest.tensors[name]

    def _check(self, chunk: Chunk) -> None:
        tensor = self._tensor(chunk.name)
        if tensor.shape != chunk.rectangle.shape:
            raise HexadError(
                f"checkpoint {self.path}: tensor {chunk.name} has shape {tensor.shape}, "
                f"the model has {chunk.rectangle.shape}"
            )
        if not chunk.accepts(_dtype(tensor.dtype)):
            raise HexadError(
                f"precision.dtype: checkpoint {self.path} stores {chunk.name} in {tensor.dtype}, which does "
                f"not fit into this run's {dtype_name(chunk.tensor.dtype)}; set the dtype it was trained with"
            )

    def _announce(self, part: _Part) -> None:
        """Make the system read ahead the bytes of a part."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        begin, end = part.span
        os.posix_fadvise(self._file(part.file), begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _read(self, part: _Part) -> None:
        """Copy the rectangle that a chunk and a stored one have in common, block by block."""
        stored, common, dtype = part.stored, part.common, part.dtype
        row_bytes = math.prod(stored.sizes[1:]) * dtype.itemsize
        step = rows_per_block(stored.sizes, dtype.itemsize)
        low = common.offset[0] - stored.offset[0]
        for number in range(low // step, -(-(low + common.sizes[0]) // step)):
            block = stored.rows(number * step, min((number + 1) * step, stored.sizes[0]))
            piece = common.intersection(block)
            assert piece is not None
            to = _view(part.chunk.tensor.detach(), part.chunk.rectangle, piece)
            place = part.begin + number * step * row_bytes
            # Directly into place, if the complete block belongs there unchanged.
            if piece == block and to.dtype == dtype and to.is_contiguous() and to.device.type == "cpu":
                self._block(part.file, part.block + number, place, to.flatten().view(torch.uint8))
                continue
            count = block.sizes[0] * row_bytes
            if self._buffer.numel() < count:
                self._buffer = torch.empty(count, dtype=torch.uint8)
            data = self._buffer[:count]
            self._block(part.file, part.block + number, place, data)
            to.copy_(_view(data.view(dtype).view(block.sizes), block, piece))

    def _block(self, file: str, number: int, begin: int, out: Tensor) -> None:
        """Read a block of a file to ``out``, bytes on the CPU, and verify it."""
        descriptor = self._file(file)
        view = memoryview(out.numpy())  # type: ignore[arg-type]
        try:
            done = 0
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], begin + done)
                if not count:
                    raise damaged(self.path, f"{file} ends early")
                done += count
        except OSError as error:
            raise unreadable(self.path, file, error) from None
        digests = self.manifest.files[file].blocks
        if self.verify and xxhash.xxh3_64_digest(view) != digests[8 * number : 8 * number + 8]:
            raise damaged(
                self.path,
                f"{file}: bytes {begin} to {begin + len(view)} do not match their checksum",
            )

    def _file(self, name: str) -> int:
        """The descriptor of a file, whose size and header are checked when it is opened.

        Only the last few stay open: a checkpoint may have more files than a process may open.
        """
        if name in self._files:
            return self._files[name]
        if len(self._files) == _OPEN_FILES:
            os.close(self._files.pop(next(iter(self._files))))
        record = self.manifest.files[name]
        check_size(self.path, name, record)
        try:
            self._files[name] = os.open(self.path / name, os.O_RDONLY)
        except OSError as error:
            raise unreadable(self.path, name, error) from None
        self._block(name, 0, 0, torch.empty(record.header, dtype=torch.uint8))
        return self._files[name]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def _view(values: Tensor, rectangle: Rectangle, part: Rectangle) -> Tensor:
    """The part of a rectangle's values."""
    low = map(sub, part.offset, rectangle.offset)
    return values[tuple(slice(begin, begin + size) for begin, size in zip(low, part.sizes))]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise HexadError(f"checkpoint: found tensors of format {name!r}, which this torch does not know")
    return dtype


_LONGEST_LAG = 90.0
"""Seconds until a rank must see the checkpoint that the first rank has chosen: NFS keeps attributes and
listings of directories for up to 60 by default (acdirmax)."""


def chosen(choose: Callable[[], Path | None], axis: Axis, where: Path) -> Path | None:
    """The checkpoint that the first rank chooses, returned when every rank sees it. If ranks of other hosts
    chose for themselves, they could use old listings of a network file system. ``where`` names the searched
    place in messages.

    Raises:
        AgreedError: what ``choose`` raises, or a rank does not see what was found.
    """

    def first() -> tuple[Path, bytes | None] | None:
        try:
            path = choose()
        except OSError as error:
            raise HexadError(f"{error.filename or where}: cannot be read: {error.strerror}") from None
        return None if path is None else (path, manifest_checksum(path))

    choice = from_first(first, axis)
    if choice is None:
        return None
    agreed(lambda: wait_until_visible(*choice, _LONGEST_LAG), axis)
    return choice[0]


def load(
    path: Path,
    chunks: Sequence[Chunk],
    axis: Axis,
    verify: bool = True,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> Manifest:
    """Fill ``chunks`` from a checkpoint, all ranks together; optimizer state is unchanged if the checkpoint
    has weights only.

    Args:
        path: of the checkpoint, which all ranks see.
        chunks: of this rank.
        axis: of all ranks of the mesh.
        verify: check the values' checksums while reading.
        check: refuses a manifest, on the first rank.

    Returns:
        Its manifest: all of it on the first rank, which reads it, on others the part for ``chunks``.

    Raises:
        AgreedError: it is damaged (``kind`` is :class:`DamagedCheckpoint`), of another format, refused by
            ``check``, or does not have what ``chunks`` ask for.
    """
    complete: list[Manifest] = []  # on the first rank

    def read() -> tuple[Manifest, bool]:
        with Checkpoint(path, verify) as checkpoint:
            manifest = checkpoint.manifest
        check(manifest)
        complete.append(manifest)
        return replace(manifest, index=Index.empty({})), manifest.weights_only

    head, weights_only = from_first(read, axis)
    loaded = [chunk for chunk in chunks if not weights_only or chunk.name.startswith("model.")]
    need = Need.of(chunk.rectangle for chunk in loaded)
    part = scattered(complete[0].index if complete else None, axis, need, Need.merge, Index.select)
    manifest = complete[0] if complete else replace(head, index=part)

    def fill() -> None:
        with Checkpoint(path, verify, manifest) as checkpoint:
            checkpoint.fill(loaded)

    agreed(fill, axis)
    return manifest
