"""The text that a token adds after given tokens, for every tokenizer. No torch.

Most tokenizers are *piecewise*: a token adds the same bytes of UTF-8 in every place, except that spaces at
the beginning of a text are the tokenizer's own (SentencePiece's dummy prefix). What a token of another kind
adds (WordPiece) is the difference between decoded texts.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    byte_characters,
)

_SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_ESCAPED = re.compile("[\udc80-\udcff]")
_UNLIMITED = 2**31
_PROBES = ("a", "e", "0", ".", "A")
"""Texts with which it is tried what encoding puts before and behind a text: vocabularies have one of them."""
_WINDOW = 32
"""Tokens before a new one that a difference of decoded texts looks at, and that are held back at most."""


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of the tokens of a piecewise tokenizer.

    Attributes:
        value: the bytes of UTF-8 that a token adds inside a text; of a special token, none.
        leading: how many spaces of a token the beginning of a text may remove.
        decoded: spaces that decoding removes at the beginning of a text, at most.
        first: the bytes of the first token, where decoding treats that one differently, and no other.
        byte_by_byte: decoding shows each byte that is not UTF-8 as one U+FFFD, not each run of them.
        unknown: the id for text that no token covers, whose bytes are lost.
    """

    value: Callable[[int], bytes]
    leading: Callable[[int], int]
    decoded: int = 0
    first: Callable[[int], bytes] | None = None
    byte_by_byte: bool = False
    unknown: int | None = None


class TokenText:
    """The text that each token of a tokenizer adds.

    Attributes:
        specials: the texts of special tokens by id; they add nothing to a text.
        pieces: None where the tokenizer is not piecewise.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.specials = {number: text for text, number in tokenizer.specials.items()}
        self.pieces = _pieces(tokenizer)

    @cached_property
    def encoded(self) -> int:
        """Spaces that encoding puts before a text."""
        if self.pieces is None:
            return 0
        for text, probe in self._probes:
            if text.lstrip(b" ") == probe:
                return len(text) - len(probe)
        return min(self.pieces.decoded, 1)

    @cached_property
    def restarts(self) -> frozenset[int]:
        """The added tokens after which encoding puts the same spaces."""
        if self.pieces is None or not self.encoded:
            return frozenset()
        after = set()
        for number, text in self._added.items():
            for probe in _PROBES:
                first, *others = self.tokenizer.encode(text + probe) or [-1]
                if first == number and self._added.keys().isdisjoint(others):
                    if b"".join(map(self.pieces.value, others)).startswith(b" "):
                        after.add(number)
                    break
        return frozenset(after)

    @cached_property
    def _added(self) -> dict[int, str]:
        """The texts of tokens that are found in a text before it is divided."""
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            return {}
        tokens = self.tokenizer.backend.get_added_tokens_decoder()
        return {number: token.content for number, token in tokens.items()}

    @cached_property
    def _probes(self) -> list[tuple[bytes, bytes]]:
        """(Bytes that the tokens of a probe add, bytes of the probe) of probes that ordinary tokens
        encode."""
        assert self.pieces is not None
        encoded = ((self.tokenizer.encode(probe), probe.encode()) for probe in _PROBES)
        ordinary = ((ids, probe) for ids, probe in encoded if self._added.keys().isdisjoint(ids))
        return [(b"".join(map(self.pieces.value, ids)), probe) for ids, probe in ordinary]

    def decoder(self, before: Sequence[int] = ()) -> TextDecoder:
        """The decoder of tokens that follow others, as decoding all of them together shows their texts."""
        if self.pieces is None:
            return TextDecoder(_Differences(self.tokenizer, self.specials, before))
        decoder = TextDecoder(_Joined(self.pieces, before), self.pieces.byte_by_byte)
        decoder.enter(_last_bytes(self.pieces, before))
        return decoder

    def prompt_decoder(self) -> TextDecoder:
        """The decoder of a prompt's tokens, which shows the text that was encoded: special tokens as they are
        written, except those that the tokenizer puts before each text, and no spaces that it puts there."""
        return TextDecoder(_EncodedPrompt(self), self.pieces is not None and self.pieces.byte_by_byte)

    @cached_property
    def byte_counts(self) -> ByteCounts | None:
        """Bytes per token; None where a tokenizer does not keep all bytes of a text (WordPiece),
        or puts a space behind it."""
        if self.pieces is None or any(text == probe + b" " for text, probe in self._probes):
            return None
        pieces, size = self.pieces, range(self.tokenizer.vocab_size)
        known = (b"" if number == pieces.unknown else pieces.value(number) for number in size)
        inside = np.array([len(value) for value in known], dtype=np.int64)
        leading = np.array([min(self.encoded, pieces.leading(number)) for number in size])
        begins = np.zeros(len(size), dtype=np.bool_)
        ends = () if self.tokenizer.eod is None else (self.tokenizer.eod,)
        begins[[*self.tokenizer.bos, *ends, *self.restarts]] = True
        return ByteCounts(inside, inside - leading, begins)


class ByteCounts(NamedTuple):
    """Bytes of text that tokens stand for: for bits per byte, which compare models of any vocabulary.

    Attributes:
        inside: by token, int64 ``[vocab]``.
        first: by token, at the beginning of a text, int64 ``[vocab]``.
        begins: by token, whether a text begins after it, bool ``[vocab]``.
    """

    inside: NDArray[np.int64]
    first: NDArray[np.int64]
    begins: NDArray[np.bool_]

    def total(self, previous: NDArray[Any], tokens: NDArray[Any]) -> int:
        """The bytes of tokens, each after another one, both ``[length]``; ids beyond the vocabulary have
        none."""
        known = tokens < len(self.inside)
        previous, tokens = previous[known], tokens[known]
        begins = self.begins[np.minimum(previous, len(self.begins) - 1)] & (previous < len(self.begins))
        return int(np.where(begins, self.first[tokens], self.inside[tokens]).sum())


class Added(NamedTuple):
    """The bytes and text that one token adds.

    Attributes:
        value: its bytes of UTF-8, which may be part of a character.
        text: the characters that are complete with it.
    """

    value: bytes
    text: str


class _ByteSource(Protocol):
    """The bytes of tokens that follow one another."""

    def value(self, token: int) -> bytes:
        """The bytes that a token would add."""

    def accept(self, token: int) -> None:
        """Append the token."""

    def rest(self) -> bytes:
        """The bytes that are still held back at the end."""


class TextDecoder:
    """The text of tokens, one at a time.

    Attributes:
        characters: length of the text so far.
    """

    def __init__(self, source: _ByteSource, byte_by_byte: bool = False) -> None:
        self._source = source
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape" if byte_by_byte else "replace")
        self.characters = 0

    def value(self, token: int) -> bytes:
        """The bytes that a token would add here."""
        return self._source.value(token)

    def add(self, token: int) -> Added:
        """Append a token."""
        value = self._source.value(token)
        self._source.accept(token)
        return Added(value, self._decoded(value))

    def end(self) -> str:
        """The text of what was held back."""
        return self._decoded(self._source.rest(), final=True)

    def enter(self, value: bytes) -> None:
        """Begin after some bytes."""
        self._utf8.decode(value)

    def _decoded(self, value: bytes, final: bool = False) -> str:
        text = _ESCAPED.sub(_UNKNOWN, self._utf8.decode(value, final))
        self.characters += len(text)
        return text


class _Beginning:
    """The spaces that the beginning of a text may still remove from tokens."""

    def __init__(self, pieces: TokenBytes, left: int) -> None:
        self._pieces, self.left = pieces, left

    def value(self, token: int) -> bytes:
        """The bytes that a token adds here."""
        return self._pieces.value(token)[min(self.left, self._pieces.leading(token)) :]

    def accept(self, token: int) -> None:
        """Append the token; the beginning ends with the first one that leaves something."""
        value = self._pieces.value(token)
        if self.left and value:
            removed = min(self.left, self._pieces.leading(token))
            self.left = self.left - removed if removed == len(value) else 0


class _Joined:
    """Bytes of the tokens of a piecewise tokenizer, as its decoder shows them."""

    def __init__(self, pieces: TokenBytes, before: Iterable[int]) -> None:
        self._pieces, self._beginning = pieces, _Beginning(pieces, pieces.decoded)
        for token in before:
            if not self._beginning.left:
                break
            self.accept(token)

    def value(self, token: int) -> bytes:
        if self._beginning.left and self._pieces.first is not None:
            return self._pieces.first(token)
        return self._beginning.value(token)

    def accept(self, token: int) -> None:
        if self._pieces.first is None:
            self._beginning.accept(token)
        elif self._pieces.value(token):  # only one token is the first
            self._beginning.left = 0

    def rest(self) -> bytes:
        return b""


class _EncodedPrompt:
    """Bytes of a prompt's tokens, as they were encoded."""

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._beginning = None if text.pieces is None else _Beginning(text.pieces, text.encoded)
        self._differences = _Differences(text.tokenizer, text.specials, ())
        self._bos = list(reversed(text.tokenizer.bos))  # what may still come of it

    def value(self, token: int) -> bytes:
        if token in self._text.specials:
            return b"" if self._begins(token) else self._text.specials[token].encode()
        return (self._beginning or self._differences).value(token)

    def accept(self, token: int) -> None:
        if token in self._text.specials:
            if self._begins(token):
                self._bos.pop()
                return
        else:
            (self._beginning or self._differences).accept(token)
        if self._beginning is not None:
            if token in self._text.restarts:
                self._beginning.left = self._text.encoded
            elif token in self._text.specials:
                self._beginning.left = 0
        self._bos.clear()

    def rest(self) -> bytes:
        return self._differences.rest()

    def _begins(self, token: int) -> bool:
        return bool(self._bos) and self._bos[-1] == token


class _Differences:
    """The text of all tokens beyond that of the tokens before; a character whose bytes are in several tokens
    comes with the last of them."""

    def __init__(self, tokenizer: Tokenizer, specials: Iterable[int], before: Sequence[int]) -> None:
        self._tokenizer, self._specials = tokenizer, frozenset(specials)
        self._ids = [token for token in before[-2 * _WINDOW :] if token not in self._specials][-_WINDOW:]
        self._known = len(self._ids)  # tokens whose text was returned

    def value(self, token: int) -> bytes:
        return b"" if token in self._specials else self._new(token)[0]

    def accept(self, token: int) -> None:
        if token in self._specials:
            return
        complete = self._new(token)[1]
        self._ids.append(token)
        if complete:
            self._ids = self._ids[-_WINDOW:]
            self._known = len(self._ids)

    def rest(self) -> bytes:
        return self._new()[0]

    def _new(self, *token: int) -> tuple[bytes, bool]:
        """The text that is not known yet, with that of a new token, and whether it is complete."""
        ids = [*self._ids, *token]
        before, text = self._tokenizer.decode(ids[: self._known]), self._tokenizer.decode(ids)
        if token and text.endswith(_UNKNOWN) and len(ids) - self._known < _WINDOW:
            return b"", False
        return text[len(before) :].encode(), True


class Label(NamedTuple):
    """A token as results name it.

    Attributes:
        name: the text that it adds, unique among the tokens of its place; ``token_id:`` and the id where that
            is no text, or another token's; of special tokens, their text.
        value: the bytes that it adds.
    """

    name: str
    value: bytes


class TokenLabels:
    """Labels of tokens that follow one another, with what might have stood in their places.

    Args:
        text: of the tokenizer.
        decoder: of the tokens' text.
    """

    def __init__(self, text: TokenText, decoder: TextDecoder) -> None:
        self._text, self.decoder = text, decoder

    def add(self, token: int, others: Iterable[int] = ()) -> dict[int, Label]:
        """Append a token; returns its label and those of others in its place, by id. Where two would have one
        name, it is the earlier one's."""
        labels: dict[int, Label] = {}
        names = set()
        for number in dict.fromkeys((token, *others)):
            value = self.decoder.value(number)
            name = self._text.specials.get(number) or self._name(value)
            if name is None or name in names:
                name = f"token_id:{number}"
            names.add(name)
            labels[number] = Label(name, value)
        self.decoder.add(token)
        return labels

    @staticmethod
    def _name(value: bytes) -> str | None:
        try:
            return value.decode() or None
        except UnicodeDecodeError:
            return None


def _last_bytes(pieces: TokenBytes, ids: Sequence[int]) -> bytes:
    """As many bytes at the end of tokens as tell whether the last character is complete."""
    value = b""
    for token in reversed(ids):
        value = pieces.value(token) + value
        if len(value) > 3:
            break
    return value


def _spaces(value: bytes) -> int:
    return len(value) - len(value.lstrip(b" "))


def _pieces(tokenizer: Tokenizer) -> TokenBytes | None:
    if isinstance(tokenizer, ByteTokenizer):
        return TokenBytes(lambda token: bytes((token,)) if 0 <= token < 256 else b"", lambda _: 0)
    if isinstance(tokenizer, TiktokenTokenizer):
        return TokenBytes(tokenizer.value, lambda _: 0)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _sentencepiece(tokenizer)
    return _hugging_face(tokenizer) if isinstance(tokenizer, HuggingFaceTokenizer) else None


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> TokenBytes:
    backend, size = tokenizer.backend, tokenizer.vocab_size
    unknown = str(backend.decode([backend.unk_id()])).encode()

    @cache
    def value(token: int) -> bytes:
        if not 0 <= token < size or backend.is_control(token):
            return b""
        if backend.is_unknown(token):
            return unknown
        piece = str(backend.id_to_piece(token))
        return (
            bytes((int(piece[3:5], 16),)) if backend.is_byte(token) else piece.replace(_SPACE, " ").encode()
        )

    def leading(token: int) -> int:
        return int(str(backend.id_to_piece(token)).startswith(_SPACE)) if 0 <= token < size else 0

    # What decoding removes is tried: the package does not say. Where no token is nothing but a space, one
    # space is all that it can remove.
    lone, *_ = [*(n for n in range(size) if str(backend.id_to_piece(n)) == _SPACE), None]
    spaced, *_ = [*(n for n in range(size) if leading(n) and n != lone), None]
    removed = 0
    if lone is not None:
        removed = {3: 0, 2: 1}.get(len(backend.decode([lone] * 3)), _UNLIMITED)
    elif spaced is not None:
        removed = int(not str(backend.decode([spaced])).startswith(" "))
    return TokenBytes(value, leading, removed, byte_by_byte=True, unknown=backend.unk_id())


def _hugging_face(tokenizer: HuggingFaceTokenizer) -> TokenBytes | None:
    backend = tokenizer.backend
    steps = list(_steps(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None))
    kinds = tuple(str(step.get("type")) for step in steps)
    special = frozenset(tokenizer.specials.values())
    if kinds == ("ByteLevel",):
        as_bytes: Callable[[str], bytes] = _of_byte_level
    elif kinds == ("Metaspace",):
        replacement = str(steps[0].get("replacement", _SPACE))
        as_bytes = lambda token: token.replace(replacement, " ").encode()  # noqa: E731
    elif (replaced := _replaced(steps)) is not None:
        as_bytes = replaced
    else:
        return None

    @cache
    def value(token: int) -> bytes:
        piece = None if token in special or token < 0 else backend.id_to_token(token)
        return b"" if piece is None else as_bytes(piece)

    def leading(token: int) -> int:
        return _spaces(value(token))

    unknown = _unknown(backend)
    if kinds == ("Metaspace",):

        def first(token: int) -> bytes:
            piece = None if token in special or token < 0 else backend.id_to_token(token)
            return b"" if piece is None else str(piece).replace(replacement, "").encode()

        differs = steps[0].get("prepend_scheme", "always") != "never"
        return TokenBytes(value, leading, int(differs), first if differs else None, unknown=unknown)
    removed = sum(int(step["start"]) for step in steps if step["type"] == "Strip")
    return TokenBytes(value, leading, removed, byte_by_byte="ByteFallback" in kinds, unknown=unknown)


def _unknown(backend: Any) -> int | None:
    """The id for text that no token covers."""
    model = backend.model
    text = getattr(model, "unk_token", None)
    number = getattr(model, "unk_id", None) if text is None else backend.token_to_id(text)
    return number if isinstance(number, int) else None


def _steps(decoder: Any) -> Iterable[dict[str, Any]]:
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            for step in decoder.get("decoders", ()):
                yield from _steps(step)
        else:
            yield decoder


def _of_byte_level(token: str) -> bytes:
    """Every character stands for one byte, unless one of them stands for none."""
    bytes_of = byte_characters()
    if all(character in bytes_of for character in token):
        return bytes(bytes_of[character] for character in token)
    return token.encode()


def _replaced(steps: Sequence[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """The bytes that a token adds where a decoder replaces texts and takes ``<0x0A>`` for bytes, before it
    joins tokens and removes spaces at the beginning; None: it does something else."""
    kinds = [str(step.get("type")) for step in steps]
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    if not kinds or any(kind not in order for kind in kinds):
        return None
    if [order.index(kind) for kind in kinds] != sorted(order.index(kind) for kind in kinds):
        return None
    for step in steps:
        if step["type"] == "Replace" and not isinstance(step.get("pattern", {}).get("String"), str):
            return None
        if step["type"] == "Strip" and (step["content"] != " " or step["stop"] or "Fuse" not in kinds):
            return None
    pairs = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    bytes_too = "ByteFallback" in kinds

    def value(token: str) -> bytes:
        for old, new in pairs:
            token = token.replace(old, new)
        if bytes_too and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes((int(token[3:5], 16),))
        return token.encode()

    return value
