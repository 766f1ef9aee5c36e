"""How many bytes of text each token stands for: for bits per byte, which compare models of any vocabulary."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
)

_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """Bytes of UTF-8 that each id stands for, int64 ``[vocab_size]``, 0 for special tokens; None for kinds of
    tokenizers that do not keep all bytes of a text (WordPiece)."""
    if isinstance(tokenizer, ByteTokenizer):
        return np.array([1] * 256 + [0], dtype=np.int64)
    if isinstance(tokenizer, TiktokenTokenizer):
        ranks = tokenizer.backend.token_byte_values()
        lengths = {tokenizer.backend.encode_single_token(value): len(value) for value in ranks}
        return _table(tokenizer, lengths)
    if isinstance(tokenizer, SentencePieceTokenizer):
        backend = tokenizer.backend
        numbers = set(range(tokenizer.vocab_size)) - {*tokenizer.specials.values(), backend.unk_id()}
        sizes = {n: _piece_bytes(backend.id_to_piece(n), backend.is_byte(n)) for n in numbers}
        return _table(tokenizer, sizes)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return _hugging_face(tokenizer)


def _hugging_face(tokenizer: HuggingFaceTokenizer) -> NDArray[np.int64] | None:
    backend = tokenizer.backend
    kinds = set(_kinds(json.loads(backend.to_str()).get("decoder")))
    added = backend.get_added_tokens_decoder()
    lengths: dict[int, int] = {}
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        if number in added:
            lengths[number] = 0 if added[number].special else len(added[number].content.encode())
        elif "ByteLevel" in kinds:  # every character of a token stands for one byte
            lengths[number] = len(token)
        elif kinds & {"Metaspace", "Replace", "ByteFallback"}:
            # <0xE4> is one byte that no piece covers.
            lengths[number] = _piece_bytes(token, re.fullmatch("<0x..>", token) is not None)
        else:
            return None
    return _table(tokenizer, lengths)


def _kinds(decoder: Any) -> Iterable[str]:
    """The types of a decoder of ``tokenizer.json`` and of what it is made of."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders", ()):
            yield from _kinds(part)


def _piece_bytes(piece: str, byte: bool) -> int:
    return 1 if byte else len(piece.replace(_SPACE, " ").encode())


def _table(tokenizer: Tokenizer, lengths: Mapping[int, int]) -> NDArray[np.int64]:
    return np.array([lengths.get(number, 0) for number in range(tokenizer.vocab_size)], dtype=np.int64)
