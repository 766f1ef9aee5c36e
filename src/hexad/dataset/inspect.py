"""A summary of a dataset."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hexad.config.errors import HexadError

from .indexed import IndexedDataset
from .sidecar import read_sidecar
from .tokenizer import load_tokenizer


def inspect(prefix: str | Path, *, tokenizer: str | None = None, first: int = 32) -> dict[str, Any]:
    """Counts, lengths and the beginning of a dataset.

    Args:
        prefix: of the dataset.
        tokenizer: to decode with; None: the one that built it, if the sidecar knows it and it is still there.
        first: how many tokens to show.

    Returns:
        ``prefix``, ``documents``, ``tokens``, ``dtype``, ``bytes`` (of the .bin), ``length`` (``min``,
        ``median``, ``max`` tokens per document), ``tokenizer``, ``vocab`` and ``max_token`` (None where not
        known), ``first_tokens`` (ids) and ``first_text`` (None without a tokenizer).

    Raises:
        HexadError: the dataset cannot be read, or the given tokenizer cannot be loaded.
    """
    data = IndexedDataset(prefix)
    data.verify()
    sidecar = read_sidecar(prefix)
    lengths = np.diff(data.starts(np.arange(data.documents + 1)))
    encoder = None
    if tokenizer is not None:
        encoder = load_tokenizer(tokenizer)
    elif sidecar is not None and sidecar.tokenizer is not None:
        with suppress(HexadError):  # built on another machine: the ids still show
            encoder = load_tokenizer(sidecar.tokenizer)
    ids = [int(i) for i in data.tokens[:first]]
    return {
        "prefix": str(prefix),
        "documents": data.documents,
        "tokens": len(data.tokens),
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
    }
