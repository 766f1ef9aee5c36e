"""Compressed files, read to their end."""

import bz2
import gzip
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from hexad.config.errors import HexadError, one_line

ENDINGS = (".gz", ".bz2", ".xz", ".zst")
_WINDOW_LOG = 31  # of the largest window that zstd --long makes
_DICTIONARY = 1 << 30
"""Bytes that a decoder of .xz may take; those of ``xz -9`` take 65 MB. A file may claim 4 GB."""
LARGEST_RECORD = 128 << 20
"""Bytes of a line, or a text, in a compressed file, unless the file is so large that :data:`LARGEST_RATIO` of
its bytes are more: a few kilobytes may decompress to gigabytes."""
LARGEST_RATIO = 100
"""Texts are seldom compressed to less than a twentieth."""


def compression(path: Path) -> str | None:
    """The ending of a compressed file, None for others."""
    return path.suffix.lower() if path.suffix.lower() in ENDINGS else None


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(stream of the decompressed content, the file itself, whose position tells how far it has been read).

    Raises:
        HexadError: inside the block too: the file is damaged or truncated, or a package is missing.
        OSError: it cannot be opened or read.
    """
    kind = compression(path)
    with path.open("rb") as raw:
        try:
            with _decompressing(raw, kind, path) as stream:
                yield stream, raw
        except Exception as error:
            damaged = isinstance(error, EOFError | zlib.error | lzma.LZMAError)
            damaged |= isinstance(error, OSError) and error.errno is None  # gzip's and bz2's
            if not damaged and type(error).__name__ != "ZstdError":
                raise
            if str(error).startswith("Memory usage limit"):
                raise HexadError(
                    f"{path}: its dictionary takes more than {_DICTIONARY:,} bytes; compress it with xz -9"
                ) from None
            raise HexadError(
                f"{path}: damaged or not a {path.suffix} file: {one_line(error)}; copy or compress it again"
            ) from None


def bounded(path: Path, read: Callable[[int], bytes]) -> bytes:
    """A line, or all that is left, of a stream of :func:`opened`.

    Args:
        path: of the file.
        read: such as the stream's ``readline``.

    Raises:
        HexadError: of a compressed file, it is too large for its size.
    """
    if compression(path) is None:
        return read(-1)
    most = max(LARGEST_RECORD, LARGEST_RATIO * path.stat().st_size)
    content = read(most + 1)
    if len(content) > most:
        size = path.stat().st_size
        raise HexadError(
            f"{path}: found a line or text of more than {most:,} bytes in a file of {size:,}; if "
            "these are data, decompress it"
        )
    return content


def _decompressing(raw: BinaryIO, kind: str | None, path: Path) -> BinaryIO:
    if kind is None:
        return raw
    if kind == ".gz":
        if not os.fstat(raw.fileno()).st_size:
            raise EOFError("it is empty")
        return cast(BinaryIO, gzip.open(raw))
    if kind == ".bz2":
        return cast(BinaryIO, io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor)))
    if kind == ".xz":
        return cast(
            BinaryIO,
            io.BufferedReader(_Streams(raw, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, _DICTIONARY), 4)),
        )
    try:
        zstd = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        raise HexadError(f"{path}: reading .zst needs a package: pip install 'hexad[zstd]'") from None
    return cast(BinaryIO, zstd.open(raw, options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}))


class _Streams(io.RawIOBase):
    """The content of a file of compressed streams, one after another. What follows a stream is another one,
    or padding, or damage: Python's own readers ignore it if it is not a stream.

    Args:
        raw: the file.
        new: makes a decompressor of one stream.
        padding: of which the number of zeros after a stream is a multiple; 0: there are none.
    """

    def __init__(self, raw: BinaryIO, new: Callable[[], Any], padding: int = 0) -> None:
        self._raw, self._new, self._padding = raw, new, padding
        self._stream, self._ahead = new(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = b""
        while not content and not (self._stream.eof and self._ended()):
            block = b""
            if self._stream.needs_input:
                block, self._ahead = self._ahead or self._raw.read(io.DEFAULT_BUFFER_SIZE), b""
                if not block:
                    raise EOFError("it ends inside a compressed stream")
            content = self._stream.decompress(block, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _ended(self) -> bool:
        """Whether no stream follows the one that has ended; else it begins."""
        rest, zeros = self._stream.unused_data, 0
        while block := rest or self._raw.read(io.DEFAULT_BUFFER_SIZE):
            rest = block.lstrip(b"\0") if self._padding else block
            zeros += len(block) - len(rest)
            if rest:
                break
        if self._padding and zeros % self._padding:
            raise EOFError(f"{zeros} zeros after a stream, expected a multiple of {self._padding}")
        if rest:
            self._stream, self._ahead = self._new(), rest
        return not rest
