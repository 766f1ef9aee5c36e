"""Raw text on disk, divided into pieces that any process can read independently."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hexad.config.errors import HexadError

_JSONL_PIECE = 4 << 20
"""Bytes of a .jsonl file that one process reads at a time."""

Kind = Literal["text", "jsonl", "parquet"]


@dataclass(frozen=True)
class Piece:
    """A part of an input: a whole text file, a byte range of a .jsonl, or a row group of a .parquet.

    Attributes:
        path: the file.
        kind: how it is read.
        start, stop: bytes (jsonl: lines that begin in the range) or row groups.
        size: bytes on disk, for progress.
    """

    path: Path
    kind: Kind
    start: int
    stop: int
    size: int


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files named by ``inputs``, directories recursed in sorted order; hidden files are skipped.

    Raises:
        HexadError: an input does not exist, or nothing is found.
    """
    files: list[Path] = []
    for given in map(Path, inputs):
        if given.is_dir():
            files += _walk(given)
        elif given.exists():
            files.append(given)
        else:
            raise HexadError(f"{given}: no such file or directory")
    if not files:
        raise HexadError(f"{', '.join(map(str, inputs))}: no files found; give text, .jsonl or .parquet")
    return files


def _walk(directory: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(d for d in directories if not d.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def cut(files: Iterable[Path]) -> list[Piece]:
    """The pieces of ``files``, in order.

    Raises:
        HexadError: a file cannot be read, or a .parquet needs pyarrow.
    """
    pieces: list[Piece] = []
    for path in files:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise HexadError(f"{path}: cannot be read: {error.strerror}") from None
        if path.suffix == ".jsonl":
            for start in range(0, size, _JSONL_PIECE):
                stop = min(start + _JSONL_PIECE, size)
                pieces.append(Piece(path, "jsonl", start, stop, stop - start))
        elif path.suffix == ".parquet":
            groups = _parquet(path).metadata.num_row_groups
            pieces += [Piece(path, "parquet", g, g + 1, size // groups) for g in range(groups)]
        else:
            pieces.append(Piece(path, "text", 0, size, size))
    return pieces


def read(piece: Piece, key: str) -> Iterator[str]:
    """The documents of a piece, in order.

    Args:
        piece: what to read.
        key: key (.jsonl) or column (.parquet) that holds the text.

    Raises:
        HexadError: the text is not UTF-8, a line is not a JSON object with ``key``; naming file and line.
    """
    try:
        if piece.kind == "jsonl":
            yield from _read_jsonl(piece, key)
        elif piece.kind == "parquet":
            yield from _read_parquet(piece, key)
        else:
            yield _decode(piece.path.read_bytes(), piece.path)
    except OSError as error:
        raise HexadError(f"{piece.path}: cannot be read: {error.strerror or error}") from None


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise HexadError(
            f"{path}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; convert the file or leave it out"
        ) from None


def _read_jsonl(piece: Piece, key: str) -> Iterator[str]:
    with piece.path.open("rb") as stream:
        if piece.start:
            # A line belongs to the piece it begins in.
            stream.seek(piece.start - 1)
            stream.readline()
        while (offset := stream.tell()) < piece.stop:
            line = stream.readline()
            if line.strip():
                yield _text_of(line, key, piece.path, offset)


def _text_of(line: bytes, key: str, path: Path, offset: int) -> str:
    """The text of one JSON line at ``offset`` of its file."""
    try:
        found = json.loads(line)
        problem = f"a JSON {type(found).__name__}, expected an object"
        if isinstance(found, dict):
            if isinstance(found.get(key), str):
                return str(found[key])
            keys = ", ".join(f"'{k}'" for k in list(found)[:8])
            problem = f"no text under '{key}'; keys here: {keys}; choose one with --json-key"
    except UnicodeDecodeError as error:
        problem = f"byte 0x{line[error.start]:02x} is not UTF-8 text"
    except ValueError as error:
        problem = f"not valid JSON: {error}"
    raise HexadError(f"{path}:{_line_number(path, offset)}: {problem}")


def _line_number(path: Path, offset: int) -> int:
    """Number of the line that begins at a byte offset; counted only for an error message."""
    lines = 1
    with path.open("rb") as stream:
        while offset > 0 and (block := stream.read(min(offset, 1 << 20))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise HexadError(f"{path}: reading .parquet needs a package: pip install 'hexad[parquet]'") from None
    try:
        return ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise HexadError(f"{path}: not a readable .parquet file: {' '.join(str(error).split())}") from None


def _read_parquet(piece: Piece, key: str) -> Iterator[str]:
    file = _parquet(piece.path)
    names = file.schema_arrow.names
    if key not in names:
        raise HexadError(
            f"{piece.path}: no column '{key}'; columns here: {', '.join(names)}; choose one with --json-key"
        )
    for batch in file.iter_batches(row_groups=list(range(piece.start, piece.stop)), columns=[key]):
        for value in batch.column(0).to_pylist():
            if value is not None and not isinstance(value, str):
                raise HexadError(f"{piece.path}: column '{key}' holds {type(value).__name__}, expected text")
            yield value or ""
