"""Comparing a checkpoint's files with what its manifest says of them. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

from hexad.config import HexadError

from .manifest import FileRecord, Manifest, damaged, unreadable


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
