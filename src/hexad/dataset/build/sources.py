"""Raw data on disk, compressed or not, divided into pieces that any process can read independently."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hexad.config.errors import HexadError, one_line

from ..files import reporting
from .compressed import bounded, compression, opened
from .inputs import InputFile

ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar")
"""Files that hold files."""
_JSONL_PIECE = 4 << 20
"""Bytes of a .jsonl file that one process reads at a time."""
_LINES = (".jsonl", ".ndjson")
"""Endings of files with a JSON object per line."""
_LONGEST_LINE = 1 << 30
"""Bytes of a line of a .jsonl file, which takes several times as much memory as an object."""
_BATCH, _BATCH_BYTES = 16, 2 << 30
"""Rows of a .parquet that are read at a time, fewer where a row may have more than these bytes by the sizes
of its columns: one value of a column's dictionary may be that of all rows."""
_LARGEST_ARRAY = 256 << 20
"""Bytes of a .json file, which is parsed at once and takes several times as much memory."""
_HEAD = 8192
"""Bytes in which a NUL makes a file binary, as in git."""

Kind = Literal["text", "jsonl", "json", "parquet"]
Skipped = Literal["empty", "binary", "not UTF-8"]


@dataclass(frozen=True)
class InputPart:
    """A part of an input: a whole text file or .json, lines of a .jsonl, or a row group of a .parquet.

    Attributes:
        path: the file.
        kind: how it is read.
        start, stop: bytes (jsonl: lines that begin in the range) or row groups.
        size: bytes on disk, for progress.
        named: as of :class:`.inputs.InputFile`.
        lines: of a compressed .jsonl, already decompressed; ``start`` is then the number of the first one.
    """

    path: Path
    kind: Kind
    start: int
    stop: int
    size: int
    named: bool = True
    lines: bytes | None = None


class Place(NamedTuple):
    """The place of a record in a file: the number of its line, table row or array element, or the byte offset
    of its line, which is counted only for a message."""

    path: Path
    kind: Literal["file", "line", "offset", "row", "record"] = "file"
    number: int = 0

    def __str__(self) -> str:
        if self.kind == "file":
            return str(self.path)
        if self.kind in ("row", "record"):
            return f"{self.path}: {self.kind} {self.number}"
        return f"{self.path}:{_line_number(*self[::2]) if self.kind == 'offset' else self.number}"


class Record(NamedTuple):
    """An entry of a file: the text of a text file, or an object of a .jsonl, .json or .parquet."""

    content: str | dict[str, Any]
    place: Place


class NotText(Exception):
    """A file of a directory that is left out, and why."""

    def __init__(self, kind: Skipped) -> None:
        super().__init__(kind)
        self.kind: Skipped = kind


def cut(files: Iterable[InputFile]) -> list[InputPart]:
    """Divide files into pieces, in order. A compressed .jsonl is one: :func:`streamed` divides it.

    Raises:
        HexadError: a file cannot be read, is an archive of files, or a .parquet needs pyarrow.
    """
    pieces: list[InputPart] = []
    for path, named in files:
        with reporting(path):
            size = path.stat().st_size
        compressed = compression(path) is not None
        suffix = Path(path.stem if compressed else path).suffix.lower()  # .jsonl of a.jsonl and of a.jsonl.gz
        if suffix in ARCHIVES and named:
            raise HexadError(f"{path}: an archive of files; extract it, and give the directory")
        if suffix in _LINES and not compressed:
            for start in range(0, size, _JSONL_PIECE):
                stop = min(start + _JSONL_PIECE, size)
                pieces.append(InputPart(path, "jsonl", start, stop, stop - start, named))
        elif suffix == ".parquet" and not compressed:
            groups = _parquet(path).metadata.num_row_groups
            pieces += [InputPart(path, "parquet", g, g + 1, size // groups, named) for g in range(groups)]
        else:
            # A .json of a directory is most often no data: it is text, as source code is.
            whole: Kind = "jsonl" if suffix in _LINES else "json" if suffix == ".json" and named else "text"
            pieces.append(InputPart(path, whole, 0, size, size, named))
    return pieces


def check_used(options: Mapping[str, str | None], pieces: Iterable[InputPart]) -> None:
    """Refuse arguments about records where no file has any.

    Raises:
        HexadError: naming the option.
    """
    if all(piece.kind == "text" for piece in pieces):
        for option, value in options.items():
            if value is not None:
                problem = "no input is .jsonl, .ndjson, .json or .parquet; leave it out"
                raise HexadError(f"``{option}``: found '{value}', but {problem}")


def streamed(pieces: Iterable[InputPart]) -> Iterator[InputPart]:
    """The pieces, with compressed .jsonl files divided: they can be read only from their beginning, so that
    one process decompresses what the others tokenize.

    Raises:
        HexadError: such a file is damaged or cannot be read.
    """
    for piece in pieces:
        if piece.kind != "jsonl" or not compression(piece.path):
            yield piece
            continue
        line = 1
        done = 0
        with reporting(piece.path), opened(piece.path) as (stream, raw):
            while block := stream.read(_JSONL_PIECE):
                block += bounded(piece.path, stream.readline)
                position = min(raw.tell(), piece.size)
                yield InputPart(piece.path, "jsonl", line, line, position - done, piece.named, block)
                line, done = line + block.count(b"\n"), position


def read(piece: InputPart, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """The records of a piece, in order. Of a .parquet these ``columns`` are read where it has them, beside
    ``tools`` and ``system``; None: all.

    Raises:
        HexadError: the text is not UTF-8, or a line is not a JSON object; naming file and line.
        NotText: so for a file of a directory.
    """
    with reporting(piece.path):
        if piece.kind == "jsonl":
            yield from _read_jsonl(piece)
        elif piece.kind == "json":
            yield from _read_array(piece)
        elif piece.kind == "parquet":
            yield from _read_parquet(piece, columns)
        else:
            yield Record(_read_text(piece), Place(piece.path))


def _read_text(piece: InputPart) -> str:
    with opened(piece.path) as (stream, _):
        raw = stream.read(_HEAD)
        if b"\0" in raw:
            if not piece.named:
                raise NotText("binary")
            raise HexadError(f"{piece.path}: binary, byte {raw.index(0)} is NUL; expected text")
        raw += bounded(piece.path, stream.read)
    if not piece.named and not raw:
        raise NotText("empty")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if not piece.named:
            raise NotText("not UTF-8") from None
        line = raw.count(b"\n", 0, error.start) + 1
        problem = f"byte 0x{raw[error.start]:02x} is not UTF-8"
    raise HexadError(f"{piece.path}:{line}: {problem}; convert the file or leave it out")


def _read_jsonl(piece: InputPart) -> Iterator[Record]:
    if piece.lines is not None:
        for number, line in enumerate(piece.lines.split(b"\n"), piece.start):
            if line.strip():
                place = Place(piece.path, "line", number)
                yield Record(_as_object(_json(line, place), place), place)
        return
    with piece.path.open("rb") as stream:
        if piece.start:
            # A line belongs to the piece it begins in.
            stream.seek(piece.start - 1)
            while (skipped := stream.readline(_JSONL_PIECE)) and not skipped.endswith(b"\n"):
                if stream.tell() >= piece.stop:  # no line begins in the piece
                    return
        while (offset := stream.tell()) < piece.stop:
            line = stream.readline(_LONGEST_LINE + 1)
            place = Place(piece.path, "offset", offset)
            if len(line) > _LONGEST_LINE:
                raise HexadError(
                    f"{place}: a line of more than {_LONGEST_LINE:,} bytes; write a record per line"
                )
            if line.strip():
                yield Record(_as_object(_json(line, place), place), place)


def _read_array(piece: InputPart) -> Iterator[Record]:
    """The objects of a .json file: an array of them."""
    with opened(piece.path) as (stream, _):
        most = _LARGEST_ARRAY + 1
        content = bounded(piece.path, lambda count: stream.read(most if count < 0 else min(count, most)))
    if len(content) > _LARGEST_ARRAY:
        raise HexadError(
            f"{piece.path}: larger than {_LARGEST_ARRAY >> 20} MiB, and a .json file is parsed at once; "
            f"write a record per line, as .jsonl{_as_lines(piece.path)}"
        )
    records = _json(content, Place(piece.path), "; if it has a record per line, name it .jsonl")
    if not isinstance(records, list):
        raise HexadError(
            f"{piece.path}: found {kind_of(records)}, expected an array of records; to read it as "
            "text, name it .txt or give its directory"
        )
    for number, record in enumerate(records, 1):
        place = Place(piece.path, "record", number)
        yield Record(_as_object(record, place), place)


def _as_lines(path: Path) -> str:
    """The command that writes a record per line; empty for a compressed file."""
    if compression(path):
        return ""
    return f": jq -c '.[]' {shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix('.jsonl')))}"


def _as_object(value: Any, place: Place) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise HexadError(f"{place}: found {kind_of(value)}, expected an object")


_KINDS = {
    type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text",
    list: "a list", dict: "an object",
}  # fmt: skip


def kind_of(value: Any) -> str:
    """The kind of a record's value, for messages."""
    shown = f" ({value!r})" if isinstance(value, int | float) and not isinstance(value, bool) else ""
    return _KINDS.get(type(value), type(value).__name__) + shown


def _json(content: bytes, place: Place, hint: str = "") -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        problem = f"byte 0x{content[error.start]:02x} is not UTF-8 text"
    except (ValueError, RecursionError) as error:
        problem = f"not valid JSON: {one_line(error)}{hint}"
    raise HexadError(f"{place}: {problem}")


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
        raise HexadError(f"{path}: not a readable .parquet file: {one_line(error)}") from None


def _read_parquet(piece: InputPart, columns: Sequence[str] | None) -> Iterator[Record]:
    file = _parquet(piece.path)
    names = file.schema_arrow.names
    chosen = names if columns is None else [name for name in columns if name in names]
    if not chosen:
        raise HexadError(
            f"{piece.path}: no column {' or '.join(map(repr, columns or []))}; columns found: "
            f"{', '.join(names)}; choose one with ``json_key``"
        )
    if columns is not None:
        chosen += [name for name in _BESIDE if name in names and name not in chosen]
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, piece.stop))
    size = max((file.metadata.row_group(group).total_byte_size for group in groups), default=0)
    rows = max(1, min(_BATCH, _BATCH_BYTES // max(size, 1)))
    for batch in file.iter_batches(rows, row_groups=groups, columns=chosen):
        present = _present((field.name, field.type) for field in batch.schema)
        for values in batch.to_pylist():
            row += 1
            yield Record(present(values), Place(piece.path, "row", row))


_BESIDE = ("tools", "system")
"""Columns that belong to a conversation in another one."""


def _present(fields: Iterable[tuple[str, Any]]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function that returns a row, or an object in one, without the keys that it has only because other
    rows have them: a table has one schema for all, and null where a record lacks a key. ``fields``: (name,
    Arrow's type)."""
    reads = [(name, _value(kind)) for name, kind in fields]
    return lambda values: {name: read(values[name]) for name, read in reads if values[name] is not None}


def _value(kind: Any) -> Callable[[Any], Any]:
    """A function that returns a value of an Arrow type as JSON has it."""
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        return _value(kind.storage_type)
    if types.is_struct(kind):
        return _present((field.name, field.type) for field in kind)
    if types.is_map(kind):  # lists its own keys, so that their nulls are values
        item = _optional(kind.item_type)
        return lambda pairs: {key: item(value) for key, value in pairs}
    lists = types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view
    if any(is_one(kind) for is_one in (*lists, types.is_large_list_view)):
        element = _optional(kind.value_type)
        return lambda values: [element(value) for value in values]
    return _value(kind.value_type) if types.is_dictionary(kind) else lambda value: value


def _optional(kind: Any) -> Callable[[Any], Any]:
    read = _value(kind)
    return lambda value: None if value is None else read(value)
