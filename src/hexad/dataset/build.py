"""From raw text to an indexed dataset, in many processes, with the same bytes for any number of them."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError

from .indexed import IndexedDataset, IndexedWriter, dtype_for
from .sidecar import describe, sidecar_path, write_sidecar
from .sources import Piece, cut, find_files, read
from .tokenizer import Tokenizer, load_tokenizer

_TASK_BYTES = 1 << 20
"""Least text of a task, if there is enough: sending a task costs as much as a small file."""
_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class BuildSummary:
    """What was built.

    Attributes:
        prefix: of the files written.
        documents, tokens: counts; what begins and ends every document is among the tokens.
        skipped: inputs without any text.
        bytes_read: size of the inputs on disk.
        dtype: name of the token dtype.
        tokenizer, vocab, eod: as in :class:`~hexad.dataset.sidecar.Sidecar`; ``eod`` is None if none was
            appended.
        bos: ids before each document.
    """

    prefix: str
    documents: int
    tokens: int
    skipped: int
    bytes_read: int
    dtype: str
    tokenizer: str
    vocab: int
    eod: int | None
    bos: tuple[int, ...]


@dataclass(frozen=True)
class _Encoded:
    """The documents of one task: ids one after another, the length of each, and how many had no text."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    skipped: int
    size: int


def build(
    inputs: Sequence[str | Path],
    prefix: str | Path,
    tokenizer: str,
    *,
    workers: int | None = None,
    json_key: str = "text",
    append_eod: bool = True,
    prepend_bos: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> BuildSummary:
    """Tokenize ``inputs`` into ``PREFIX.bin`` and ``PREFIX.idx``.

    Documents keep the order of the inputs (directories: sorted), so that the result does not depend on
    ``workers``. Documents without text are skipped. Both files appear when all is on disk; a build that fails
    leaves an earlier dataset of that name unchanged. So does one that is killed, unless it was just replacing
    the old one: then there is none.

    Args:
        inputs: files or directories: .jsonl, .parquet, and any other extension is one document of UTF-8 text.
        prefix: of the files to write.
        tokenizer: as for :func:`~hexad.dataset.tokenizer.load_tokenizer`.
        workers: processes that tokenize; None: one per usable CPU core. One works in this process.
        json_key: key (.jsonl) or column (.parquet) of the text.
        append_eod: end every document with the tokenizer's end-of-document token, if it has one.
        prepend_bos: begin every document with what the tokenizer puts before each text, if anything.
        progress: called with (bytes done, bytes in all) from time to time.

    Raises:
        HexadError: an input cannot be read or decoded (naming file and line), there is no text, or the output
            cannot be written.
    """
    encoder = load_tokenizer(tokenizer)
    pieces = cut(find_files(inputs))
    total = sum(piece.size for piece in pieces)
    eod = encoder.eod if append_eod else None
    bos = encoder.bos if prepend_bos else ()
    work = partial(_encode, key=json_key, bos=bos, eod=eod, dtype=dtype_for(encoder.vocab_size))
    tasks = list(_group(pieces))
    count = min(workers or _usable_cores(), len(tasks))
    done = skipped = 0
    with IndexedWriter(prefix, dtype_for(encoder.vocab_size)) as writer:
        for encoded in _run(work, tasks, encoder, count):
            writer.add_documents(encoded.tokens, encoded.lengths)
            skipped += encoded.skipped
            done += encoded.size
            if progress:
                progress(done, total)
        if not writer.tokens:
            raise HexadError(f"{', '.join(map(str, inputs))}: no text found in {len(pieces)} files")
        with suppress(OSError):  # one that stays is ignored: its fingerprint does not match
            sidecar_path(prefix).unlink(missing_ok=True)
    data = IndexedDataset(prefix)
    facts = describe(
        data, writer.max_token, tokenizer=encoder.name, vocab=encoder.vocab_size, eod=eod, bos=bos
    )
    with suppress(OSError):  # the sidecar only saves time
        write_sidecar(prefix, facts)
    return BuildSummary(
        prefix=str(prefix),
        documents=writer.documents,
        tokens=writer.tokens,
        skipped=skipped,
        bytes_read=total,
        dtype=data.dtype.name,
        tokenizer=encoder.name,
        vocab=encoder.vocab_size,
        eod=eod,
        bos=bos,
    )


def _group(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += piece.size
        if size >= _TASK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(
    pieces: Sequence[Piece],
    tokenizer: Tokenizer,
    *,
    key: str,
    bos: tuple[int, ...],
    eod: int | None,
    dtype: np.dtype[Any],
) -> _Encoded:
    """Read and tokenize the documents of some pieces."""
    parts: list[NDArray[Any]] = []
    lengths: list[int] = []
    skipped = 0
    begin, end = np.array(bos, dtype=dtype), np.array([] if eod is None else [eod], dtype=dtype)
    texts = (text for piece in pieces for text in read(piece, key))
    for batch in _batches(texts):
        for ids in tokenizer.encode_batch(batch):
            if not len(ids):
                skipped += 1
                continue
            parts += [begin, ids.astype(dtype), end]
            lengths.append(len(begin) + len(ids) + len(end))
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
    return _Encoded(tokens, np.array(lengths, dtype=np.int64), skipped, sum(p.size for p in pieces))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in groups of a few megabytes, which bounds what the tokenizer holds at once."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@cache
def _loaded(spec: str) -> Tokenizer:
    """A worker process's tokenizer, loaded once."""
    return load_tokenizer(spec)


def _start_worker() -> None:
    # One process per core already: the tokenizers package must not start threads of its own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The parent handles Ctrl-C, and a worker must not outlive a parent that was killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work_on(work: Callable[[list[Piece], Tokenizer], _Encoded], task: list[Piece], spec: str) -> _Encoded:
    return work(task, _loaded(spec))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(
    work: Callable[[list[Piece], Tokenizer], _Encoded],
    tasks: Sequence[list[Piece]],
    tokenizer: Tokenizer,
    workers: int,
) -> Iterator[_Encoded]:
    """The results of ``tasks`` in their order; never more than a few per worker are held in memory."""
    if workers <= 1:
        for task in tasks:
            yield work(task, tokenizer)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    waiting = iter(tasks)
    window: deque[Future[_Encoded]] = deque()
    try:
        for task in islice(waiting, 4 * workers):
            window.append(pool.submit(_work_on, work, task, tokenizer.name))
        while window:
            yield window.popleft().result()
            for task in islice(waiting, 1):
                window.append(pool.submit(_work_on, work, task, tokenizer.name))
    except BrokenProcessPool:
        raise HexadError(
            "a tokenizing process died (most often out of memory); use fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
