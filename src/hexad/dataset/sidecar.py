"""``PREFIX.hexad.json``: facts about a dataset beside Megatron's two files.

What it records is checked at the start of a run; without it, token ids are checked as they are read. The file
is used only while its fingerprint matches the data, so that it is never applied to copied or rebuilt data.
(The name is not ``PREFIX.json``, which may be the user's own input.)
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from hexad.config.errors import HexadError

from .files import appearing_whole, sampled_hash
from .indexed import IndexedDataset, bin_path, idx_path
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


_SIDECAR = TypeAdapter(Sidecar)


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


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """The dataset's sidecar, or None where there is none, it is malformed, or it belongs to other data."""
    try:
        sidecar = _SIDECAR.validate_json(sidecar_path(prefix).read_bytes())
    except (OSError, ValueError):
        return None
    return sidecar if sidecar.fingerprint == fingerprint(prefix) else None


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Write ``PREFIX.hexad.json``, atomically.

    Raises:
        OSError: the directory cannot be written.
    """
    text = json.dumps(asdict(sidecar), indent=2) + "\n"
    with appearing_whole(sidecar_path(prefix)) as stream:
        stream.write(text.encode())


def describe(data: IndexedDataset, max_token: int) -> Sidecar:
    """The sidecar of an open dataset, of which nothing is known but its files."""
    return Sidecar(
        fingerprint=fingerprint(data.prefix),
        documents=data.documents,
        tokens=len(data.tokens),
        max_token=max_token,
        dtype=data.dtype.name,
        bin_bytes=data.tokens.nbytes,
        mask=None if data.mask is None else sampled_hash(data.mask.path),
    )


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
                "of them again with that of the other (--chat-template FILE)"
            )
        first, templates = prefix, built.chat_templates
    return templates


def check_mask(data: IndexedDataset, built: Sidecar) -> None:
    """Refuse data whose loss mask is not the one it was built with.

    Raises:
        HexadError: it is missing, or another one.
    """
    path = mask_path(data.prefix)
    if built.mask is None:
        return
    if data.mask is None:
        raise HexadError(
            f"{path}: missing: {data.prefix} was built with a loss mask "
            f"({sidecar_path(data.prefix).name}); copy it too, or build the data again"
        )
    if sampled_hash(path) != built.mask:
        raise HexadError(f"{path}: damaged: not what was written; build the data again, or copy it again")


def open_built(
    prefix: str,
    vocab: int | None,
    eod: int | None,
    bos: Sequence[int] | None,
    part: tuple[float, float] | None = None,
) -> IndexedDataset:
    """A dataset that fits a run by what its sidecar records; without one, only damage is found here. What is
    None is not checked.

    Args:
        prefix: of the dataset.
        vocab: refuse a token id that is not below this.
        eod: of the run's tokenizer; data built with another is refused.
        bos: ids before each document in the run; data built with others is refused.
        part: which documents to take, as fractions; None: all.

    Raises:
        HexadError: it cannot be opened, or does not fit.
    """
    data = IndexedDataset(prefix)
    if (built := read_sidecar(prefix)) is not None:
        check_mask(data, built)
        if eod is not None and built.eod not in (None, eod):
            raise HexadError(
                f"{prefix} was built with tokenizer {built.tokenizer}, whose end of document is {built.eod}, "
                f"but that of data.tokenizer is {eod}; set data.tokenizer to the same one or build the data "
                "again"
            )
        if vocab is not None and built.max_token >= vocab:
            with_ = f", built with {built.tokenizer}, vocabulary {built.vocab}" if built.tokenizer else ""
            raise HexadError(
                f"{prefix} holds token id {built.max_token} ({sidecar_path(prefix).name}{with_}), expected 0 "
                f"to {vocab - 1}; set data.tokenizer (or model.vocab) to what the data was built with"
            )
        if bos is not None and built.bos is not None and list(bos) != list(built.bos):
            raise HexadError(
                f"{prefix} was built with the ids {list(built.bos)} before each document, but data.bos and "
                f"data.tokenizer give {list(bos)}; set data.bos to {'auto' if built.bos else 'no'} or build "
                "the data again"
            )
    return data if part is None else data.part(*part)
