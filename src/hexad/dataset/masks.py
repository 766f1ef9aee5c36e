"""``PREFIX.mask``: which tokens of a dataset are trained, one bit each, beside Megatron's two files.

Little endian: ``b"HEXMASK\\0"``, uint64 version (always 1), uint64 tokens, uint64 trained tokens, 16 bytes
of :func:`~hexad.dataset.files.sampled_hash` over the index and the tokens it belongs to, then the bits, the
first token's in the lowest bit of the first byte. A dataset without the file is trained on all its tokens.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from .files import reporting, sampled_hash, sync_and_close, temporary_name

MAGIC = b"HEXMASK\x00"
VERSION = 1
HEADER = struct.Struct("<8sQQQ16s")
_CHUNK = 1 << 22
_AGAIN = "build the data again, or copy all files of the prefix"


def mask_path(prefix: str | Path) -> Path:
    """``PREFIX.mask``."""
    return Path(f"{prefix}.mask")


class TokenMask:
    """The mask of a dataset's trained tokens, and their number; memory mapped. The mask must belong to a
    dataset of so many ``tokens``, with these ``files``, index and tokens.

    Raises:
        HexadError: it cannot be read, is of another format, truncated, or of other data.
    """

    def __init__(self, path: Path, tokens: int, files: tuple[Path, Path]) -> None:
        self.path = path
        with reporting(path), path.open("rb") as stream:
            raw = stream.read(HEADER.size)
        if len(raw) < HEADER.size or raw[: len(MAGIC)] != MAGIC:
            raise HexadError(f"{path}: not a loss mask: expected {MAGIC!r} and a header; {_AGAIN}")
        _, version, count, self.trained, owner = HEADER.unpack(raw)
        if version != VERSION:
            raise HexadError(f"{path}: format version {version}, expected {VERSION}; {_AGAIN}")
        size, expected = path.stat().st_size, HEADER.size + -(-count // 8)
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise HexadError(
                f"{path}: {state}: {size} bytes, expected {expected} for {count} tokens; {_AGAIN}"
            )
        if count != tokens or owner.hex() != sampled_hash(*files):
            raise HexadError(
                f"{path}: the loss mask of other data than {files[1].name}; {_AGAIN} (or remove the mask to "
                "train on every token)"
            )
        self._bits = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))[HEADER.size :]
        self._first = 0

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the tokens at some positions of the dataset are trained."""
        positions = positions + self._first
        shifts = (positions & 7).astype(np.uint8)
        return ((self._bits[positions >> 3] >> shifts) & 1).astype(np.bool_)

    def any(self, tokens: int) -> bool:
        """Whether any of the first ``tokens`` tokens is trained; reads up to the first one that is."""
        starts = range(0, tokens, _CHUNK)
        return any(self.at(np.arange(start, min(start + _CHUNK, tokens))).any() for start in starts)

    def after(self, position: int) -> TokenMask:
        """This mask from a position on; the tokens there are counted from 0."""
        mask = copy(self)
        mask._first += position
        return mask

    def verify(self) -> None:
        """Compare the number of bits with the header's: reads the whole file.

        Raises:
            HexadError: they differ.
        """
        parts = (self._bits[start : start + _CHUNK] for start in range(0, len(self._bits), _CHUNK))
        marked = sum(int(np.unpackbits(part).sum()) for part in parts)
        if marked != self.trained:
            raise HexadError(
                f"{self.path}: damaged: {marked} tokens are marked, its header states {self.trained}; "
                f"{_AGAIN}"
            )


class MaskWriter:
    """Writes ``PREFIX.mask`` beside a dataset that is being written; no file where every token is trained.

    Attributes:
        trained: tokens marked so far.
        used: whether any token is not trained.
        temporary: where the file is written, if there will be one.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.path = mask_path(prefix)
        self.temporary = temporary_name(self.path)
        self._stream: BinaryIO | None = None
        self._rest = np.empty(0, dtype=np.bool_)  # of the last byte
        self.tokens = self.trained = 0

    @property
    def used(self) -> bool:
        """Whether there will be a file."""
        return self.trained < self.tokens

    def add(self, count: int, trained: NDArray[np.bool_] | None) -> None:
        """Mark the next ``count`` tokens; None: all are trained.

        Raises:
            OSError: the file cannot be written.
        """
        marked = count if trained is None else int(trained.sum())
        before, self.tokens, self.trained = self.tokens, self.tokens + count, self.trained + marked
        if self._stream is None:
            if marked == count:
                return
            self._begin(before)
        self._write(np.ones(count, dtype=np.bool_) if trained is None else trained)

    def _begin(self, before: int) -> None:
        """Open the file; the first ``before`` tokens are trained."""
        self._stream = self.temporary.open("wb")
        self._stream.write(bytes(HEADER.size))
        for start in range(0, before, _CHUNK):
            self._write(np.ones(min(_CHUNK, before - start), dtype=np.bool_))

    def _write(self, trained: NDArray[np.bool_]) -> None:
        assert self._stream is not None
        bits = np.concatenate([self._rest, trained])
        whole = len(bits) // 8 * 8
        self._stream.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._rest = bits[whole:]

    def complete(self, index: Path, tokens: Path) -> None:
        """Write the rest and the header of the mask, if there is one, under its temporary name; the dataset's
        files are complete.

        Raises:
            OSError: it cannot be written.
        """
        if self._stream is None:
            return
        self._stream.write(np.packbits(self._rest, bitorder="little").tobytes())
        self._stream.seek(0)
        owner = bytes.fromhex(sampled_hash(index, tokens))
        self._stream.write(HEADER.pack(MAGIC, VERSION, self.tokens, self.trained, owner))
        sync_and_close(self._stream)

    def publish(self) -> None:
        """Rename the file to its final name, or remove that of an earlier dataset."""
        if self._stream is None:
            self.path.unlink(missing_ok=True)
        else:
            self.temporary.replace(self.path)

    def discard(self) -> None:
        """Remove what was written."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            with suppress(OSError):
                self.temporary.unlink(missing_ok=True)
