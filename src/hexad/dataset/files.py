"""Files that are written atomically."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


def temporary_name(final: Path) -> Path:
    """A name beside ``final`` that no other process or host uses; hidden, so that no glob picks it up."""
    return final.with_name(f".{final.name}.{os.getpid()}-{uuid4().hex[:8]}.tmp")


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` survive a loss of power, if the file system can."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_and_close(stream: BinaryIO) -> None:
    """Flush ``stream`` to the disk itself, then close it."""
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


@contextmanager
def appearing_whole(final: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes ``final`` by one rename, after it is on disk.

    Any number of processes may write the same file concurrently; the last rename wins. When the block raises,
    nothing is left behind.

    Raises:
        OSError: the directory cannot be written, or the disk is full.
    """
    temporary = temporary_name(final)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(final)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(final.parent)


def write_whole(final: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Call ``fill`` on a stream that becomes ``final`` by one rename."""
    with appearing_whole(final) as stream:
        fill(stream)
