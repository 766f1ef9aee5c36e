"""The ``byte`` tokenizer in the form of the ``tokenizers`` package. No torch."""

from __future__ import annotations

from typing import Any

BYTE_END = "<|endoftext|>"
"""Its end-of-document token, whose id is 256."""


def byte_backend() -> Any:
    """The 256 values of a byte, then :data:`BYTE_END`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    # Byte-level tokenizers map bytes without a visible character to those from 256 on, in order.
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BYTE_END, special=True)])
    return backend
