"""``PREFIX.hexad.json``: facts about a dataset beside Megatron's two files; it only saves time.

The file is used only while its fingerprint matches the data, so that it is never applied to copied or rebuilt
data. (The name is not ``PREFIX.json``, which may be the user's own input.)
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from hexad.config.errors import HexadError

from .files import write_whole
from .indexed import IndexedDataset, bin_path, idx_path

_BLOCK, _BLOCKS = 1 << 16, 16
_SCAN = 1 << 24
"""Tokens scanned at once."""
_WORTH_KEEPING = 1 << 26
"""Tokens from which the result of a scan is kept."""


@dataclass(frozen=True)
class Sidecar:
    """Facts about a dataset.

    Attributes:
        fingerprint: hash of sizes and sampled blocks of both files.
        documents, tokens: counts.
        max_token: largest token id.
        dtype: name of the token dtype.
        bin_bytes: size of the ``.bin``.
        tokenizer: argument of ``load_tokenizer``, or None if not known.
        vocab: the tokenizer's vocabulary size.
        eod: id of its end-of-document token, if it has one.
    """

    fingerprint: str
    documents: int
    tokens: int
    max_token: int
    dtype: str
    bin_bytes: int
    tokenizer: str | None = None
    vocab: int | None = None
    eod: int | None = None


def sidecar_path(prefix: str | Path) -> Path:
    """``PREFIX.hexad.json``."""
    return Path(f"{prefix}.hexad.json")


def fingerprint(prefix: str | Path) -> str:
    """A hash of the sizes and 16 evenly spaced 64-KiB blocks of each file; independent of names and times."""
    digest = blake2b(digest_size=16)
    for path in (idx_path(prefix), bin_path(prefix)):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as stream:
            for offset in sorted({i * max(size - _BLOCK, 0) // (_BLOCKS - 1) for i in range(_BLOCKS)}):
                stream.seek(offset)
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """The dataset's sidecar, or None where there is none or it belongs to other data."""
    try:
        sidecar = Sidecar(**json.loads(sidecar_path(prefix).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return sidecar if sidecar.fingerprint == fingerprint(prefix) else None


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Write ``PREFIX.hexad.json``, atomically.

    Raises:
        OSError: the directory cannot be written.
    """
    text = json.dumps(asdict(sidecar), indent=2) + "\n"
    write_whole(sidecar_path(prefix), lambda stream: stream.write(text.encode()))


def check_token_range(prefix: str | Path, vocab: int, *, dataset: IndexedDataset | None = None) -> int:
    """Check that every token id of a dataset is in ``0 .. vocab - 1``.

    The largest id is taken from the sidecar if that is valid; otherwise all tokens are read once (about a
    gigabyte per second) and, for large data, the result is saved in a sidecar if the directory is writable.

    Args:
        prefix: of the dataset.
        vocab: vocabulary size of the model.
        dataset: the dataset, if it is open already.

    Returns:
        The largest token id.

    Raises:
        HexadError: an id is negative or not below ``vocab``.
    """
    sidecar = read_sidecar(prefix)
    if sidecar is not None and sidecar.max_token < vocab:
        return sidecar.max_token
    data = dataset if dataset is not None else IndexedDataset(prefix)
    largest = -1
    for start in range(0, len(data.tokens), _SCAN):
        piece = data.tokens[start : start + _SCAN]
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= vocab:
            bad = int(np.flatnonzero((piece < 0) | (piece >= vocab))[0])
            built = f" (built with {sidecar.tokenizer}, vocabulary {sidecar.vocab})" if sidecar else ""
            raise HexadError(
                f"{bin_path(prefix)}: token id {piece[bad]} at position {start + bad}, expected 0 to "
                f"{vocab - 1}{built}; set data.tokenizer (or model.vocab) to what the data was built with"
            )
        largest = max(largest, high)
    if sidecar is None and len(data.tokens) >= _WORTH_KEEPING and not sidecar_path(prefix).exists():
        facts = describe(data, largest)
        with suppress(OSError):  # a read-only directory: the scan is repeated next time
            write_sidecar(prefix, facts)
    return largest


def describe(
    data: IndexedDataset,
    max_token: int,
    *,
    tokenizer: str | None = None,
    vocab: int | None = None,
    eod: int | None = None,
) -> Sidecar:
    """The sidecar of an open dataset."""
    return Sidecar(
        fingerprint=fingerprint(data.prefix),
        documents=data.documents,
        tokens=len(data.tokens),
        max_token=max_token,
        dtype=data.dtype.name,
        bin_bytes=data.tokens.nbytes,
        tokenizer=tokenizer,
        vocab=vocab,
        eod=eod,
    )
