"""Build an indexed dataset from raw data in many processes, with the same bytes for any number; its
summary."""

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError
from hexad.config.hub import local_tokenizer

from ..built import check_mask
from ..indexed import IndexedDataset, IndexedWriter, dtype_for
from ..load.whole_samples import packing_facts
from ..masks import mask_path
from ..sidecar import bin_path, idx_path, read_sidecar, sidecar_path
from ..text.chat import load_chat_template
from ..text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from .inputs import InputFile, find_files
from .records import Document, Reading
from .sources import InputPart, NotText, check_used, cut, read, streamed

_TASK_BYTES = 1 << 20
"""Least text of a task, if there is enough: sending a task costs as much as a small file."""
_BATCH_CHARACTERS = 1 << 22
"""Text tokenized at once, which bounds what the tokenizer holds."""
T = TypeVar("T")


@dataclass(frozen=True)
class BuildSummary:
    """The result of a build.

    Attributes:
        prefix: of the files written.
        documents, tokens: counts; what begins and ends every document is among the tokens.
        trained: tokens that have a loss; None: all, and there is no ``PREFIX.mask``.
        skipped: how many inputs were not used.
        skipped_kinds: the same by reason: ``empty`` (files and documents without text), and of files in
            directories ``binary`` and ``not UTF-8``.
        left_out: files that include and exclude patterns left out.
        hidden: hidden files and directories of directories, which are left out.
        unread: path -> why it was left out, of all others: dangling links, links to a directory that they are
            in, devices, pipes, directories without files.
        bytes_read: size of the inputs on disk.
        dtype: name of the token dtype.
        tokenizer, vocab, eod: as in :class:`~hexad.dataset.sidecar.Sidecar`; ``eod`` is None if none was
            appended.
        bos: ids before each document.

    Conversations have neither ``eod`` nor ``bos`` but what their template writes.
    """

    prefix: str
    documents: int
    tokens: int
    trained: int | None
    skipped: int
    skipped_kinds: dict[str, int]
    left_out: int
    hidden: int
    unread: dict[str, str]
    bytes_read: int
    dtype: str
    tokenizer: str
    vocab: int
    eod: int | None
    bos: tuple[int, ...]


@dataclass(frozen=True)
class _EncodedDocuments:
    """The documents of one task.

    Attributes:
        tokens: their ids, one after another; ``lengths`` are those of the documents.
        trained: which of them are trained; None: all.
        framed: for each kind of document among them whether it has what begins and ends documents; a
            conversation has not.
        size: of what was read, in bytes.
    """

    tokens: NDArray[Any]
    trained: NDArray[np.bool_] | None
    lengths: NDArray[np.int64]
    framed: set[bool]
    skipped: Counter[str]
    size: int


@dataclass(frozen=True)
class _Frame:
    """The ids before each document, and the one after it, if any."""

    bos: tuple[int, ...]
    eod: int | None


def build(
    inputs: Sequence[str | Path],
    prefix: str | Path,
    tokenizer: str,
    *,
    workers: int | None = None,
    json_key: str | None = None,
    chat_template: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    append_eod: bool = True,
    prepend_bos: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> BuildSummary:
    """Tokenize ``inputs`` into ``PREFIX.bin`` and ``PREFIX.idx``; ``PREFIX.mask`` where not all is trained.

    Documents keep the order of the inputs (directories: sorted), so that the result does not depend on
    ``workers``. Documents without text are skipped. The files appear when all is on disk; a build that fails
    leaves an earlier dataset of that name unchanged. So does one that is killed, unless it was just replacing
    the old one: then there is none.

    Args:
        inputs: files or directories: .jsonl or .ndjson, .parquet, and any other extension is one document of
            UTF-8 text, but a .json that is named itself is an array of records; all but .parquet also
            compressed (.gz, .bz2, .xz, .zst).
        prefix: of the files to write.
        tokenizer: as for :func:`~hexad.dataset.text.tokenizer.load_tokenizer`.
        workers: processes that tokenize; None: one per usable CPU core. One works in this process.
        json_key: key (.jsonl, .json) or column (.parquet) of the text or conversation; None: ``text``,
            ``messages``, or ``prompt`` and ``completion``, whichever a record has.
        chat_template: file of the template of conversations; None: the tokenizer's own.
        include, exclude: glob patterns of files, see :func:`~hexad.dataset.build.inputs.find_files`.
        append_eod: end every document with the tokenizer's end-of-document token, if it has one.
        prepend_bos: begin every document with what the tokenizer puts before each text, if anything.
        progress: called with (bytes done, bytes in all) from time to time.

    Raises:
        HexadError: an input cannot be read or decoded (naming file and line), there is no text, or the output
            cannot be written.
    """
    _check_prefix(prefix)
    encoder = load_tokenizer(local_tokenizer(tokenizer))
    reading = reading_of(encoder, json_key, chat_template)
    input_files = find_files(inputs, include, exclude)
    files = _not_written(input_files.files, prefix)
    pieces = cut(files)
    check_used({"json_key": json_key, "chat_template": chat_template}, pieces)
    frame = _Frame(encoder.bos if prepend_bos else (), encoder.eod if append_eod else None)
    nothing = f"{', '.join(map(str, inputs))}: no text found in {len(files)} files"
    writer, framed, skipped = _write(prefix, pieces, encoder, reading, frame, workers, progress, nothing)
    any_framed = True in framed
    return BuildSummary(
        prefix=str(prefix),
        documents=writer.documents,
        tokens=writer.tokens,
        trained=writer.mask.trained if writer.mask.used else None,
        skipped=skipped.total(),
        skipped_kinds=dict(skipped),
        left_out=input_files.left_out,
        hidden=input_files.hidden,
        unread=input_files.unread,
        bytes_read=sum(piece.size for piece in pieces),
        dtype=writer.dtype.name,
        tokenizer=encoder.name,
        vocab=encoder.vocab_size,
        eod=frame.eod if any_framed else None,
        bos=frame.bos if any_framed else (),
    )


def _check_prefix(prefix: str | Path) -> None:
    """Refuse a directory, and the name of one of the files that are written."""
    if os.path.basename(prefix) in ("", ".", ".."):
        raise HexadError(f"``output``: found '{prefix}', expected a prefix such as data/train")
    name, ending = os.path.splitext(prefix)
    if ending in (".bin", ".idx"):
        raise HexadError(f"``output``: found '{prefix}', expected a prefix; leave out the '{ending}': {name}")


def _not_written(files: Sequence[InputFile], prefix: str | Path) -> list[InputFile]:
    """The files without those that the build will replace, of an earlier one in a directory of the inputs.

    Raises:
        HexadError: the user has named one of them.
    """
    written = {os.path.realpath(path(prefix)) for path in (bin_path, idx_path, mask_path, sidecar_path)}
    for path, named in files:
        if named and os.path.realpath(path) in written:
            raise HexadError(f"``output``: found '{prefix}', whose files would replace the input {path}")
    return [file for file in files if os.path.realpath(file.path) not in written]


def _facts(encoder: Tokenizer, reading: Reading, frame: _Frame, framed: set[bool]) -> dict[str, Any]:
    """The facts that the sidecar records besides counts."""
    return {
        "tokenizer": encoder.name,
        "vocab": encoder.vocab_size,
        "eod": frame.eod if True in framed else encoder.eod,
        # A template writes what begins a conversation, independent of the run's data.bos.
        "bos": frame.bos if True in framed else None,
        "chat_templates": reading.template.named if False in framed and reading.template else None,
    }


def _write(
    prefix: str | Path,
    pieces: Sequence[InputPart],
    encoder: Tokenizer,
    reading: Reading,
    frame: _Frame,
    workers: int | None,
    progress: Callable[[int, int], object] | None,
    nothing: str,
) -> tuple[IndexedWriter, set[bool], Counter[str]]:
    """Tokenize parts of inputs into the files of ``prefix``; returns the closed writer, and ``framed`` and
    ``skipped`` as in :class:`_EncodedDocuments`."""
    dtype, total = dtype_for(encoder.vocab_size), sum(piece.size for piece in pieces)
    work = partial(_encode, reading=reading, frame=frame, dtype=dtype)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(workers or cores, max(1, total // _TASK_BYTES + 1, len(list(_group(pieces)))))
    done, framed, skipped = 0, set[bool](), Counter[str]()
    with IndexedWriter(prefix, dtype) as writer:
        for encoded in _run(work, _group(streamed(pieces)), encoder, count):
            writer.add_documents(encoded.tokens, encoded.lengths, encoded.trained)
            skipped += encoded.skipped
            framed |= encoded.framed
            done += encoded.size
            if progress:
                progress(done, total)
        if not writer.tokens:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()))
            raise HexadError(nothing + (f" ({kinds})" if skipped else ""))
        if writer.mask.used and not writer.mask.trained:
            raise HexadError(
                "none of the tokens would be trained: completions are empty, or the chat template does not "
                "render what the assistant says; give another one with ``chat_template`` FILE"
            )
        writer.facts = _facts(encoder, reading, frame, framed)
    return writer, framed, skipped


def reading_of(encoder: Tokenizer, key: str | None, chat_template: str | None) -> Reading:
    """How records are read for a tokenizer.

    Raises:
        HexadError: the chat template cannot be read.
    """
    name = encoder.name
    if not isinstance(encoder, HuggingFaceTokenizer | ByteTokenizer):
        # Their special tokens are no text: what a template writes could not be tokenized.
        return Reading(key, None, f"conversations need a Hugging Face tokenizer.json, and {name} is none")
    template = load_chat_template(name, chat_template)
    missing = (
        f"conversations need a chat template, and tokenizer {name} has none (chat_template.jinja, or "
        "chat_template of tokenizer_config.json); give one with ``chat_template`` FILE"
    )
    return Reading(key, template, missing)


def _group(pieces: Iterable[InputPart]) -> Iterator[list[InputPart]]:
    """Pieces in groups of enough text for a task."""
    return _grouped(pieces, lambda piece: len(piece.lines or ()) or piece.size, _TASK_BYTES)


def _grouped(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Items in groups of at least this size, but for the last."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= least:
            yield group
            group, total = [], 0
    if group:
        yield group


def _encode(
    pieces: Sequence[InputPart],
    tokenizer: Tokenizer,
    *,
    reading: Reading,
    frame: _Frame,
    dtype: np.dtype[Any],
) -> _EncodedDocuments:
    parts: list[NDArray[Any]] = []
    marks: list[NDArray[np.bool_]] = []
    lengths: list[int] = []
    skipped = Counter[str]()
    framed: set[bool] = set()
    begin = np.array(frame.bos, dtype=dtype)
    end = np.array([] if frame.eod is None else [frame.eod], dtype=dtype)
    documents = _documents(pieces, reading, skipped)
    for batch in _grouped(documents, lambda document: len(document.text), _BATCH_CHARACTERS):
        for document, (ids, trained) in zip(batch, _tokenized(batch, tokenizer)):
            if not len(ids):
                skipped["empty"] += 1
                continue
            before, after = (begin, end) if document.framed else (begin[:0], end[:0])
            parts += [before, ids.astype(dtype), after]
            marks += [np.full(len(before), document.trained is None), trained, np.full(len(after), True)]
            lengths.append(len(before) + len(ids) + len(after))
            framed.add(document.framed)
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
    mask = np.concatenate(marks) if marks else None
    marked = None if mask is None or mask.all() else mask
    size = sum(piece.size for piece in pieces)
    return _EncodedDocuments(tokens, marked, np.array(lengths, dtype=np.int64), framed, skipped, size)


def _documents(pieces: Sequence[InputPart], reading: Reading, skipped: Counter[str]) -> Iterator[Document]:
    """The documents of some pieces; files that are not text are counted."""
    for piece in pieces:
        try:
            yield from map(reading.document, read(piece, reading.columns))
        except NotText as error:
            skipped[error.kind] += 1


def _tokenized(
    batch: Sequence[Document], tokenizer: Tokenizer
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """The ids of each document's text, and which of them are trained: those with a trained character."""
    plain = iter(tokenizer.encode_batch([entry.text for entry in batch if entry.trained is None]))
    marked = iter(tokenizer.encode_offsets([entry.text for entry in batch if entry.trained is not None]))
    for document in batch:
        if document.trained is None:
            ids = next(plain)
            yield ids, np.ones(len(ids), dtype=np.bool_)
        else:
            places = next(marked)
            yield places.ids, places.within(document.trained)


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


def _work_on(
    work: Callable[[list[InputPart], Tokenizer], _EncodedDocuments], task: list[InputPart], spec: str
) -> _EncodedDocuments:
    return work(task, _loaded(spec))


def _run(
    work: Callable[[list[InputPart], Tokenizer], _EncodedDocuments],
    tasks: Iterable[list[InputPart]],
    tokenizer: Tokenizer,
    workers: int,
) -> Iterator[_EncodedDocuments]:
    """The results of ``tasks`` in their order; never more than a few per worker are held in memory."""
    if workers <= 1:
        for task in tasks:
            yield work(task, tokenizer)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    futures = (pool.submit(_work_on, work, task, tokenizer.name) for task in tasks)
    try:
        window = deque(islice(futures, 4 * workers))
        while window:
            yield window.popleft().result()
            window.extend(islice(futures, 1))
    except BrokenProcessPool:
        raise HexadError(
            "a tokenizing process died (most often out of memory); use fewer ``workers``"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def inspect(
    prefix: str | Path, *, tokenizer: str | None = None, first: int = 32, sequence: int | None = None
) -> dict[str, Any]:
    """Counts, lengths and the beginning of a dataset.

    Args:
        prefix: of the dataset.
        tokenizer: to decode with; None: the one that built it, if the sidecar knows it and it is still there.
        first: how many tokens to show.
        sequence: positions of a sample; None: ``packing`` is not among the results.

    Returns:
        ``prefix``, ``documents``, ``tokens``, ``trained`` (tokens that have a loss), ``dtype``, ``bytes`` (of
        the .bin), ``length`` (``min``, ``median``, ``max`` tokens per document), ``tokenizer``, ``vocab`` and
        ``max_token`` (None where not known), ``first_tokens`` (ids) and ``first_text`` (None without a
        tokenizer); ``packing``, how whole documents fill samples: ``samples``, ``efficiency`` (part of the
        positions that is not padding), ``longest`` and ``too_long`` (documents longer than a sample, which
        are not in these samples).

    Raises:
        HexadError: the dataset cannot be read, or the given tokenizer cannot be loaded.
    """
    data = IndexedDataset(prefix)
    data.verify()
    sidecar = read_sidecar(prefix)
    if sidecar is not None:
        check_mask(data, sidecar)
    if data.mask is not None:
        data.mask.verify()
    lengths = np.diff(data.starts(np.arange(data.documents + 1)))
    encoder = None
    if tokenizer is not None:
        encoder = load_tokenizer(local_tokenizer(tokenizer))
    elif sidecar is not None and sidecar.tokenizer is not None:
        with suppress(HexadError):  # built on another machine: the ids still show
            encoder = load_tokenizer(sidecar.tokenizer)
    ids = [int(i) for i in data.tokens[:first]]
    packing = {}
    if sequence is not None:
        _, facts = packing_facts(data, sequence, "skip")
        names = "samples", "efficiency", "longest", "too_long"
        packing = {"packing": {name: round(getattr(facts, name), 4) for name in names}}
    return {
        "prefix": str(prefix),
        "documents": data.documents,
        "tokens": len(data.tokens),
        "trained": len(data.tokens) if data.mask is None else data.mask.trained,
        "dtype": data.dtype.name,
        "bytes": data.tokens.nbytes,
        "length": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "max": int(lengths.max()),
        },
        "tokenizer": encoder.name if encoder else (sidecar.tokenizer if sidecar else None),
        "vocab": encoder.vocab_size if encoder else (sidecar.vocab if sidecar else None),
        "max_token": sidecar.max_token if sidecar else None,
        "first_tokens": ids,
        "first_text": encoder.decode(ids) if encoder else None,
        **packing,
    }
