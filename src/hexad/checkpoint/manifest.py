"""The manifest of a checkpoint: step, configuration, location of each tensor's values, checksums, and the
comparison of the files with it.

``manifest.json`` covers the complete directory, itself included: a checkpoint that was truncated, changed or
mixed with another is detected before a value of it is used. No torch.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hexad.config import HexadError

from .index import FileRecord, GlobalTensor, Index

FORMATS = (2, 3)
"""Formats that are read; the last is written. In format 2 a file was written by one rank."""
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
class Manifest:
    """The content of a checkpoint.

    Attributes:
        progress: from :meth:`hexad.Engine.progress`, with ``step`` and ``samples``.
        config: resolved, as a tree.
        index: the files, all but the manifest itself, and where the values of the tensors are in them.
        origin: where it comes from: ``world``, ``layout``, ``saved_at``, ``reason``, ``torch``.
    """

    progress: dict[str, Any]
    config: dict[str, Any]
    index: Index
    origin: dict[str, Any]

    @property
    def files(self) -> dict[str, FileRecord]:
        """The files by name."""
        return self.index.files

    @property
    def tensors(self) -> dict[str, GlobalTensor]:
        """The tensors by global name."""
        return self.index.tensors

    @property
    def step(self) -> int:
        """Optimizer steps made."""
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
        for name in self.tensors:
            if (gap := self.index.gap(name)) is not None:
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
            "tensors": self.index.pack(),
        }
        return _guarded(json.dumps(body, separators=(",", ":")).encode())

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """Decode the content of ``manifest.json``.

        Raises:
            ValueError: it was not written by :meth:`encode`.
            HexadError: it is of another version of Hexad.
        """
        text = content[_PREFIX : -len(_END)]
        if _guarded(text) != content:
            raise ValueError("its checksum does not match its content")
        try:
            body = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(body, dict):
            raise ValueError("it holds no object")
        if body.get("format") not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise HexadError(f"format {body.get('format')}, this version of Hexad reads formats {known}")
        try:
            files = {_inside(name): _record(entry) for name, entry in body["files"].items()}
            index = Index.unpack(files, body["tensors"])
            config, origin, progress = (dict(body[part]) for part in ("config", "origin", "progress"))
            progress |= {name: int(progress[name]) for name in ("step", "samples")}
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"an entry is missing or of another kind ({error!r})") from None
        return cls(progress, config, index, origin)


def _record(entry: Sequence[Any]) -> FileRecord:
    """Decode a file's record."""
    *sections, header, blocks = entry
    # Format 2: size and checksum of the whole file.
    parts = sections[0] if len(sections) == 1 else [sections]
    written = tuple((int(size), str(checksum)) for size, checksum in parts)
    record = FileRecord(written, int(header), b64decode(blocks))
    if min(size for size, _ in written) < 0 or not 0 <= record.header <= record.size:
        raise ValueError(f"found {record.header} bytes of header in a file of sections {written}")
    return record


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
        contents = checksums(checkpoint / name, [size for size, _ in record.sections])
    except OSError as error:
        raise unreadable(checkpoint, name, error) from None
    if contents != [checksum for _, checksum in record.sections]:
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


def checksums(path: Path, sizes: Iterable[int]) -> list[str]:
    """XXH3-128 of each section of a file, in hexadecimal; ``sizes``: of the sections, in bytes."""
    digests, buffer = [], bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        for left in sizes:
            section = xxhash.xxh3_128()
            while left and (count := file.readinto(memoryview(buffer)[: min(left, len(buffer))])):
                section.update(memoryview(buffer)[:count])
                left -= count
            digests.append(section.hexdigest())
    return digests
