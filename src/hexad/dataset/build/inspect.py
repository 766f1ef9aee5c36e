"""A summary of a dataset."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hexad.config.errors import HexadError

from ..indexed import IndexedDataset
from ..sidecar import check_mask, read_sidecar
from ..text.tokenizer import load_tokenizer
from ..load.whole_samples import packing_facts


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
        encoder = load_tokenizer(tokenizer)
    elif sidecar is not None and sidecar.tokenizer is not None:
        with suppress(HexadError):  # built on another machine: the ids still show
            encoder = load_tokenizer(sidecar.tokenizer)
    ids = [int(i) for i in data.tokens[:first]]
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
        **({} if sequence is None else {"packing": _packing(data, sequence)}),
    }


def _packing(data: IndexedDataset, sequence: int) -> dict[str, Any]:
    _, facts = packing_facts(data, sequence, "skip")
    return {
        "samples": facts.samples,
        "efficiency": round(facts.efficiency, 4),
        "longest": facts.longest,
        "too_long": facts.too_long,
    }
