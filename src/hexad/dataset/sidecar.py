"""``PREFIX.hexad.json``: facts about a dataset beside Megatron's two files, and their checksums.

:class:`.indexed.IndexedWriter` writes it. What it records is checked at the start of a run; without it (data
of other tools), token ids are checked as they are read. It begins with a checksum of itself, and has a
fingerprint of the data: beside other data it is an error, so that neither damage nor exchanged files go
unnoticed. (The name is not ``PREFIX.json``, which may be the user's own input.)
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash
from pydantic import ConfigDict, TypeAdapter

from hexad.config.errors import HexadError

from .files import appearing_whole, reporting, sampled_hash
from .masks import mask_path


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
        bos: ids before each document; None if not known.
        mask: hash of the loss mask beside the data (``PREFIX.mask``); None where all tokens are trained.
        chat_templates: those of its conversations, as :attr:`.text.chat.ChatTemplate.named`; None where there
            are no conversations.
        checksums: XXH3-128 of each file (``.bin``, ``.idx``, ``.mask``) as it was written; None if an earlier
            version of Hexad has built the data.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # of what is read from a file

    fingerprint: str
    documents: int
    tokens: int
    max_token: int
    dtype: str
    bin_bytes: int
    tokenizer: str | None = None
    vocab: int | None = None
    eod: int | None = None
    bos: Sequence[int] | None = None
    mask: str | None = None
    chat_templates: Mapping[str, str] | None = None
    checksums: Mapping[str, str] | None = None


_SIDECAR = TypeAdapter(Sidecar)


def bin_path(prefix: str | Path) -> Path:
    """``PREFIX.bin``."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """``PREFIX.idx``."""
    return Path(f"{prefix}.idx")


def sidecar_path(prefix: str | Path) -> Path:
    """``PREFIX.hexad.json``."""
    return Path(f"{prefix}.hexad.json")


def fingerprint(prefix: str | Path) -> str:
    """A hash of the sizes and of parts of both files; independent of names and times."""
    return sampled_hash(idx_path(prefix), bin_path(prefix))


def identity(prefix: str | Path) -> str:
    """The :func:`fingerprint`, with the loss mask if there is one: all ranks of a run must have the same."""
    mask = mask_path(prefix)
    return sampled_hash(idx_path(prefix), bin_path(prefix), *([mask] if mask.is_file() else []))


def stored_sidecar(prefix: str | Path) -> Sidecar | None:
    """The content of ``PREFIX.hexad.json``, whatever data are beside it; None where there is none.

    Raises:
        HexadError: it is damaged.
    """
    path = sidecar_path(prefix)
    if not os.path.isfile(path):  # False for a name that is too long, too
        return None
    with reporting(path):
        return _decoded(path.read_bytes(), path)


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """The dataset's sidecar, or None where there is none.

    Raises:
        HexadError: it is damaged, or belongs to other data.
    """
    sidecar, path = stored_sidecar(prefix), sidecar_path(prefix)
    if sidecar is not None and sidecar.fingerprint != fingerprint(prefix):
        raise HexadError(
            f"{bin_path(prefix)} and .idx: not the data that {path.name} was written for: damaged, or "
            f"replaced by others; build or copy all files of {prefix} again, or remove {path.name} if other "
            "data were written on purpose"
        )
    return sidecar


_BEGIN, _HEX = '{\n  "xxh3_128": "', 32


def _guarded(body: bytes) -> bytes:
    """The content of a sidecar: ``body`` is all of a JSON object but its first brace."""
    return _BEGIN.encode() + xxhash.xxh3_128_hexdigest(body).encode() + b'",' + body


def _decoded(content: bytes, path: Path) -> Sidecar:
    body, guarded = content[1:], content.startswith(_BEGIN.encode())
    if guarded:
        body = content[len(_BEGIN) + _HEX + 2 :]
    try:
        if guarded and _guarded(body) != content:
            raise ValueError
        return _SIDECAR.validate_json(b"{" + body)
    except ValueError:  # pydantic's errors too
        raise HexadError(
            f"{path}: damaged, or of another version of Hexad; build or copy the data again, or remove this "
            "file (token ids are then checked as they are read)"
        ) from None


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Write ``PREFIX.hexad.json``, atomically.

    Raises:
        OSError: the directory cannot be written.
    """
    text = json.dumps(asdict(sidecar), indent=2) + "\n"
    with appearing_whole(sidecar_path(prefix)) as stream:
        stream.write(_guarded(text.encode()[1:]))


def chat_templates(data: Iterable[str]) -> Mapping[str, str] | None:
    """The chat templates of the conversations in some data sets; None where none are recorded.

    Raises:
        HexadError: two data sets have different ones: a model is kept with one.
    """
    first, templates = "", None
    for prefix in data:
        built = read_sidecar(prefix)
        if built is None or built.chat_templates is None:
            continue
        if templates is not None and built.chat_templates != templates:
            raise HexadError(
                f"found {first} and {prefix}, whose conversations have different chat templates; build one "
                "of them again with that of the other (``chat_template`` FILE)"
            )
        first, templates = prefix, built.chat_templates
    return templates
