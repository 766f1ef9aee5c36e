"""Where values lie in a checkpoint's files, as arrays: what ranks merge on saving and select on loading.

A large run has millions of rectangles; as Python objects they would take minutes and tens of gigabytes on the
rank that writes the manifest. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexad.parallel.rectangle import Rectangle

from .manifest import FileRecord, FileTable, Manifest, StoredTensor

Rows = NDArray[np.int64]

_PLACE = 4
"""Columns of a row before the rectangle: tensor, file, block, begin."""


@dataclass(frozen=True, eq=False)
class Index:
    """Files and rectangles of a checkpoint, or of a part of it.

    Attributes:
        files: by name; rows refer to them by number.
        tensors: (dtype, global shape) by name; likewise.
        rows: of int64, one for each rectangle: numbers of tensor, file and block, where its values begin in
            the file, offset, sizes. Dims that a tensor lacks have offset 0 and size 1.
    """

    files: dict[str, FileRecord]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    rows: Rows

    @classmethod
    def empty(cls, files: dict[str, FileRecord]) -> Index:
        """Files without rectangles."""
        return cls(files, {}, np.empty((0, _PLACE), dtype=np.int64))

    @classmethod
    def of_file(
        cls, name: str, record: FileRecord, parts: Iterable[tuple[Rectangle, str, int, int]]
    ) -> Index:
        """A file, or a section of one, and its parts: (rectangle, dtype, its block, where it begins)."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        rows = []
        parts = list(parts)
        dims = max((len(rectangle.shape) for rectangle, *_ in parts), default=0)
        for rectangle, dtype, block, begin in parts:
            tensors[rectangle.name] = dtype, rectangle.shape
            missing = dims - len(rectangle.shape)
            offset, sizes = (*rectangle.offset, *[0] * missing), (*rectangle.sizes, *[1] * missing)
            rows.append((block, begin, *offset, *sizes))
        number = {tensor: index for index, tensor in enumerate(tensors)}
        numbers = [(number[rectangle.name], 0) for rectangle, *_ in parts]
        found = np.array([(*one, *other) for one, other in zip(numbers, rows)], dtype=np.int64)
        return cls({name: record}, tensors, found.reshape(-1, _PLACE + 2 * dims))

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Index:
        """All rectangles of a manifest.

        Raises:
            ValueError: they cannot be decoded.
        """
        tensors = manifest.tensors
        dims = max((len(tensor.shape) for tensor in tensors.values()), default=0)
        rows = [np.empty((0, _PLACE + 2 * dims), dtype=np.int64)]
        for number, tensor in enumerate(tensors.values()):
            own = tensor.rows
            rows.append(_padded(np.insert(own, 0, number, axis=1), dims))
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        return cls(manifest.files, kinds, np.concatenate(rows))

    @property
    def dims(self) -> int:
        """Of the tensor that has most."""
        return (self.rows.shape[1] - _PLACE) // 2

    def merge(self, other: Index) -> Index:
        """Both as one; the other's files follow this one's, and so do its sections of the same files."""
        dims = max(self.dims, other.dims)
        tensors, files = self.tensors | other.tensors, dict(self.files)
        for name, record in other.files.items():
            files[name] = files[name].followed_by(record) if name in files else record
        rows = _padded(other.rows, dims).copy()
        if len(rows):
            rows[:, 0] = _numbers(other.tensors, tensors)[rows[:, 0]]
            rows[:, 1] = _numbers(other.files, files)[rows[:, 1]]
        return Index(files, tensors, np.concatenate([_padded(self.rows, dims), rows]))

    def stored(self) -> dict[str, StoredTensor]:
        """The tensors as a manifest has them."""
        table, dims = FileTable.of(self.files), self.dims
        rows = self.rows[np.argsort(self.rows[:, 0], kind="stable")]
        ends = np.searchsorted(rows[:, 0], np.arange(len(self.tensors) + 1))
        found = {}
        for number, (name, (dtype, shape)) in enumerate(self.tensors.items()):
            own, middle = rows[ends[number] : ends[number + 1]], _PLACE + dims
            parts = own[:, 1 : _PLACE + len(shape)], own[:, middle : middle + len(shape)]
            found[name] = StoredTensor(dtype, shape, np.concatenate(parts, axis=1), table)
        return found

    def select(self, need: Need) -> Index:
        """The rectangles of which a need has a part, and their files."""
        number = _numbers(need.names, self.tensors)
        boxes = need.boxes[number[need.boxes[:, 0]] >= 0] if len(need.boxes) else need.boxes
        rows = self.rows[_touched(self.rows, boxes, number)]
        wanted = set(need.names)
        tensors = {name: kind for name, kind in self.tensors.items() if name in wanted}
        if len(rows):
            rows[:, 0] = _numbers(self.tensors, tensors)[rows[:, 0]]
        used, rows[:, 1] = np.unique(rows[:, 1], return_inverse=True)
        files = list(self.files.items())
        return Index(dict(files[place] for place in used.tolist()), tensors, rows)


@dataclass(frozen=True, eq=False)
class Need:
    """What ranks hold, as boxes: parts of tensors, possibly somewhat more than they hold.

    Attributes:
        names: of the tensors; boxes refer to them by number.
        boxes: rows of int64: number of the tensor, first index in every dim, index after the last in every
            dim; dims that a tensor lacks are 0 to 1.
    """

    names: tuple[str, ...]
    boxes: Rows

    @classmethod
    def of(cls, rectangles: Iterable[Rectangle]) -> Need:
        """One box around what is held of each tensor: ranks hold runs of its rows."""
        bounds: dict[str, tuple[list[int], list[int]]] = {}
        for each in rectangles:
            if each.numel:
                ends = [offset + size for offset, size in zip(each.offset, each.sizes)]
                low, high = bounds.get(each.name, (list(each.offset), ends))
                bounds[each.name] = list(map(min, low, each.offset)), list(map(max, high, ends))
        dims = max((len(low) for low, _ in bounds.values()), default=0)
        boxes = [
            (number, *low, *[0] * (dims - len(low)), *high, *[1] * (dims - len(low)))
            for number, (low, high) in enumerate(bounds.values())
        ]
        return cls(tuple(bounds), np.array(boxes, dtype=np.int64).reshape(-1, 1 + 2 * dims))

    @property
    def dims(self) -> int:
        """Of the tensor that has most."""
        return (self.boxes.shape[1] - 1) // 2

    def merge(self, other: Need) -> Need:
        """Both as one; boxes that touch in dim 0 and agree in all others become one."""
        dims = max(self.dims, other.dims)
        names = dict.fromkeys(self.names) | dict.fromkeys(other.names)
        boxes = _padded(other.boxes, dims, 1).copy()
        if len(boxes):
            boxes[:, 0] = _numbers(other.names, names)[boxes[:, 0]]
        return Need(tuple(names), _joined(np.concatenate([_padded(self.boxes, dims, 1), boxes])))


def _numbers(names: Iterable[str], places: Iterable[str]) -> Rows:
    """For each name its number among the places; -1 if it has none."""
    number = {name: index for index, name in enumerate(places)}
    return np.array([number.get(name, -1) for name in names], dtype=np.int64)


def _padded(rows: Rows, dims: int, first: int = _PLACE) -> Rows:
    """Rows with that many dims, the new ones from 0 and of size 1."""
    have = (rows.shape[1] - first) // 2
    if have == dims:
        return rows
    result = np.zeros((len(rows), first + 2 * dims), dtype=np.int64)
    result[:, : first + have] = rows[:, : first + have]
    result[:, first + dims : first + dims + have] = rows[:, first + have :]
    result[:, first + dims + have :] = 1
    return result


def _joined(boxes: Rows) -> Rows:
    """Boxes with those joined that touch in dim 0."""
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
