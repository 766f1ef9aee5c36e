"""Text to token ids and back: bytes, Hugging Face, SentencePiece, tiktoken. Nothing here imports torch."""

from __future__ import annotations

import base64
import binascii
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexad.config.errors import HexadError, one_line
from hexad.config.files import read_bounded

from .hostile_tokenizer import LARGEST_FILE, LARGEST_ID, check_content, check_ids, check_loaded, failures
from .special_tokens import declared_tokens, token_text, tokenizer_settings

Ids = NDArray[np.int32]


class Offsets(NamedTuple):
    """The tokens of a text and where they are in it.

    Attributes:
        ids: int32 ``[length]``.
        begin, end: int32 ``[length]``, in characters of the text. Tokens that are parts of one character all
            have its place.
    """

    ids: Ids
    begin: Ids
    end: Ids

    def within(self, spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
        """Mask of the tokens that have a character in one of some (start, stop) ranges, bool ``[length]``."""
        inside = np.zeros(len(self.ids), dtype=np.bool_)
        for start, stop in spans:
            inside |= (self.end > start) & (self.begin < stop)
        return inside


END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>")
"""Usual names of an end-of-document token, tried in this order where the tokenizer's files name none."""

_ACCEPTED = (
    "expected 'byte', a directory with tokenizer.json or tokenizer.model, a Hugging Face .json, "
    "a SentencePiece .model or a .tiktoken file"
)


class Tokenizer(ABC):
    """Interface of every tokenizer.

    Attributes:
        name: argument with which :func:`load_tokenizer` loads it.
        kind: description of its files.
        vocab_size: ids are below this.
        eod: id of the end-of-document token, or None. ``encode`` never adds it, nor any other special token.
        bos: ids that it puts before each text, most often of one beginning-of-text token, or none.
        begin: id of the beginning-of-text token, whether it puts it there or not, or None.
        specials: the ids of special tokens by their text.
    """

    name: str
    kind: str
    vocab_size: int
    eod: int | None
    bos: tuple[int, ...] = ()
    begin: int | None = None
    specials: dict[str, int]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; text equal to the end-of-document token is handled as the file defines."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, int32 ``[length]``."""
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]

    def encode_offsets(self, texts: Sequence[str]) -> list[Offsets]:
        """The ids of each text, and the characters each of them stands for."""
        return [self._offsets(text) for text in texts]

    @abstractmethod
    def _offsets(self, text: str) -> Offsets:
        """The ids of a text, and the characters each of them stands for."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids`` without special tokens; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8, and 256 for the end of a document."""

    name = "byte"
    kind = "bytes of UTF-8"
    vocab_size = 257
    eod = 256
    specials: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def _offsets(self, text: str) -> Offsets:
        begin = _characters(text)[:-1]
        (ids,) = self.encode_batch([text])
        return Offsets(ids, begin, begin + np.int32(1))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``, through the ``tokenizers`` package.

    Args:
        file: the ``tokenizer.json``. Tokens that files beside it name (:mod:`.special_tokens`) are added as
            ``transformers`` 5 adds them; ``eos_token`` is the end-of-document token, else :data:`END_NAMES`
            are tried. Its post-processor alone defines what stands before each text.
        name: as the user gave it.

    Raises:
        HexadError: the file is not a tokenizer, or files beside it name a token with another id.
    """

    kind = "Hugging Face"

    def __init__(self, file: Path, name: str) -> None:
        self.name = name
        with failures(lambda: f"{file}: not a Hugging Face tokenizer.json", quiet=True):
            self._load(file)

    def _load(self, file: Path) -> None:
        from tokenizers import Tokenizer as Backend

        content = read_bounded(file, LARGEST_FILE)
        check_content(file, content)
        self.backend = Backend.from_str(content.decode())
        del content
        # Files saved after use may contain limits that would truncate documents.
        self.backend.no_truncation()
        self.backend.no_padding()
        self._add_declared(file)
        # The largest id, not the count: vocabularies may have gaps.
        self.vocab_size = max(check_loaded(file, self.backend).values(), default=-1) + 1
        named = _declared(file.parent, "eos_token")
        ids = (self.backend.token_to_id(end) for end in ([named] if named else END_NAMES))
        self.eod: int | None = next((i for i in ids if i is not None), None)
        encoding = self.backend.encode("a", add_special_tokens=True)
        mask = encoding.special_tokens_mask
        self.bos = tuple(encoding.ids[: mask.index(0) if 0 in mask else 0])
        begin = _declared(file.parent, "bos_token")
        self.begin = self.backend.token_to_id(begin) if begin else None
        added = self.backend.get_added_tokens_decoder()
        self.specials = {token.content: number for number, token in sorted(added.items()) if token.special}
        # Without special tokens it changes nothing but offsets, from which it takes spaces.
        self.backend.post_processor = None

    def _add_declared(self, file: Path) -> None:
        """Add the tokens that only files beside the vocabulary name, as ``transformers`` does."""
        from tokenizers import AddedToken

        present = {token.content: token for token in self.backend.get_added_tokens_decoder().values()}
        missing = []
        for declared in declared_tokens(file.parent):
            token = AddedToken(declared.content, **declared.flags)
            listed = declared.number is not None and repr(present.get(token.content)) != repr(token)
            if token.content not in present or listed:
                missing.append(token)
        self.backend.add_tokens(missing)
        _check_declared(file, self.backend.token_to_id)

    def encode(self, text: str) -> list[int]:
        # Not encode(), during which no other thread runs.
        with failures(self._encoding):
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        with failures(self._encoding):
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_offsets(self, texts: Sequence[str]) -> list[Offsets]:
        with failures(self._encoding):
            return list(map(_of_encoding, self.backend.encode_batch(list(texts), add_special_tokens=False)))

    def _offsets(self, text: str) -> Offsets:
        return self.encode_offsets([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if 0 <= int(i) <= LARGEST_ID]
        with failures(lambda: f"tokenizer {self.name}: cannot decode tokens"):
            return str(self.backend.decode(known, skip_special_tokens=True))

    def _encoding(self) -> str:
        return f"tokenizer {self.name}: cannot encode this text"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model``; end of document is its end-of-sentence piece, if it has one.

    Its beginning-of-sentence piece stands before each text if ``tokenizer_config.json`` beside it has
    ``add_bos_token``.
    """

    kind = "SentencePiece"

    def __init__(self, file: Path, name: str) -> None:
        backend = _extra("sentencepiece", f"{file} is a SentencePiece model")
        try:
            self.backend: Any = backend.SentencePieceProcessor(model_file=str(file))
        except Exception as error:
            raise HexadError(f"{file}: not a SentencePiece model: {one_line(error)}") from None
        self.name = name
        self.vocab_size = int(self.backend.get_piece_size())
        pieces = {str(self.backend.id_to_piece(number)): number for number in range(self.vocab_size)}
        _check_declared(file, pieces.get)
        named = _declared(file.parent, "eos_token")
        end = int(self.backend.eos_id()) if named is None else pieces[named]
        self.eod = end if end >= 0 else None
        begin = int(self.backend.bos_id())
        self.begin = begin if begin >= 0 else None
        puts_begin = tokenizer_settings(file.parent).get("add_bos_token")
        self.bos = (begin,) if begin >= 0 and puts_begin else ()
        controls = (number for number in range(self.vocab_size) if self.backend.is_control(number))
        self.specials = {str(self.backend.id_to_piece(number)): number for number in controls}

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(ids, dtype=np.int32) for ids in self.backend.encode(list(texts))]

    def _offsets(self, text: str) -> Offsets:
        pieces = self.backend.encode(text, return_type="proto").pieces  # with offsets in bytes
        table = np.array([[piece.id, piece.begin, piece.end] for piece in pieces], dtype=np.int32)
        ids, begin, end = table.reshape(-1, 3).T.copy()
        # Of the bytes of one character, the last has the character's place, the others have none.
        for number in range(len(pieces) - 2, -1, -1):
            if begin[number] == end[number] and self.backend.is_byte(pieces[number].id):
                begin[number], end[number] = begin[number + 1], end[number + 1]
        character = _characters(text)
        return Offsets(ids, character[begin], character[np.maximum(end, 1) - 1] + (end > begin))

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids]))


# Llama 3's split pattern and special tokens (meta-llama/llama3, llama/tokenizer.py).
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
_LLAMA3_SPECIALS = 256
# Llama 3 encodes runs of white space, and of anything else, in parts of 25,000 characters; the regular
# expression fails on a million.
_RUN = 25_000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_RUN + 1},}}|(?<!\s)\s{{{_RUN + 1},}}")


class TiktokenTokenizer(Tokenizer):
    """A tiktoken rank file (lines of base64 token and rank) with Llama 3's split pattern.

    Llama 3's 256 special tokens follow the ranks: ``<|begin_of_text|>``, ``<|end_of_text|>`` (the end of a
    document), and so on. Rank files of other models are split as Llama 3 would.
    """

    kind = "tiktoken"

    def __init__(self, file: Path, name: str) -> None:
        tiktoken = _extra("tiktoken", f"{file} is a tiktoken rank file")
        ranks = _read_ranks(file)
        check_ids(file, ranks)
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise HexadError(f"{file}: not a tiktoken file: it has no rank for the byte 0x{missing[0]:02x}")
        first = max(ranks.values()) + 1
        reserved = (f"<|reserved_special_token_{number}|>" for number in count())
        names = (_LLAMA3_NAMED.get(number) or next(reserved) for number in range(_LLAMA3_SPECIALS))
        specials = dict(zip(names, count(first)))
        with failures(lambda: f"{file}: not a tiktoken file", quiet=True):
            self.backend: Any = tiktoken.Encoding(
                file.stem, pat_str=_LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=specials
            )
        self.name = name
        self._first_special = first
        self.begin = specials[_declared(file.parent, "bos_token") or "<|begin_of_text|>"]
        self.vocab_size = first + _LLAMA3_SPECIALS
        _check_declared(file, specials.get)
        self.eod = specials[_declared(file.parent, "eos_token") or "<|end_of_text|>"]
        self.specials = specials

    def encode(self, text: str) -> list[int]:
        cuts = [cut for run in _LONG_RUN.finditer(text) for cut in range(run.start() + _RUN, run.end(), _RUN)]
        bounds = pairwise((0, *cuts, len(text)))
        with failures(lambda: f"tokenizer {self.name}: cannot encode this text"):
            return [token for begin, end in bounds for token in self.backend.encode_ordinary(text[begin:end])]

    def _offsets(self, text: str) -> Offsets:
        ids, character = self.encode(text), _characters(text)
        bounds = np.cumsum([0, *map(len, self.backend.decode_tokens_bytes(ids))])  # in bytes
        begin, end = character[bounds[:-1]], character[bounds[1:] - 1] + np.int32(1)
        return Offsets(np.array(ids, dtype=np.int32), begin, end)

    def value(self, token: int) -> bytes:
        """The bytes that a token stands for; none of a special one."""
        ordinary = 0 <= token < self._first_special
        return bytes(self.backend.decode_single_token_bytes(token)) if ordinary else b""

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.value, ids)).decode(errors="replace")


def _of_encoding(encoding: Any) -> Offsets:
    """Ids and offsets of an encoding of the ``tokenizers`` package."""
    places = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    return Offsets(np.array(encoding.ids, dtype=np.int32), places[:, 0], places[:, 1])


def _characters(text: str) -> Ids:
    """The number of the character that each byte of UTF-8 belongs to, and of one after the last."""
    raw = np.frombuffer(text.encode() + b"\n", dtype=np.uint8)
    # Every byte that does not continue a character begins one.
    return np.cumsum((raw & 0xC0) != 0x80, dtype=np.int32) - np.int32(1)


def bos_ids(tokenizer: Tokenizer, setting: str) -> list[int]:
    """The ids before each document and prompt by ``data.bos``; ``auto``: the tokenizer's."""
    return list(tokenizer.bos) if setting == "auto" else []


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer named by ``data.tokenizer`` or ``--tokenizer``.

    Args:
        spec: ``byte``; a directory with ``tokenizer.json`` or ``tokenizer.model``; or such a file itself
            (``.json``, ``.model``, ``.tiktoken``). Llama 3's ``tokenizer.model`` is recognised as tiktoken's.

    Raises:
        HexadError: there is no such file, it is not a tokenizer, or its package is not installed.
    """
    path = vocabulary_file(spec)
    if path is None:
        return ByteTokenizer()
    name = str(Path(spec).resolve())
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path, name)
    if _has_ranks(path):
        return TiktokenTokenizer(path, name)
    if path.suffix == ".tiktoken":
        raise HexadError(f"{path}: not a tiktoken file: expected lines of a base64 token and its rank")
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, name)
    raise HexadError(f"tokenizer '{spec}': unknown kind of file '{path.name}'; {_ACCEPTED}")


def vocabulary_files(directory: Path) -> list[Path]:
    """The files that make a directory a tokenizer (``data.tokenizer``); the first is used."""
    patterns = "tokenizer.json", "tokenizer.model", "*.tiktoken"
    return [file for pattern in patterns for file in sorted(directory.glob(pattern)) if file.is_file()]


def vocabulary_file(spec: str) -> Path | None:
    """The file with a tokenizer's vocabulary; None for ``byte``."""
    if spec == "byte":
        return None
    path = Path(spec)
    if os.path.isfile(spec):  # False for a name that is too long, too
        return path
    if not os.path.isdir(spec):
        raise HexadError(f"tokenizer '{spec}': no such file or directory; {_ACCEPTED}")
    if files := vocabulary_files(path):
        return files[0]
    raise HexadError(
        f"tokenizer '{path}': the directory has no tokenizer.json, tokenizer.model or .tiktoken file; "
        "save it with transformers' AutoTokenizer(...).save_pretrained"
    )


def _declared(directory: Path, name: str) -> str | None:
    """The token that the files beside a tokenizer name, such as ``eos_token``."""
    text = token_text(tokenizer_settings(directory).get(name))
    return text if isinstance(text, str) else None


def _check_declared(file: Path, known: Callable[[str], int | None]) -> None:
    """Refuse tokens that files beside a vocabulary name and it does not have, or has with another id.

    Raises:
        HexadError: naming the first.
    """
    for token in declared_tokens(file.parent):
        number = known(token.content)
        if number is None or token.number not in (None, number):
            named = f"{token.file or 'a file there'} names the token {token.content!r}"
            named += "" if token.number is None else f" with id {token.number}"
            has = "does not have" if number is None else f"has with id {number}"
            raise HexadError(
                f"{file.parent}: {named}, which {file.name} {has}; save a tokenizer.json with transformers' "
                "AutoTokenizer(...).save_pretrained, or correct that file"
            )


def _has_ranks(path: Path) -> bool:
    with path.open("rb") as stream:
        return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", stream.read(4096)) is not None


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bounded(file, LARGEST_FILE).splitlines(), 1):
        try:
            token, digits = line.split()
            rank = int(digits)
            if rank < 0:
                raise ValueError
            ranks[base64.b64decode(token, validate=True)] = rank
        except (ValueError, binascii.Error):
            if line.strip():
                raise HexadError(f"{file}:{number}: expected a base64 token and its rank") from None
    return ranks


def _extra(package: str, why: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise HexadError(f"{why}, which needs a package: pip install 'hexad[{package}]'") from None


BYTE_END = "<|endoftext|>"
"""Its end-of-document token, whose id is 256."""


@lru_cache(maxsize=1)
def byte_characters() -> Mapping[str, int]:
    """The bytes of the characters that byte-level tokenizers write for them."""
    from tokenizers import pre_tokenizers

    # Bytes without a visible character have the characters from 256 on, in order.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = map(chr, range(256, 512))
    return {chr(byte) if chr(byte) in alphabet else next(others): byte for byte in range(256)}


def byte_backend() -> Any:
    """The ``byte`` tokenizer in the ``tokenizers`` package: the 256 values, then :data:`BYTE_END`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE(vocab=dict(byte_characters()), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BYTE_END, special=True)])
    return backend
