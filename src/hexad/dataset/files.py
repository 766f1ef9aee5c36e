"""Files that are written atomically, by one of many processes, and identified by a hash; errors of files."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, TypeVar
from uuid import uuid4

import xxhash

from hexad.config.errors import HexadError

T = TypeVar("T")

_BLOCK, _BLOCKS = 1 << 16, 16


def sampled_hash(*paths: Path) -> str:
    """A hash of the sizes and 16 evenly spaced 64-KiB blocks of each file; independent of names and times."""
    digest = blake2b(digest_size=16)
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as stream:
            for offset in sorted({i * max(size - _BLOCK, 0) // (_BLOCKS - 1) for i in range(_BLOCKS)}):
                stream.seek(offset)
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()


def checksum(path: Path) -> str:
    """XXH3-128 of a complete file, in hexadecimal."""
    digest, buffer = xxhash.xxh3_128(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


@contextmanager
def reporting(path: Path | str, action: str = "read") -> Iterator[None]:
    """Turn what the operating system reports into a user's error: the path cannot be read, or ``written``."""
    try:
        yield
    except OSError as error:
        raise HexadError(f"{path}: cannot be {action}: {error.strerror or error}") from None


def temporary_name(final: Path) -> Path:
    """A name beside ``final`` that no other process or host uses; hidden, so that no glob picks it up."""
    return final.with_name(f".{final.name}.{os.getpid()}-{uuid4().hex[:8]}.tmp")


def sync_directory(directory: Path) -> None:
    """Flush a directory's names to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_close(stream: BinaryIO) -> None:
    """Flush ``stream`` to the disk itself, then close it."""
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def write_durably(path: Path, content: str | bytes) -> None:
    """Write a file and flush it to disk."""
    with path.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        sync_and_close(stream)


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
            sync_and_close(stream)
        temporary.replace(final)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # not every file system can
        sync_directory(final.parent)


def acquire(file: IO[Any], seconds: float) -> bool | None:
    """Lock an open file for this process, until it is closed.

    Returns:
        Whether the lock was obtained within ``seconds``; None where the file system has no locks.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return None
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)


def lock(file: TextIO, seconds: float) -> bool | None:
    """Acquire (:func:`acquire`) a lock file, into which the holder writes its name."""
    locked = acquire(file, seconds)
    if locked:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return locked


@contextmanager
def exclusive(final: Path, name: str) -> Iterator[None]:
    """Let no other process write ``final``, a file, a directory or the prefix of several, during the block;
    messages call it ``name``. The system releases the lock of a process that dies. Without effect on file
    systems without locks.

    Raises:
        HexadError: another process writes it, or its directory cannot be written.
    """
    beside = final.with_name(f".{final.name}.lock")
    while True:
        with reporting(name, "written"):
            file = beside.open("a+", encoding="utf-8")
        with file:
            if lock(file, 0.0) is False:
                file.seek(0)
                holder = file.read() or "another process"
                raise HexadError(
                    f"{name}: {holder} is writing it; wait until that has ended, or give another name"
                )
            if not _is_open(beside, file):
                continue  # its holder has just removed it
            try:
                yield
            finally:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)
            return


def _is_open(path: Path, file: IO[Any]) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def written_once(path: Path, read: Callable[[], T | None], write: Callable[[], None], seconds: float) -> T:
    """Write a file in one process per file system while the others wait, and return what ``read`` returns.

    The system releases the lock of a process that dies, and the next one writes. On file systems without
    locks each process writes. ``read`` returns None while the file is missing or incomplete; ``write``
    creates it, complete, by a rename; another process is waited for so many ``seconds``.

    Raises:
        HexadError: another process has not completed it in time.
        OSError: it cannot be written.
    """
    if (content := read()) is not None:
        return content
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.lock")
    with beside.open("a+", encoding="utf-8") as file:
        if lock(file, seconds) is False:
            file.seek(0)
            raise HexadError(
                f"{path}: not complete after {seconds:.0f} s of waiting for {file.read()}; raise "
                "run.timeout, or end that process if it hangs"
            )
        os.listdir(path.parent)  # NFS: opening the directory drops a cached "no such file"
        if (content := read()) is None:
            try:
                write()
                content = read()
            finally:
                beside.unlink(missing_ok=True)
    if content is None:
        raise OSError(errno.EIO, "it was written but cannot be read back", str(path))
    return content
