"""The places of values in a checkpoint's files, as arrays: what ranks merge on saving, a manifest stores, and
ranks select on loading.

A large run has millions of rectangles; as Python objects they would take minutes and tens of gigabytes on the
rank that writes the manifest. No torch.
"""

from __future__ import annotations

import math
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from hexad.parallel.rectangle import Rectangle

Rows = NDArray[np.int64]

_BITS = re.compile(r"\d+")
"""The number of bits in the name of a format, such as ``float8_e4m3fn``."""
_MOST_DIMS, _MOST_BYTES = 16, 1 << 60
"""Dims of a tensor at most: the check that rectangles cover it takes twice as long for each more."""
_PLACE = 4
"""Columns of a row before the rectangle: tensor, file, block, begin."""


@dataclass(frozen=True)
class FileRecord:
    """A checkpoint's manifest entry of a file.

    Attributes:
        sections: (bytes, XXH3-128 of them in hexadecimal, as ``xxhsum -H2`` prints it) of the parts of the
            file, each written by one rank, in the file's order.
        header: bytes before the values of a tensor file; 0 in other files.
        blocks: XXH3-64 of the header and of every block of values, 8 bytes each, in the file's order.
    """

    sections: tuple[tuple[int, str], ...]
    header: int = 0
    blocks: bytes = b""

    @classmethod
    def of(cls, content: bytes) -> FileRecord:
        """The record of a file without tensors."""
        return cls(((len(content), xxhash.xxh3_128_hexdigest(content)),))

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return sum(size for size, _ in self.sections)

    def followed_by(self, later: FileRecord) -> FileRecord:
        """The record of the file with the sections of a later record of it."""
        return replace(self, sections=self.sections + later.sections, blocks=self.blocks + later.blocks)


class GlobalTensor(NamedTuple):
    """The format of a global tensor, by torch's name (``float32``), and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Index:
    """Files and rectangles of a checkpoint, or of a part of it.

    Attributes:
        files: by name; rows refer to them by number.
        tensors: by name; likewise.
        rows: of int64, one for each rectangle: numbers of tensor, file and block, the byte of the file where
            its values begin in row-major order, offset, sizes. Dims that a tensor lacks have offset 0 and
            size 1.
    """

    files: dict[str, FileRecord]
    tensors: dict[str, GlobalTensor]
    rows: Rows

    @classmethod
    def empty(cls, files: dict[str, FileRecord]) -> Index:
        """An index of files without rectangles."""
        return cls(files, {}, np.empty((0, _PLACE), dtype=np.int64))

    @classmethod
    def of_file(
        cls, name: str, record: FileRecord, parts: Sequence[tuple[Rectangle, str, int, int]]
    ) -> Index:
        """The index of a file, or of a section of one, with parts (rectangle, dtype, block, begin)."""
        tensors = {part.name: GlobalTensor(dtype, part.shape) for part, dtype, _, _ in parts}
        numbers = _numbers((part.name for part, *_ in parts), tensors).tolist()
        dims = max((len(tensor.shape) for tensor in tensors.values()), default=0)
        rows = [
            (number, 0, block, begin, *_box(part.offset, part.sizes, dims))
            for number, (part, _, block, begin) in zip(numbers, parts)
        ]
        return cls({name: record}, tensors, np.array(rows, dtype=np.int64).reshape(-1, _PLACE + 2 * dims))

    @classmethod
    def unpack(cls, files: dict[str, FileRecord], entries: Mapping[str, Sequence[Any]]) -> Index:
        """The index of a manifest's files and of its tensors, as :meth:`pack` writes them.

        Raises:
            ValueError: an entry has another form, or names a file or block that does not exist.
        """
        blocks = np.array([len(record.blocks) // 8 for record in files.values()], dtype=np.int64)
        sizes = np.array([min(record.size, _MOST_BYTES) for record in files.values()], dtype=np.int64)
        tensors, unpacked = {}, []
        for name, (dtype, shape, packed) in entries.items():
            tensors[name] = tensor = GlobalTensor(dtype, tuple(map(int, shape)))
            if len(tensor.shape) > _MOST_DIMS:
                raise ValueError(f"tensor {name}: {len(tensor.shape)} dims, expected at most {_MOST_DIMS}")
            if not isinstance(dtype, str) or not isinstance(packed, str) or min(tensor.shape, default=0) < 0:
                raise ValueError(f"found {dtype!r}, shape {shape}, and rectangles of {type(packed).__name__}")
            try:
                unpacked.append(_unpacked(packed, tensor.shape, blocks))
                _check_places(tensor, unpacked[-1], sizes)
            except ValueError as error:
                raise ValueError(f"tensor {name}: {error}") from None
        dims = max((len(tensor.shape) for tensor in tensors.values()), default=0)
        rows = [
            _padded(np.insert(file_rows, 0, number, axis=1), dims)
            for number, file_rows in enumerate(unpacked)
        ]
        return cls(files, tensors, np.concatenate([np.empty((0, _PLACE + 2 * dims), dtype=np.int64), *rows]))

    def pack(self) -> dict[str, tuple[str, tuple[int, ...], str]]:
        """The tensors as a manifest has them: dtype, shape, and the rectangles compressed, in base64. As JSON
        numbers the rectangles of a large run would take minutes to decode."""
        return {
            name: (*tensor, b64encode(zlib.compress(self.rows_of(name).astype("<i8").tobytes(), 1)).decode())
            for name, tensor in self.tensors.items()
        }

    @property
    def dims(self) -> int:
        """Dims of the tensor that has the most."""
        return (self.rows.shape[1] - _PLACE) // 2

    def merge(self, other: Index) -> Index:
        """Merge two parts; the other's files follow this one's, and so do its sections of the same files."""
        dims = max(self.dims, other.dims)
        tensors, files = self.tensors | other.tensors, dict(self.files)
        for name, record in other.files.items():
            files[name] = files[name].followed_by(record) if name in files else record
        rows = _padded(other.rows, dims).copy()
        if len(rows):
            rows[:, 0] = _numbers(other.tensors, tensors)[rows[:, 0]]
            rows[:, 1] = _numbers(other.files, files)[rows[:, 1]]
        return Index(files, tensors, np.concatenate([_padded(self.rows, dims), rows]))

    @cached_property
    def _by_tensor(self) -> dict[str, Rows]:
        rows = self.rows[np.argsort(self.rows[:, 0], kind="stable")]
        ends = np.searchsorted(rows[:, 0], np.arange(1, len(self.tensors)))
        return dict(zip(self.tensors, np.split(rows, ends)))

    def rows_of(self, name: str) -> Rows:
        """The rectangles of a tensor, as rows of file, block, begin, offset and sizes."""
        first, dims = _PLACE + self.dims, len(self.tensors[name].shape)
        columns = [*range(1, _PLACE + dims), *range(first, first + dims)]
        return self._by_tensor[name][:, columns]

    def touching(self, rectangle: Rectangle) -> Rows:
        """The rows (:meth:`rows_of`) that have values in common with a rectangle of their tensor."""
        rows, dims = self.rows_of(rectangle.name), len(rectangle.shape)
        low, sizes = np.array((rectangle.offset, rectangle.sizes), dtype=np.int64)
        begins, ends = rows[:, 3 : 3 + dims], rows[:, 3 : 3 + dims] + rows[:, 3 + dims :]
        return rows[((begins < low + sizes) & (ends > low)).all(1)]

    def gap(self, name: str) -> str | None:
        """Why the rectangles do not cover a tensor exactly once, or None if they do."""
        shape = np.array(self.tensors[name].shape, dtype=np.int64)
        dims, rows = len(shape), self.rows_of(name)
        offsets, sizes = rows[:, 3 : 3 + dims], rows[:, 3 + dims :]
        count, expected = int(sizes.prod(1).sum()), math.prod(shape.tolist())
        if count != expected:
            return f"found {count} values, expected {expected}"
        if (offsets < 0).any() or (offsets + sizes > shape).any():
            return "a rectangle exceeds its shape"
        if not dims:
            return None
        # At every corner, signed by the number of dims in which it is the end, the rectangles add up to the
        # whole tensor exactly if they cover it once: the sums of all corners before a value count its cover.
        ends = list(product((0, 1), repeat=dims))
        boxes = [(offsets, sizes, 1.0), (np.zeros((1, dims), dtype=np.int64), shape[None], -1.0)]
        corners = np.concatenate([low + size * np.array(end) for low, size, _ in boxes for end in ends])
        weights = [np.full(len(low), sign * (-1) ** sum(end)) for low, _, sign in boxes for end in ends]
        keys, inverse = np.unique(np.ravel_multi_index(corners.T, shape + 1), return_inverse=True)
        excess = np.bincount(inverse, np.concatenate(weights))
        if not excess.any():
            return None
        first = int(np.flatnonzero(excess)[0])
        place = [int(number) for number in np.unravel_index(keys[first], shape + 1)]
        return f"rectangles overlap from {place} on" if excess[first] > 0 else f"no rectangle covers {place}"

    def select(self, need: Need) -> Index:
        """The rectangles of which a need has a part, and their files."""
        number = _numbers(need.names, self.tensors)
        boxes = need.boxes[number[need.boxes[:, 0]] >= 0] if len(need.boxes) else need.boxes
        rows = self.rows[_touched(self.rows, boxes, number)]
        names = set(need.names)
        tensors = {name: kind for name, kind in self.tensors.items() if name in names}
        if len(rows):
            rows[:, 0] = _numbers(self.tensors, tensors)[rows[:, 0]]
        used, rows[:, 1] = np.unique(rows[:, 1], return_inverse=True)
        files = list(self.files.items())
        return Index(dict(files[place] for place in used.tolist()), tensors, rows)


@dataclass(frozen=True, eq=False)
class Need:
    """The parts of tensors that ranks hold, as boxes: parts of tensors, possibly somewhat more than they
    hold.

    Attributes:
        names: of the tensors; boxes refer to them by number.
        boxes: rows of int64: number of the tensor, first index in every dim, index after the last in every
            dim; dims that a tensor lacks are 0 to 1.
    """

    names: tuple[str, ...]
    boxes: Rows

    @classmethod
    def of(cls, rectangles: Iterable[Rectangle]) -> Need:
        """The need of a rank: one box around what it holds of each tensor, mostly a run of its rows."""
        bounds: dict[str, tuple[list[int], list[int]]] = {}
        for part in rectangles:
            if part.numel:
                ends = [offset + size for offset, size in zip(part.offset, part.sizes)]
                low, high = bounds.get(part.name, (list(part.offset), ends))
                bounds[part.name] = list(map(min, low, part.offset)), list(map(max, high, ends))
        dims = max((len(low) for low, _ in bounds.values()), default=0)
        boxes = [(number, *_box(*both, dims)) for number, both in enumerate(bounds.values())]
        return cls(tuple(bounds), np.array(boxes, dtype=np.int64).reshape(-1, 1 + 2 * dims))

    @property
    def dims(self) -> int:
        """Dims of the tensor that has the most."""
        return (self.boxes.shape[1] - 1) // 2

    def merge(self, other: Need) -> Need:
        """Merge the needs of two groups of ranks; boxes that touch in dim 0 and agree else become one."""
        dims = max(self.dims, other.dims)
        names = dict.fromkeys(self.names) | dict.fromkeys(other.names)
        boxes = _padded(other.boxes, dims, 1).copy()
        if len(boxes):
            boxes[:, 0] = _numbers(other.names, names)[boxes[:, 0]]
        return Need(tuple(names), _joined(np.concatenate([_padded(self.boxes, dims, 1), boxes])))


def _numbers(names: Iterable[str], places: Iterable[str]) -> Rows:
    """The number of each name among the places; -1 for one that is not there."""
    number = {name: index for index, name in enumerate(places)}
    return np.array([number.get(name, -1) for name in names], dtype=np.int64)


def _box(low: Sequence[int], high: Sequence[int], dims: int) -> list[int]:
    """A rectangle in a row of this many dims: offset and sizes, or ends; dims that it lacks have 0 and 1."""
    missing = dims - len(low)
    return [*low, *[0] * missing, *high, *[1] * missing]


def _unpacked(packed: str, shape: tuple[int, ...], blocks: Rows) -> Rows:
    """The rectangles of a tensor, as :meth:`Index.rows_of` gives them; ``blocks``: how many each file has.

    Raises:
        ValueError: they are not of :meth:`Index.pack`'s form, or name a file or block that does not exist.
    """
    width, dims = 3 + 2 * len(shape), len(shape)
    # A rectangle has at least one block, whose checksum the manifest holds uncompressed. This bounds the
    # memory that a few compressed bytes can ask for.
    limit = 8 * width * int(blocks.sum())
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(b64decode(packed), limit + 1)
    except zlib.error as error:
        raise ValueError(f"rectangles cannot be decompressed ({error})") from None
    if len(raw) > limit or not unpacking.eof or len(raw) % (8 * width):
        raise ValueError(f"rectangles of more than {limit} bytes, or of other dims")
    rows = np.frombuffer(raw, dtype="<i8").astype(np.int64).reshape(-1, width)
    files, numbers, offsets, sizes = rows[:, 0], rows[:, 1], rows[:, 3 : 3 + dims], rows[:, 3 + dims :]
    if (rows < 0).any() or (files >= len(blocks)).any() or (numbers >= blocks[files]).any():
        raise ValueError("a rectangle is in no block of the files")
    if (sizes > np.array(shape)).any() or (offsets > np.array(shape) - sizes).any():
        raise ValueError("a rectangle exceeds its tensor's shape")
    return rows


def _check_places(tensor: GlobalTensor, rows: Rows, sizes: Rows) -> None:
    """Check that a tensor has as many values as its rectangles, and that these are inside their files of some
    ``sizes``: a shape is not believed before memory is allocated for it.

    Raises:
        ValueError: they are not.
    """
    bits, dims, count = _BITS.search(tensor.dtype), len(tensor.shape), math.prod(tensor.shape)
    item = max(1, int(bits[0]) // 8) if bits else 1
    if count * item > min(sum(sizes.tolist()), _MOST_BYTES):  # no product below overflows
        raise ValueError(f"shape {list(tensor.shape)} takes more bytes than all files have")
    counts = rows[:, 3 + dims :].prod(1)
    if (rows[:, 2] > sizes[rows[:, 0]] - counts * item).any():
        raise ValueError("a rectangle ends after its file")
    if (value_count := int(counts.sum())) != count:
        raise ValueError(f"found {value_count} values, expected {count}")


def _padded(rows: Rows, dims: int, first: int = _PLACE) -> Rows:
    """Pad rows to a number of dims; added dims have offset 0 and size 1."""
    have = (rows.shape[1] - first) // 2
    if have == dims:
        return rows
    result = np.zeros((len(rows), first + 2 * dims), dtype=np.int64)
    result[:, : first + have] = rows[:, : first + have]
    result[:, first + dims : first + dims + have] = rows[:, first + have :]
    result[:, first + dims + have :] = 1
    return result


def _joined(boxes: Rows) -> Rows:
    """Join boxes that touch in dim 0 and agree in all other dims."""
    if len(boxes) < 2:
        return boxes
    dims = (boxes.shape[1] - 1) // 2
    low, high = 1, 1 + dims
    keys = [0, *range(low + 1, low + dims), *range(high + 1, high + dims)]
    boxes = boxes[np.lexsort((boxes[:, low], *(boxes[:, key] for key in reversed(keys))))]
    other = np.ones(len(boxes), dtype=bool)
    other[1:] = (boxes[1:, keys] != boxes[:-1, keys]).any(1)
    # The largest end so far among boxes that agree: shifted, so that a maximum does not cross groups.
    shift = np.cumsum(other) * (int(boxes[:, high].max()) + 1)
    reached = np.maximum.accumulate(boxes[:, high] + shift) - shift
    begins = other
    begins[1:] |= boxes[1:, low] > reached[:-1]
    starts = np.flatnonzero(begins)
    result = boxes[starts]
    result[:, high] = reached[np.append(starts[1:], len(boxes)) - 1]
    return result


def _touched(rows: Rows, boxes: Rows, number: Rows) -> Rows:
    """Indices of the rows whose rectangles have a part in common with one of the boxes, in ascending order.

    ``number``: of the tensors of the boxes, among those of the rows.
    """
    if not len(rows) or not len(boxes):
        return np.empty(0, dtype=np.int64)
    dims, box_dims = (rows.shape[1] - _PLACE) // 2, (boxes.shape[1] - 1) // 2
    offset, size = _PLACE, _PLACE + dims
    low, high = 1, 1 + box_dims
    tensors = number[boxes[:, 0]]
    # Rows by tensor and first index; those before a box by less than the longest rectangle may reach into it.
    stride = max(int((rows[:, offset] + rows[:, size]).max()), int(boxes[:, high].max())) + 1
    keys = rows[:, 0] * stride + rows[:, offset]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    longest = np.zeros(int(max(rows[:, 0].max(), tensors.max())) + 1, dtype=np.int64)
    np.maximum.at(longest, rows[:, 0], rows[:, size])
    first = np.searchsorted(keys, tensors * stride + np.maximum(boxes[:, low] - longest[tensors] + 1, 0))
    counts = np.maximum(np.searchsorted(keys, tensors * stride + boxes[:, high]) - first, 0)
    box = np.repeat(np.arange(len(boxes)), counts)
    row = order[np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts) + first[box]]
    common = np.ones(len(box), dtype=bool)
    for dim in range(min(dims, box_dims)):
        begin = rows[row, offset + dim]
        common &= (begin < boxes[box, high + dim]) & (begin + rows[row, size + dim] > boxes[box, low + dim])
    return np.unique(row[common])
