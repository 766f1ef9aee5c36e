"""What a checkpoint says of itself: step, configuration, where each tensor's values stand, and checksums.

``manifest.json`` guards the whole directory, itself included: a checkpoint that was cut, changed or mixed
with another is told from a whole one before a value of it is used. No torch.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from hexad.config import HexadError

FORMAT = 2
MANIFEST_FILE = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
"""Names of complete checkpoints in a run; one that is being replaced counts until its successor is there."""


class DamagedCheckpoint(HexadError):
    """A checkpoint is not what was written. Raised on the rank that found it."""


def damaged(path: Path, problem: str) -> DamagedCheckpoint:
    """The error for a checkpoint in which ``problem`` was found."""
    return DamagedCheckpoint(
        f"checkpoint {path}: damaged: {problem}; move it away to go on from the one before, or set "
        "checkpoint.damaged=previous"
    )


@dataclass(frozen=True)
class FileRecord:
    """What a checkpoint's manifest says of a file.

    Attributes:
        size: in bytes.
        checksum: XXH3-128 of all of it, in hexadecimal (``xxhsum -H2`` gives the same).
        header: bytes before the values of a tensor file; 0 in other files.
        blocks: XXH3-64 of the header and of every block of values, 8 bytes each, in the file's order.
    """

    size: int
    checksum: str
    header: int = 0
    blocks: bytes = b""


@dataclass(frozen=True)
class Stored:
    """A rectangle of a global tensor in a file.

    Attributes:
        file: its name.
        offset, sizes: the rectangle; ``sizes`` are never zero.
        begin: where its values begin in the file, in bytes; they follow each other in row-major order.
        block: the number of its first block among the file's.
    """

    file: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    block: int


Entry = tuple[int, Sequence[int], Sequence[int], int, int]
"""A :class:`Stored` as JSON has it: the file by its number."""


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor.

    Attributes:
        dtype: in torch's word (``float32``).
        shape: global.
        entries: the rectangles that cover it exactly once, of which a large run has millions.
        names: of the files, in the manifest's order.
    """

    dtype: str
    shape: tuple[int, ...]
    entries: Sequence[Entry]
    names: Sequence[str]

    @cached_property
    def stored(self) -> tuple[Stored, ...]:
        """The rectangles, made when they are first asked for: a rank needs those of few tensors."""
        return tuple(
            Stored(self.names[file], tuple(offset), tuple(sizes), begin, block)
            for file, offset, sizes, begin, block in self.entries
        )


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        progress: what :meth:`hexad.Engine.progress` gave, ``step`` and ``samples`` among it.
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

    def check_coverage(self) -> None:
        """See that the rectangles are as many values as each tensor has.

        Raises:
            ValueError: they are not.
        """
        for name, tensor in self.tensors.items():
            found = sum(math.prod(sizes) for _, _, sizes, _, _ in tensor.entries)
            if found != math.prod(tensor.shape):
                raise ValueError(f"tensor {name}: {found} values of {math.prod(tensor.shape)}")

    def encode(self) -> bytes:
        """The content of ``manifest.json``: one JSON object, the checksum of its body first."""
        body = {
            "format": FORMAT,
            "progress": self.progress,
            "origin": self.origin,
            "config": self.config,
            "files": {
                name: [record.size, record.checksum, record.header, b64encode(record.blocks).decode()]
                for name, record in self.files.items()
            },
            "tensors": {
                name: [tensor.dtype, tensor.shape, tensor.entries] for name, tensor in self.tensors.items()
            },
        }
        return _guarded(json.dumps(body, separators=(",", ":")).encode())

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """The manifest of a file's content.

        Raises:
            ValueError: it is not what :meth:`encode` gave, or of another version of Hexad.
        """
        text = content[_PREFIX : -len(_END)]
        if _guarded(text) != content:
            raise ValueError("its checksum does not match its content")
        body = json.loads(text)
        if body.get("format") != FORMAT:
            raise ValueError(f"format {body.get('format')}, this version of Hexad reads {FORMAT}")
        files = {
            name: FileRecord(size, checksum, header, b64decode(blocks))
            for name, (size, checksum, header, blocks) in body["files"].items()
        }
        names = list(files)
        tensors = {
            name: StoredTensor(dtype, tuple(shape), entries, names)
            for name, (dtype, shape, entries) in body["tensors"].items()
        }
        return cls(body["progress"], body["config"], tensors, files, body["origin"])


def _guarded(body: bytes) -> bytes:
    """``body`` as part of a JSON object that begins with its checksum; every byte of it is determined."""
    return b'{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'","manifest":' + body + _END


_END = b"}\n"
_PREFIX = len(_guarded(b"")) - len(_END)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, whole and in its place.

    Raises:
        DamagedCheckpoint: missing, damaged, of another format, or in the directory of another step.
    """
    try:
        manifest = Manifest.decode((checkpoint / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        raise damaged(checkpoint, f"{MANIFEST_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, f"{MANIFEST_FILE}: {error}") from None
    named = STEP_NAME.fullmatch(checkpoint.name)
    if named and int(named[1]) != manifest.step:
        raise damaged(checkpoint, f"{MANIFEST_FILE} is that of step {manifest.step}")
    return manifest


def size_problem(checkpoint: Path, name: str, record: FileRecord) -> str | None:
    """What is wrong with a file as far as its size tells, or None."""
    try:
        size = (checkpoint / name).stat().st_size
    except OSError as error:
        return f"{name}: {error.strerror}"
    return None if size == record.size else f"{name} has {size} bytes of {record.size}"


def checksum_problem(checkpoint: Path, name: str, record: FileRecord) -> str | None:
    """What is wrong with a file as its content tells, or None."""
    try:
        if file_checksum(checkpoint / name) == record.checksum:
            return None
    except OSError as error:
        return f"{name}: {error.strerror}"
    return f"{name}: its checksum does not match its content"


def verify_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Read every file; returns what is wrong with them."""
    problems = (
        size_problem(checkpoint, name, record) or checksum_problem(checkpoint, name, record)
        for name, record in manifest.files.items()
    )
    return [problem for problem in problems if problem is not None]


def file_checksum(path: Path) -> str:
    """XXH3-128 of a file, in hexadecimal."""
    whole = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(2**20)
        while count := file.readinto(buffer):
            whole.update(memoryview(buffer)[:count])
    return whole.hexdigest()
