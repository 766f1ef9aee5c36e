"""The files beside the weights of a Hugging Face model; directories that are written atomically."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hexad.config import HexadError, counted, one_line
from hexad.config.files import read_json
from hexad.dataset.files import exclusive, reporting, write_durably
from hexad.dataset.text.tokenizer import BYTE_END, byte_backend, vocabulary_files
from hexad.model.hugging_face import CONFIG_FILE

from ..directory import make_visible

GENERATION_FILE = "generation_config.json"
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_FILE,
)
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@contextmanager
def appearing(path: Path, option: str) -> Iterator[Path]:
    """A directory to write into; it becomes ``path`` by one rename after the block, and is removed if that
    fails. Messages name the ``option`` that named it.

    Raises:
        HexadError: it exists already, cannot be written, or another process writes it.
    """
    path = path.resolve()
    partial = path.with_name(f".{path.name}.partial")
    name = f"``{option}``: {path}"
    with reporting(name, "written"):
        if path.parent.is_file():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(path, name), reporting(name, "written"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise HexadError(
                f"``{option}``: {path} exists and is not empty; remove it, or name another directory"
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            make_visible(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def check_links(directory: Path) -> None:
    """Refuse a model's directory in which a link leads out of it: a published model must not decide which
    other files of this machine are read and copied. Snapshots of the hub's cache consist of links to the
    ``blobs`` of their model, which are part of it.

    Raises:
        HexadError: naming the link and where it leads.
    """
    root = Path(os.path.realpath(directory))
    inside = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    for path in sorted(directory.rglob("*")):
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not any(target.is_relative_to(folder) for folder in inside):
            raise HexadError(
                f"{path}: a link to {target}, outside the model's directory, which is not followed; if you "
                "trust the model, put a copy of the file in place of the link"
            )


def tokenizer_files(directory: Path) -> list[Path]:
    """The files of a tokenizer, and those that belong to it."""
    names = (directory / name for name in _BESIDE)
    return [*vocabulary_files(directory), *(path for path in names if path.is_file())]


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory can be used as ``data.tokenizer``."""
    return bool(vocabulary_files(directory))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as Hugging Face does."""
    write_durably(path, _as_json(content))


def _as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def special_tokens(directory: Path | None, ends: int | list[int] | None) -> dict[str, Any]:
    """``bos_token_id`` and the like of the ``config.json`` or ``generation_config.json`` beside a
    tokenizer; if neither exists, ``ends`` end a text.

    Raises:
        HexadError: one of them is not JSON.
    """
    for path in (directory / CONFIG_FILE, directory / GENERATION_FILE) if directory is not None else ():
        if not path.is_file():
            continue
        content = _content(path)
        return {key: content.get(key) for key in SPECIAL}
    return dict.fromkeys(SPECIAL) | {"eos_token_id": ends}


def _content(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        HexadError: it holds none.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise HexadError(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise HexadError(f"{path}: cannot be read: found a {type(content).__name__}, expected an object")
    return content


def other_settings(directory: Path | None, model_type: str) -> dict[str, Any]:
    """The keys of the ``config.json`` of a model of the same type, without those that :func:`special_tokens`
    reads, and without what is not true of other weights or follows from our settings: their format and
    quantization, how positions are rotated, and each layer's kind (of as many layers as *that* model has)."""
    path = directory / CONFIG_FILE if directory is not None else None
    if path is None or not path.is_file():
        return {}
    content = _content(path)
    formats = ("dtype", "torch_dtype", "quantization_config")
    derived = ("layer_types", "original_max_position_embeddings")
    dropped = (*SPECIAL, *formats, *derived, "_name_or_path", "transformers_version")
    if content.get("model_type") != model_type:
        return {}
    return {key: value for key, value in content.items() if key not in dropped and not key.startswith("rope")}


def byte_tokenizer_files() -> dict[str, bytes]:
    """The files of the ``byte`` tokenizer, by name."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": BYTE_END,
        "clean_up_tokenization_spaces": False,
    }
    backend = byte_backend().to_str(pretty=True)
    return {"tokenizer.json": backend.encode(), "tokenizer_config.json": _as_json(settings).encode()}


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str, option: str) -> int:
    """Bytes of ``5GB``, ``200MB``, ``4GiB`` or a plain number, of at least a million.

    Raises:
        HexadError: it is none of them, or less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[KMG]I?)B?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1 or (match and not match[2] and "B" not in text.upper() and size < 10**6):
        what = f", which is {counted(size, 'byte')}" if size else ""
        raise HexadError(f"{option}: found {text!r}{what}, expected a size such as 5GB, 200MB or 4GiB")
    return size
