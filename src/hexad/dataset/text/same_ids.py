"""Whether two tokenizers give the same ids: the weights of an embedding belong to ids. No torch."""

from __future__ import annotations

import json
from typing import Any

from .byte_tokenizer import byte_backend
from .tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer, vocabulary_file


def same_ids(one: str, other: str) -> bool:
    """Whether two tokenizers certainly give every text the same ids, and begin and end documents with the
    same ones. Chat templates, and how texts are truncated, padded and joined, have no part in it.

    Raises:
        HexadError: as for :func:`load_tokenizer`.
    """
    first, second = load_tokenizer(one), load_tokenizer(other)
    if (first.eod, first.bos) != (second.eod, second.bos):
        return False
    return _content(first, one) == _content(second, other)


def _content(tokenizer: Tokenizer, spec: str) -> Any:
    """All that decides a text's ids, however its file is formatted."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return json.loads(tokenizer.backend.to_str())
    path = vocabulary_file(spec)
    return json.loads(byte_backend().to_str()) if path is None else path.read_bytes()
