"""The manifest of a checkpoint: step, configuration, location of each tensor's values, checksums, and the
comparison of the files with it.

``manifest.json`` covers the complete directory, itself included: a checkpoint that was truncated, changed or
mixed with another is detected before a value of it is used. No torch.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hexad.config import HexadError
from hexad.parallel.rectangle import Rectangle

FORMATS = (2, 3)
"""Those that are read; the last is written. In format 2 a file was written by one rank."""
MANIFEST_FILE = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
"""Names of complete checkpoints in a run; one that is being replaced counts until its successor exists."""


class DamagedCheckpoint(HexadError):
    """A checkpoint differs from what was written. Raised on the rank that found it."""


def damaged(path: Path, problem: str) -> DamagedCheckpoint:
    """The error for a checkpoint in which ``problem`` was found."""
    return DamagedCheckpoint(f"checkpoint {path}: damaged: {problem}")


def unreadable(path: Path, name: str, error: OSError) -> HexadError:
    """The error for a file that cannot be read: damage if it is missing, else possibly a transient error of
    the file system, a missing permission, or too many open files."""
    if isinstance(error, FileNotFoundError):
        return damaged(path, f"{name} is missing")
    return HexadError(f"checkpoint {path}: {name}: cannot be read: {error.strerror}")


@dataclass(frozen=True)
class FileRecord:
    """A checkpoint's manifest entry of a file.

    Attributes:
        sections: (bytes, XXH3-128 of them in hexadecimal, as ``xxhsum -H2`` gives it) of the parts of the
            file, each written by one rank, in the file's order.
        header: bytes before the values of a tensor file; 0 in other files.
        blocks: XXH3-64 of the header and of every block of values, 8 bytes each, in the file's order.
    """

    sections: tuple[tuple[int, str], ...]
    header: int = 0
    blocks: bytes = b""

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(size for size, _ in self.sections)

    def followed_by(self, later: FileRecord) -> FileRecord:
        """The record of the file with the sections of a later record of it."""
        return replace(self, sections=self.sections + later.sections, blocks=self.blocks + later.blocks)


@dataclass(frozen=True)
class Stored:
    """A rectangle of a global tensor in a file.

    Attributes:
        file: its name.
        rectangle: which; it is never empty.
        begin: where its values begin in the file, in bytes; they follow each other in row-major order.
        block: the number of its first block among the file's.
    """

    file: str
    rectangle: Rectangle
    begin: int
    block: int


@dataclass(frozen=True)
class FileTable:
    """The files of a manifest, in its order, as rectangles refer to them.

    Attributes:
        names: of the files.
        blocks: how many each has.
    """

    names: tuple[str, ...]
    blocks: NDArray[np.int64]

    @classmethod
    def of(cls, files: Mapping[str, FileRecord]) -> FileTable:
        """Those of a manifest."""
        counts = [len(record.blocks) // 8 for record in files.values()]
        return cls(tuple(files), np.array(counts, dtype=np.int64))


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor.

    Attributes:
        dtype: in torch's word (``float32``).
        shape: global.
        source: the rectangles that cover it exactly once, as rows of int64 (file, block, begin, offset,
            sizes), or as a manifest has them: compressed, in base64. As JSON numbers the millions of
            rectangles of a large run would take minutes to decode and tens of gigabytes of objects.
        files: of the manifest.
    """

    dtype: str
    shape: tuple[int, ...]
    source: str | NDArray[np.int64]
    files: FileTable

    @property
    def packed(self) -> str:
        """The rectangles as a manifest has them."""
        if isinstance(self.source, str):
            return self.source
        return b64encode(zlib.compress(self.source.astype("<i8").tobytes(), 1)).decode()

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rectangles as rows.

        Raises:
            ValueError: they are not of :attr:`packed`'s form, or name a file or block that does not exist.
        """
        if not isinstance(self.source, str):
            return self.source
        width, blocks = 3 + 2 * len(self.shape), self.files.blocks
        # A rectangle has at least one block, whose checksum the manifest holds uncompressed. This bounds the
        # memory that a few compressed bytes can ask for.
        limit = 8 * width * int(blocks.sum())
        unpacking = zlib.decompressobj()
        try:
            raw = unpacking.decompress(b64decode(self.source), limit + 1)
        except zlib.error as error:
            raise ValueError(f"rectangles cannot be decompressed ({error})") from None
        if len(raw) > limit or not unpacking.eof or len(raw) % (8 * width):
            raise ValueError(f"rectangles of more than {limit} bytes, or of other dims")
        rows = np.frombuffer(raw, dtype="<i8").reshape(-1, width)
        files, numbers = rows[:, 0], rows[:, 1]
        if (rows < 0).any() or (files >= len(blocks)).any() or (numbers >= blocks[files]).any():
            raise ValueError("a rectangle is in no block of the files")
        shape, dims = np.array(self.shape), len(self.shape)
        if (rows[:, 3 + dims :] > shape).any() or (rows[:, 3 : 3 + dims] > shape - rows[:, 3 + dims :]).any():
            raise ValueError("a rectangle exceeds its tensor's shape")
        return rows

    @cached_property
    def stored(self) -> tuple[Stored, ...]:
        """The rectangles, without names.

        Raises:
            ValueError: as for :attr:`rows`.
        """
        dims, names = len(self.shape), self.files.names
        return tuple(
            Stored(
                names[file],
                Rectangle("", self.shape, tuple(places[:dims]), tuple(places[dims:])),
                begin,
                block,
            )
            for file, block, begin, *places in self.rows.tolist()
        )

    def gap(self) -> str | None:
        """Why the rectangles do not cover the tensor exactly once, or None if they do.

        Raises:
            ValueError: as for :attr:`rows`.
        """
        dims, rows = len(self.shape), self.rows
        offsets, sizes = rows[:, 3 : 3 + dims], rows[:, 3 + dims :]
        found, wanted = int(sizes.prod(1).sum()), math.prod(self.shape)
        if found != wanted:
            return f"found {found} values, expected {wanted}"
        if (offsets < 0).any() or (offsets + sizes > np.array(self.shape)).any():
            return "a rectangle exceeds its shape"
        # The right number of values, all inside: nothing is missing if no rectangles overlap.
        order = np.lexsort(offsets.T[::-1])
        boxes = list(zip(offsets[order].tolist(), (offsets + sizes)[order].tolist()))
        open_boxes: list[tuple[list[int], list[int]]] = []
        for low, high in boxes:
            open_boxes = [box for box in open_boxes if box[1][0] > low[0]]
            for other_low, other_high in open_boxes:
                if all(max(a, b) < min(c, d) for a, b, c, d in zip(low, other_low, high, other_high)):
                    return f"rectangles overlap from {low} on"
            open_boxes.append((low, high))
        return None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        progress: from :meth:`hexad.Engine.progress`, with ``step`` and ``samples``.
        config: resolved, as a tree.
        tensors: by global name.
        files: by name; all but the manifest itself.
        origin: where it comes from: ``world``, ``layout``, ``saved_at``, ``reason``, ``torch``.
    """

    progress: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, FileRecord]
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps made."""
        return int(self.progress["step"])

    @property
    def samples(self) -> int:
        """Sequences consumed."""
        return int(self.progress["samples"])

    @property
    def weights_only(self) -> bool:
        """Whether there is no optimizer state, as in an imported model."""
        return not any(name.startswith("optimizer.") for name in self.tensors)

    def check_coverage(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every expected tensor (name -> shape) is present, and every value once.

        Raises:
            ValueError: naming the first that is not.
        """
        for name, shape in expected.items():
            if name not in self.tensors or self.tensors[name].shape != shape:
                raise ValueError(f"tensor {name} of shape {shape} is not in the checkpoint")
        for name, tensor in self.tensors.items():
            gap = tensor.gap()
            if gap is not None:
                raise ValueError(f"tensor {name}: {gap}")

    def encode(self) -> bytes:
        """The content of ``manifest.json``: one JSON object, the checksum of its body first."""
        body = {
            "format": FORMATS[-1],
            "progress": self.progress,
            "origin": self.origin,
            "config": self.config,
            "files": {
                name: [record.sections, record.header, b64encode(record.blocks).decode()]
                for name, record in self.files.items()
            },
            "tensors": {
                name: [tensor.dtype, tensor.shape, tensor.packed] for name, tensor in self.tensors.items()
            },
        }
        return _guarded(json.dumps(body, separators=(",", ":")).encode())

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """The manifest of a file's content.

        Raises:
            ValueError: it was not written by :meth:`encode`.
            HexadError: it is of another version of Hexad.
        """
        text = content[_PREFIX : -len(_END)]
        if _guarded(text) != content:
            raise ValueError("its checksum does not match its content")
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError("it holds no object")
        if body.get("format") not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise HexadError(f"format {body.get('format')}, this version of Hexad reads formats {known}")
        try:
            return cls._of_body(body)
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"an entry is missing or of another kind ({error!r})") from None

    @classmethod
    def _of_body(cls, body: dict[str, Any]) -> Manifest:
        files = {_inside(name): _record(entry) for name, entry in body["files"].items()}
        table = FileTable.of(files)
        tensors = {name: _tensor(entry, table) for name, entry in body["tensors"].items()}
        config, origin = dict(body["config"]), dict(body["origin"])
        progress = dict(body["progress"])
        progress |= {name: int(progress[name]) for name in ("step", "samples")}
        return cls(progress, config, tensors, files, origin)


def _record(entry: Sequence[Any]) -> FileRecord:
    """A file's record as a manifest has it."""
    *sections, header, blocks = entry
    # Format 2: size and checksum of the whole file.
    parts = sections[0] if len(sections) == 1 else [sections]
    found = FileRecord(
        tuple((int(size), str(checksum)) for size, checksum in parts), int(header), b64decode(blocks)
    )
    if min(size for size, _ in found.sections) < 0 or not 0 <= found.header <= found.size:
        raise ValueError(f"found {found.header} bytes of header in a file of sections {found.sections}")
    return found


def _tensor(entry: Sequence[Any], files: FileTable) -> StoredTensor:
    """A tensor as a manifest has it."""
    dtype, shape, packed = entry
    sizes = tuple(map(int, shape))
    if not isinstance(dtype, str) or not isinstance(packed, str) or min(sizes, default=0) < 0:
        raise ValueError(f"found dtype {dtype!r}, shape {shape}, and rectangles of {type(packed).__name__}")
    return StoredTensor(dtype, sizes, packed, files)


def _inside(name: str) -> str:
    """A file's name, unless it leads out of the checkpoint's directory: the writer of a manifest does not
    choose which other files of a host are read.

    Raises:
        ValueError: it does.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        raise ValueError(f"found the file name {name!r}, expected one inside the checkpoint")
    return name


def _guarded(body: bytes) -> bytes:
    """``body`` as part of a JSON object that begins with its checksum; every byte is determined."""
    return b'{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'","manifest":' + body + _END


_END = b"}\n"
_PREFIX = len(_guarded(b"")) - len(_END)


def manifest_checksum(checkpoint: Path) -> bytes | None:
    """The checksum with which a checkpoint's manifest begins: which of several that had the same name it is.
    None if there is no manifest, or none that can be read."""
    try:
        with open(checkpoint / MANIFEST_FILE, "rb") as file:
            return file.read(_PREFIX)
    except OSError:
        return None


def read_manifest(checkpoint: Path) -> Manifest:
    """The verified manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: missing, damaged, or in the directory of another step.
        HexadError: of another format, or it cannot be read.
    """
    try:
        manifest = Manifest.decode((checkpoint / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise unreadable(checkpoint, MANIFEST_FILE, error) from None
    except ValueError as error:
        raise damaged(checkpoint, f"{MANIFEST_FILE}: {error}") from None
    except HexadError as error:
        raise HexadError(f"checkpoint {checkpoint}: {error}") from None
    named = STEP_NAME.fullmatch(checkpoint.name)
    if named and int(named[1]) != manifest.step:
        raise damaged(checkpoint, f"{MANIFEST_FILE} is that of step {manifest.step}")
    return manifest


def check_size(checkpoint: Path, name: str, record: FileRecord) -> None:
    """Check that a file exists and has its size.

    Raises:
        DamagedCheckpoint: it does not. HexadError: it cannot be read.
    """
    try:
        size = (checkpoint / name).stat().st_size
    except OSError as error:
        raise unreadable(checkpoint, name, error) from None
    if size != record.size:
        raise damaged(checkpoint, f"{name} has {size} bytes of {record.size}")


def check_file(checkpoint: Path, name: str, record: FileRecord) -> None:
    """Read a complete file and compare its checksum.

    Raises:
        DamagedCheckpoint: it is missing or differs from what was written. HexadError: it cannot be read.
    """
    check_size(checkpoint, name, record)
    try:
        found = checksums(checkpoint / name, [size for size, _ in record.sections])
    except OSError as error:
        raise unreadable(checkpoint, name, error) from None
    if found != [checksum for _, checksum in record.sections]:
        raise damaged(checkpoint, f"{name}: its checksum does not match its content")


def verify_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Read every file; returns the problems found."""
    problems = []
    for name, record in manifest.files.items():
        try:
            check_file(checkpoint, name, record)
        except HexadError as error:
            problems.append(str(error))
    return problems


def whole_file(path: Path) -> FileRecord:
    """The record of a file without tensors."""
    size = path.stat().st_size
    (checksum,) = checksums(path, [size])
    return FileRecord(((size, checksum),))


def checksums(path: Path, sizes: Iterable[int]) -> list[str]:
    """XXH3-128 of each section of a file, in hexadecimal; ``sizes``: of the sections, in bytes."""
    found, buffer = [], bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        for left in sizes:
            section = xxhash.xxh3_128()
            while left and (count := file.readinto(memoryview(buffer)[: min(left, len(buffer))])):
                section.update(memoryview(buffer)[:count])
                left -= count
            found.append(section.hexdigest())
    return found
