"""Megatron-LM's names for what a tokenizer does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from math import lcm

from hexad.config import blaming
from hexad.dataset.text import tokenizer as own

from .translate import Translation


class Tokenizer:
    """A tokenizer with Megatron-LM's names.

    Args:
        backend: Hexad's.
        vocab_size: of the model, without padding.

    Attributes:
        backend, vocab_size: as given.
    """

    def __init__(self, backend: own.Tokenizer, vocab_size: int) -> None:
        self.backend, self.vocab_size = backend, vocab_size

    @property
    def eod(self) -> int | None:
        """The id of the end of a document; None if there is none."""
        return self.backend.eod

    eos = eod

    @property
    def bos(self) -> int | None:
        """The id that begins a text; None if there is none."""
        return self.backend.bos[0] if self.backend.bos else None

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without special ones."""
        return self.backend.encode(text)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of ids."""
        return self.backend.decode(token_ids)


class _Null(own.ByteTokenizer):
    """Megatron-LM's NullTokenizer: numbers, separated by spaces; the last id is the end of a document."""

    def __init__(self, vocab: int) -> None:
        self.vocab_size, self.eod = vocab, vocab - 1

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


def build_tokenizer(translation: Translation, arguments: Namespace) -> Tokenizer | None:
    """The tokenizer that the flags name; sets ``padded_vocab_size``. None where they name none.

    Raises:
        ConfigError: it cannot be loaded.
    """
    name, vocab = translation.tree["data"].get("tokenizer"), translation.tree["model"].get("vocab")
    # Hexad's own padding, so that there is no other.
    multiple = lcm(arguments.make_vocab_size_divisible_by, 64) * arguments.tensor_model_parallel_size
    if name is None:
        arguments.padded_vocab_size = None if vocab is None else -(-vocab // multiple) * multiple
        return None
    translation.write_files("tokenizer")
    with blaming("--tokenizer-type"):
        backend: own.Tokenizer = _Null(vocab) if vocab is not None else own.load_tokenizer(name)
    found = Tokenizer(backend, vocab or backend.vocab_size)
    arguments.padded_vocab_size = -(-found.vocab_size // multiple) * multiple
    return found
