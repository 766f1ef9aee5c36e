"""Where each document of an epoch's order begins in the epoch's stream of tokens: its index.

For up to a million documents every process computes it in memory, in a few tens of milliseconds. A larger one
is a memory-mapped file, 8 bytes per document, which one process per file system writes while the others wait.
The file's name is a hash of all it depends on: later runs use it again, and it may be deleted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from ..files import appearing_whole, written_once
from ..indexed import IndexedDataset
from .permutation import permute

_CHUNK = 1 << 20
_THREADS = 8
_FORMAT = "hexad-stream-2"
"""Change it when the orders drawn from a seed change."""


class Stream:
    """The indexes of one dataset's epochs.

    Args:
        data: the dataset.
        key: of the order of documents, see :func:`document_order`.
        places: directories to store indexes in, the first that can be written.
        in_memory: number of documents up to which no file is created.
        patience: seconds to wait for another process that writes the file.
    """

    def __init__(
        self,
        data: IndexedDataset,
        key: tuple[int, int],
        places: Sequence[Path],
        in_memory: int,
        patience: float,
    ) -> None:
        self.data, self.key, self.places = data, key, places
        self.in_memory, self.patience = in_memory, patience

    def index(self, epoch: int) -> NDArray[np.int64]:
        """Where each document of an epoch's order begins, int64 ``[documents + 1]``, ending with the total.

        Raises:
            HexadError: the dataset is damaged, or its index cannot be stored or is not completed in time.
        """
        if self.data.documents > self.in_memory:
            return self._stored(epoch)
        self.data.verify()
        index = np.zeros(self.data.documents + 1, dtype=np.int64)
        for start in range(0, self.data.documents, _CHUNK):
            lengths = self._lengths(start, epoch)
            index[start + 1 : start + 1 + len(lengths)] = index[start] + np.cumsum(lengths)
        return index

    def _lengths(self, start: int, epoch: int) -> NDArray[np.int64]:
        """Tokens of the documents at some places of an epoch's order."""
        documents = self.data.documents
        places = np.arange(start, min(start + _CHUNK, documents))
        return self.data.tokens_in(document_order(places, documents, self.key, epoch))

    def _stored(self, epoch: int) -> NDArray[np.int64]:
        """The index from a file, which is created if it is missing."""
        words = (_FORMAT, self.data.identity(), *self.key, epoch)
        what = f"{self.data.prefix}: the index of {self.data.documents} documents"
        write = partial(self._write, epoch=epoch)
        return stored(words, self.places, self._mapped, write, self.patience, what)

    def _mapped(self, path: Path) -> NDArray[np.int64] | None:
        """The file's content if it is complete."""
        try:
            index: NDArray[Any] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        complete = index.shape == (self.data.documents + 1,) and index.dtype == np.int64
        return np.asarray(index) if complete and index[-1] == len(self.data.tokens) else None

    def _write(self, path: Path, epoch: int) -> None:
        self.data.verify()
        documents = self.data.documents
        threads = min(_THREADS, os.cpu_count() or 1)
        starts = range(0, documents, _CHUNK)
        with appearing_whole(path) as stream, ThreadPoolExecutor(threads) as pool:
            header = {"descr": "<i8", "fortran_order": False, "shape": (documents + 1,)}
            np.lib.format.write_array_header_1_0(stream, header)
            total = np.zeros(1, dtype="<i8")
            stream.write(total.tobytes())
            groups = (starts[first : first + 2 * threads] for first in range(0, len(starts), 2 * threads))
            lengths = (pool.map(lambda start: self._lengths(start, epoch), group) for group in groups)
            for each in chain.from_iterable(lengths):
                ends = total + np.cumsum(each)
                stream.write(ends.astype("<i8", copy=False).tobytes())
                total = ends[-1:]


def index_places(data: IndexedDataset, cache_dir: str | Path | None) -> list[Path]:
    """Directories for a dataset's indexes: beside it, else ``cache_dir`` (``data.cache_dir``)."""
    return [Path(f"{data.prefix}.cache"), *([Path(cache_dir)] if cache_dir is not None else [])]


def stored(
    words: tuple[object, ...],
    places: Sequence[Path],
    read: Callable[[Path], NDArray[np.int64] | None],
    write: Callable[[Path], None],
    patience: float,
    what: str,
) -> NDArray[np.int64]:
    """An index from a file, which one process per file system creates if it is missing.

    Args:
        words: all it depends on; the file's name is their hash.
        places: directories to store it in, the first that can be written.
        read: the content of a path if it is complete.
        write: creates a path.
        patience: seconds to wait for another process.
        what: it is, for messages.

    Raises:
        HexadError: it cannot be stored, or is not completed in time.
    """
    name = blake2b(repr(words).encode(), digest_size=16).hexdigest() + ".npy"
    for place in places:
        if (index := read(place / name)) is not None:
            return index
    problems = []
    for path in (place / name for place in places):
        try:
            return written_once(path, partial(read, path), partial(write, path), patience)
        except OSError as error:
            problems.append(f"{path.parent} ({error.strerror or error})")
    raise HexadError(
        f"{what} cannot be stored in {' or '.join(problems)}; make one of them writable (8 bytes per "
        "document and epoch)"
    )


def document_order(
    places: NDArray[np.int64], documents: int, key: tuple[int, int], epoch: int
) -> NDArray[np.int64]:
    """Which documents stand at some places of an epoch's order; ``key`` is (seed, source)."""
    return permute(places, documents, *key, epoch, "documents")
