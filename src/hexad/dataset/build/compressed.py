"""Compressed input files: .gz, .bz2 and .xz through the standard library, .zst through ``zstandard``."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from hexad.config.errors import HexadError

ENDINGS = (".gz", ".bz2", ".xz", ".zst")
ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar")
"""Files that hold files."""
_WINDOW = 1 << 31  # the largest that zstd --long makes
_BLOCK = 1 << 17


def compression(path: Path) -> str | None:
    """The ending of a compressed file, None for others."""
    return path.suffix.lower() if path.suffix.lower() in ENDINGS else None


def inner_suffix(path: Path) -> str:
    """The ending of what a file holds: ``.jsonl`` of ``a.jsonl`` and of ``a.jsonl.gz``."""
    return (Path(path.stem) if compression(path) else path).suffix.lower()


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
            stream = _decompressing(raw, kind, path)
            with stream:
                yield cast(BinaryIO, stream), raw
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise _damaged(path, error) from None
        except OSError as error:
            if error.errno is None:  # bz2's
                raise _damaged(path, error) from None
            raise
        except Exception as error:
            if type(error).__name__ == "ZstdError":
                raise _damaged(path, error) from None
            raise


def _damaged(path: Path, error: Exception) -> HexadError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return HexadError(f"{path}: damaged or not a {path.suffix} file: {reason}; copy or compress it again")


def _decompressing(raw: BinaryIO, kind: str | None, path: Path) -> IO[bytes]:
    if kind == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if kind == ".bz2":
        return bz2.BZ2File(raw)
    if kind == ".xz":
        return lzma.LZMAFile(raw)
    if kind == ".zst":
        return _zstandard(raw, path)
    return raw


def _zstandard(raw: BinaryIO, path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise HexadError(f"{path}: reading .zst needs a package: pip install 'hexad[zstd]'") from None
    return io.BufferedReader(_Frames(raw, zstandard))


class _Frames(io.RawIOBase):
    """The content of Zstandard frames; to ``zstandard``'s own reader a truncated file is a shorter one."""

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw, self._package = raw, zstandard
        self._decompressor: Any = None  # of the frame that has begun
        self._compressed = self._content = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._raw.read(_BLOCK)
            if not self._compressed:
                if self._decompressor is not None:
                    raise EOFError("truncated: it ends inside a frame")
                return 0
            if self._decompressor is None:
                self._decompressor = self._package.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
            self._content = self._decompressor.decompress(self._compressed)
            self._compressed = b""
            if self._decompressor.eof:
                self._compressed, self._decompressor = self._decompressor.unused_data, None
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count
