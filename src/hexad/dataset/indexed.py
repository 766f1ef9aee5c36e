"""Megatron's ``.bin/.idx`` token files: a memory-mapped reader and a streaming, atomic writer.

``PREFIX.bin`` contains token ids only, one sequence after another. ``PREFIX.idx`` is (little endian)::

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version, always 1
    uint8     code of the token dtype (see DTYPES)
    uint64    S, number of sequences
    uint64    D, number of document boundaries = documents + 1
    int32[S]  tokens in each sequence
    int64[S]  byte offset of each sequence in the .bin
    int64[D]  first sequence of each document, ending with S

The format is that of ``megatron.core.datasets.indexed_dataset`` (megatron-core 0.16.1), read and written byte
for byte. Its multimodal variant, one more int8 per sequence, is refused.
"""

from __future__ import annotations

import os
import struct
from array import array
from contextlib import ExitStack, suppress
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from hexad.config.errors import HexadError

from .files import (
    checksum,
    exclusive,
    reporting,
    sampled_hash,
    sync_and_close,
    sync_directory,
    temporary_name,
)
from .masks import MaskWriter, TokenMask, mask_path
from .sidecar import Sidecar, bin_path, idx_path, sidecar_path, write_sidecar

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_FLOATS = {6: "float64", 7: "float32"}
_CHUNK = 1 << 22
"""Elements handled at once where an index is too large to be copied."""
SMALL = 1 << 20
"""Sequences and documents up to which every process that opens a dataset reads its index completely."""


def dtype_for(vocab: int) -> np.dtype[Any]:
    """The token dtype for ids below ``vocab``: uint16 below 65500 ids, else int32 (Megatron's rule)."""
    return DTYPES[8] if vocab < 65500 else DTYPES[4]


class IndexedDataset:
    """The token file at a prefix, memory mapped: opening never reads the tokens.

    An index of up to :data:`SMALL` sequences and documents is checked completely at once. Of a larger one
    only sizes, beginning and end are: thousands of processes may open it, and the one that reads all of it
    anyway (:mod:`.load.samples`) calls :meth:`verify`.

    Args:
        prefix: path without ``.bin`` / ``.idx``.

    Attributes:
        tokens: ``[tokens]`` in the file's dtype, all documents one after another; read-only, on disk.
        lengths: int32 ``[sequences]``, tokens in each sequence; read-only, on disk.
        boundaries: int64 ``[documents + 1]``, first sequence of each document; read-only, on disk.
        mask: which tokens are trained; None: all.

    Raises:
        HexadError: a file is missing, of another format or version, truncated or longer than its index
            states, the mask is of other data, or the dataset has no tokens. Empty documents are allowed: they
            contribute nothing.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    boundaries: NDArray[np.int64]

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        for path in (self._idx, self._bin):
            if not os.path.isfile(path):  # False for a name that is too long, too
                raise HexadError(_missing(self.prefix, path))
        self.dtype, sequences, boundaries = self._header()
        self._map_index(sequences, boundaries)
        self._check_ends()
        self._first, self._documents, self._origin = 0, boundaries - 1, 0
        self._is_whole = True
        self._verified = self._one_sequence_each = False
        if max(sequences, boundaries) <= SMALL:
            self.verify()
        self._map_tokens()
        mask, files = mask_path(prefix), (self._idx, self._bin)
        self.mask = TokenMask(mask, len(self.tokens), files) if os.path.exists(mask) else None

    def _header(self) -> tuple[np.dtype[Any], int, int]:
        with self._idx.open("rb") as stream:
            raw = stream.read(HEADER.size)
        if raw[: len(MAGIC)] != MAGIC:
            raise HexadError(
                f"{self._idx}: starts with {raw[:9]!r}, expected {MAGIC!r}; this is not a Megatron index: "
                "build the data with 'hexad data build'"
            )
        if len(raw) < HEADER.size:
            raise HexadError(f"{self._idx}: {len(raw)} bytes, truncated inside the header; {_AGAIN}")
        _, version, code, sequences, boundaries = HEADER.unpack(raw)
        if version != VERSION:
            raise HexadError(f"{self._idx}: format version {version}, expected {VERSION}; {_AGAIN}")
        if code not in DTYPES:
            kind = f"dtype code {code} ({_FLOATS[code]})" if code in _FLOATS else f"unknown dtype code {code}"
            known = ", ".join(f"{c} ({d.name})" for c, d in DTYPES.items())
            raise HexadError(f"{self._idx}: {kind}, expected one of {known}; {_AGAIN}")
        return DTYPES[code], sequences, boundaries

    def _map_index(self, sequences: int, boundaries: int) -> None:
        size, expected = self._idx.stat().st_size, HEADER.size + 12 * sequences + 8 * boundaries
        if sequences and size == expected + sequences:
            raise HexadError(
                f"{self._idx}: a multimodal index (one mode per sequence), which is not supported; "
                "build it again without multimodal=True"
            )
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise HexadError(
                f"{self._idx}: {state}: {size} bytes, expected {expected} for {sequences} sequences and "
                f"{boundaries} document boundaries; {_AGAIN}"
            )
        if not sequences or boundaries < 2:
            raise HexadError(f"{self._idx}: the dataset holds no tokens; give 'hexad data build' text")
        # A plain ndarray over the map: indexing a memmap object itself costs microseconds more per call.
        raw = np.asarray(np.memmap(self._idx, mode="r", dtype=np.uint8))
        offset = HEADER.size
        self.lengths = raw[offset : offset + 4 * sequences].view("<i4")
        offset += 4 * sequences
        self._pointers: NDArray[np.int64] = raw[offset : offset + 8 * sequences].view("<i8")
        self.boundaries = raw[offset + 8 * sequences :].view("<i8")

    def _check_ends(self) -> None:
        """The first and the last entry of each table must fit."""
        last = len(self.lengths) - 1
        end = int(self._pointers[last]) + int(self.lengths[last]) * self.dtype.itemsize
        if self._pointers[0] != 0 or self.lengths[0] < 0:
            raise self._not_contiguous(0)
        if self.lengths[last] < 0 or end % self.dtype.itemsize:
            raise self._not_contiguous(last)
        if self.boundaries[0] != 0 or self.boundaries[-1] != len(self.lengths):
            raise self._wrong_boundaries()
        self._total = end // self.dtype.itemsize

    def verify(self) -> None:
        """Check the whole index: sequences must be contiguous, and documents must cover them in order.

        Raises:
            HexadError: they do not.
        """
        if self._verified:
            return
        total = 0
        for start in range(0, len(self.lengths), _CHUNK):
            lengths = self.lengths[start : start + _CHUNK].astype(np.int64)
            ends = total + np.cumsum(lengths)
            expected = (ends - lengths) * self.dtype.itemsize
            wrong = np.flatnonzero((lengths < 0) | (expected != self._pointers[start : start + _CHUNK]))
            if wrong.size:
                raise self._not_contiguous(start + int(wrong[0]))
            total = int(ends[-1])
        single = len(self.lengths) == len(self.boundaries) - 1
        for start in range(0, len(self.boundaries), _CHUNK):
            counts = np.diff(self.boundaries[start : start + _CHUNK + 1])
            if (counts < 0).any():
                raise self._wrong_boundaries()
            single = single and bool((counts == 1).all())
        self._verified, self._one_sequence_each = True, single

    def _not_contiguous(self, sequence: int) -> HexadError:
        return HexadError(
            f"{self._idx}: damaged: sequence {sequence} does not start where the previous one ends; {_AGAIN}"
        )

    def _wrong_boundaries(self) -> HexadError:
        return HexadError(
            f"{self._idx}: damaged: document boundaries run from {self.boundaries[0]} to "
            f"{self.boundaries[-1]}, expected 0 to {len(self.lengths)} in ascending order; {_AGAIN}"
        )

    def _map_tokens(self) -> None:
        size, expected = self._bin.stat().st_size, self._total * self.dtype.itemsize
        if size != expected:
            state = "truncated" if size < expected else "longer than its index"
            raise HexadError(
                f"{self._bin}: {state}: {size} bytes, expected {expected} ({self._total} {self.dtype.name} "
                f"tokens by {self._idx.name}); {_AGAIN}"
            )
        if not size:
            raise HexadError(f"{self._bin}: the dataset holds no tokens; give 'hexad data build' text")
        self.tokens = np.asarray(np.memmap(self._bin, mode="r", dtype=self.dtype))

    @property
    def documents(self) -> int:
        """Number of documents, empty ones included."""
        return self._documents

    def __len__(self) -> int:
        return self.documents

    def part(self, begin: float, end: float) -> IndexedDataset:
        """The documents between two fractions of this dataset, rounded to complete documents as in
        Megatron-LM. Nothing is copied.

        Raises:
            HexadError: there is no document, or no token, between them.
        """
        first, last = (round(fraction * self.documents) for fraction in (begin, end))
        origin, stop = self.starts(np.array([first, last])).tolist()
        if stop <= origin:
            raise HexadError(
                f"{self.prefix}: data.split takes {last - first} of its {self.documents} documents, which "
                f"have {stop - origin} tokens; give more data or another data.split"
            )
        part = copy(self)
        part._is_whole = False
        part._first, part._documents, part._origin = first, last - first, origin
        part.tokens = self.tokens[origin:stop]
        part.mask = None if self.mask is None else self.mask.after(origin)
        return part

    def identity(self) -> tuple[object, ...]:
        """Size, time of the last change, and a hash of parts of the index: what identifies it without
        reading all of it; of a part also which."""
        status = self._idx.stat()
        part = () if self._is_whole else (self._first, self._documents)
        return status.st_size, status.st_mtime_ns, sampled_hash(self._idx), *part

    def starts(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Position in :attr:`tokens` at which each document begins (and the one before it ends), int64
        ``[n]``; the number of documents gives the total."""
        first = self.boundaries[documents + self._first]
        inside = self._pointers[np.minimum(first, len(self._pointers) - 1)] // self.dtype.itemsize
        return np.where(first < len(self._pointers), inside, self._total) - self._origin

    def tokens_in(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of tokens of each document, int64 ``[n]``."""
        if self._one_sequence_each:  # a third of the random reads
            return self.lengths[documents + self._first].astype(np.int64)
        return self.starts(documents + 1) - self.starts(documents)

    def __getitem__(self, document: int) -> NDArray[Any]:
        """The tokens of one document, ``[length]`` in the file's dtype, a view on the map."""
        if not -self.documents <= document < self.documents:
            raise IndexError(f"document {document} of {self.documents}")
        document %= self.documents
        start, stop = self.starts(np.array([document, document + 1]))
        return self.tokens[start:stop]


_AGAIN = "build or copy it again"


def _missing(prefix: str, path: Path) -> str:
    for ending in (".bin", ".idx"):
        if prefix.endswith(ending) and os.path.isfile(prefix):
            return f"{prefix}: expected a prefix; leave out the '{ending}': {prefix.removesuffix(ending)}"
    message = f"{path}: no such file; expected both {prefix}.bin and {prefix}.idx"
    parent = Path(prefix).parent
    if not os.path.isdir(parent):
        return f"{message}; the directory {parent} does not exist"
    known = sorted(p.name.removesuffix(".idx") for p in parent.glob("*.idx"))
    if known:
        return f"{message}; datasets in {parent}: {', '.join(known[:8])}"
    return f"{message}; make them with 'hexad data build --input ... --output {prefix}'"


class IndexedWriter:
    """Writes a dataset, one document after another; its files get their names when it is complete.

    Use as a context manager: a normal exit completes the dataset, an exception removes what was written. A
    killed process leaves only hidden ``.tmp`` files. Meanwhile no other process can write the same dataset.

    Args:
        prefix: path without ``.bin`` / ``.idx``; its directory is made if missing. A dataset of that name is
            replaced.
        dtype: one of :data:`DTYPES`; see :func:`dtype_for`.

    Attributes:
        tokens, documents: what was written so far.
        mask: which of the tokens are trained.
        max_token: largest id written so far, -1 before the first.
        facts: what else the dataset's :class:`~.sidecar.Sidecar` records, such as the tokenizer.

    Raises:
        HexadError: another dtype, the files cannot be written, or another process writes them.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type[np.integer[Any]]) -> None:
        self.dtype, self._code = _stored(dtype)
        self._prefix, self._bin, self._idx = prefix, bin_path(prefix), idx_path(prefix)
        self._temporary = (temporary_name(self._bin), temporary_name(self._idx))
        self.mask = MaskWriter(prefix)
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self.tokens = 0
        self.max_token = -1
        self.facts: dict[str, Any] = {}
        self._checksum = xxhash.xxh3_128()  # of the tokens
        self._lock = ExitStack()
        with reporting(self._bin, "written"):
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(exclusive(Path(prefix), str(self._bin)))
            self._stream: BinaryIO = self._temporary[0].open("wb")

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._boundaries) - 1

    def add_document(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, trained: ArrayLike | None = None
    ) -> None:
        """Append one document.

        Args:
            tokens: integer ids ``[length]``; may be empty.
            lengths: tokens of each of its sequences, summing to ``length``; None: it is one sequence.
            trained: bool ``[length]``, which of the tokens have a loss as targets; None: all.

        Raises:
            HexadError: an argument of another kind or shape, an id that does not fit the dtype, the writer is
                closed, or the file cannot be written.
        """
        count = self._append(tokens, lengths, trained)
        self._boundaries.append(self._boundaries[-1] + count)

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike, trained: ArrayLike | None = None) -> None:
        """Append many documents of one sequence each.

        Args:
            tokens: integer ids ``[sum(lengths)]``, the documents one after another.
            lengths: tokens of each document.
            trained: as for :meth:`add_document`.

        Raises:
            HexadError: as for :meth:`add_document`.
        """
        if lengths is None:
            raise HexadError("lengths: found None, expected the number of tokens of each document")
        count = self._append(tokens, lengths, trained)
        first = self._boundaries[-1] + 1
        self._boundaries.extend(range(first, first + count))

    def _append(self, tokens: ArrayLike, lengths: ArrayLike | None, trained: ArrayLike | None) -> int:
        self._check_open()
        ids = _checked("tokens", tokens, "integer ids", "iu")
        limits = np.iinfo(self.dtype)
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (limits.max, -1)
        if low < limits.min or high > limits.max:
            raise HexadError(
                f"tokens: found ids from {low} to {high}, expected {limits.min} to {limits.max} of dtype "
                f"{self.dtype.name}; give IndexedWriter a wider dtype"
            )
        sizes = np.array([len(ids)]) if lengths is None else _checked("lengths", lengths, "integers", "iu")
        if (sizes < 0).any() or (sizes > np.iinfo(np.int32).max).any() or sizes.sum() != len(ids):
            raise HexadError(
                f"lengths: found {int(sizes.sum())} tokens in {len(sizes)} sequences, expected lengths from "
                f"0 whose sum is the number of tokens, {len(ids)}"
            )
        marks = None if trained is None else _checked("trained", trained, "true or false", "b")
        if marks is not None and marks.shape != ids.shape:
            raise HexadError(
                f"trained: found {len(marks)} values for {len(ids)} tokens, expected one for each"
            )
        stored = ids.astype(self.dtype, copy=False).tobytes()
        with reporting(self._bin, "written"):
            self._stream.write(stored)
        with reporting(self.mask.path, "written"):
            self.mask.add(len(ids), marks)
        self._checksum.update(stored)
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self.max_token = max(self.max_token, high)
        self.tokens += len(ids)
        return len(sizes)

    def finish(self) -> None:
        """Complete the files on disk, then rename them.

        The index is renamed last and an old one removed first: an index always has its tokens, and a process
        killed between these renames leaves none.

        Raises:
            HexadError: the disk is full, the files cannot be written, or the writer is closed.
        """
        self._check_open()
        try:
            with reporting(self._bin, "written"):
                sync_and_close(self._stream)
            with reporting(self._idx, "written"), self._temporary[1].open("wb") as stream:
                self._write_index(stream)
                sync_and_close(stream)
            with reporting(self.mask.path, "written"):
                self.mask.complete(self._temporary[1], self._temporary[0])
            with reporting(self._idx, "written"):
                sidecar = self._sidecar()
                self._idx.unlink(missing_ok=True)
                sidecar_path(self._prefix).unlink(missing_ok=True)
                self.mask.publish()
                self._temporary[0].replace(self._bin)
                write_sidecar(self._prefix, sidecar)
                self._temporary[1].replace(self._idx)
        except HexadError:
            self.discard()
            raise
        with suppress(OSError):  # not every file system can
            sync_directory(self._idx.parent)
        self._lock.close()

    def _check_open(self) -> None:
        if self._stream.closed:
            fix = "write inside its 'with' block, or begin another"
            raise HexadError(f"{self._bin}: the writer is closed; {fix}")

    def _sidecar(self) -> Sidecar:
        """The dataset's sidecar; its other files are complete under their temporary names."""
        tokens, index = self._temporary
        mask = self.mask.temporary if self.mask.used else None
        checksums = {".bin": self._checksum.hexdigest(), ".idx": checksum(index)}
        if mask is not None:
            checksums[".mask"] = checksum(mask)
        return Sidecar(
            fingerprint=sampled_hash(index, tokens),
            documents=self.documents,
            tokens=self.tokens,
            max_token=self.max_token,
            dtype=self.dtype.name,
            bin_bytes=self.tokens * self.dtype.itemsize,
            mask=None if mask is None else sampled_hash(mask),
            checksums=checksums,
            **self.facts,
        )

    def _write_index(self, stream: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        boundaries = np.frombuffer(self._boundaries, dtype=np.int64)
        stream.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(boundaries)))
        stream.write(lengths.astype("<i4", copy=False).data)
        position = 0
        for start in range(0, len(lengths), _CHUNK):
            sizes = lengths[start : start + _CHUNK].astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            stream.write((ends - sizes).astype("<i8", copy=False).data)
            position = int(ends[-1])
        stream.write(boundaries.astype("<i8", copy=False).data)

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):
            self._stream.close()
        self.mask.discard()
        for path in self._temporary:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._lock.close()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


def _stored(dtype: np.dtype[Any] | type[np.integer[Any]]) -> tuple[np.dtype[Any], int]:
    """(a token dtype as it is stored, its code).

    Raises:
        HexadError: it is not among :data:`DTYPES`.
    """
    try:
        stored = np.dtype(dtype).newbyteorder("<")
    except TypeError:
        stored = None
    for code, known in DTYPES.items():
        if known == stored:
            return known, code
    names = ", ".join(known.name for known in DTYPES.values())
    raise HexadError(f"dtype: found {dtype!r}, expected one of {names}")


def _checked(name: str, values: ArrayLike, expected: str, kinds: str) -> NDArray[Any]:
    """An argument as a one-dimensional array of one of these NumPy ``kinds``; empty ones have any.

    Raises:
        HexadError: it is another one.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors of a GPU
        array = np.asarray(None)
    if array.ndim == 1 and (array.dtype.kind in kinds or not array.size):
        return array
    kind = f"{array.dtype.name} of shape {array.shape}"
    actual = kind if array.ndim and array.dtype != object else f"{values!r:.60}"
    raise HexadError(f"{name}: found {actual}, expected {expected}, a list or array of one dimension")
