"""Tokens that files beside a vocabulary name: ``tokenizer_config.json``, ``special_tokens_map.json`` and
``added_tokens.json``, read as ``transformers`` 5 reads them. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hexad.config.errors import HexadError, one_line
from hexad.config.files import read_json

_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TOKEN_FILES = (_CONFIG, _MAP, _ADDED)
_DECODER = "added_tokens_decoder"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class DeclaredToken:
    """A token that a file names.

    Attributes:
        content: its text.
        file: the name of the file that gives its id; empty where none does.
        number: its id; None where the file has none.
        flags: such as ``special`` and ``lstrip``.
    """

    content: str
    file: str
    number: int | None = None
    flags: Mapping[str, bool] = field(default_factory=dict)


def tokenizer_settings(directory: Path) -> dict[str, Any]:
    """The settings in ``tokenizer_config.json`` and ``special_tokens_map.json`` beside a tokenizer. Those of
    the latter replace others unless the former lists all added tokens.

    Raises:
        HexadError: one of them is not JSON.
    """
    config, mapped = _read(directory / _CONFIG), _read(directory / _MAP)
    return {**mapped, **config} if _DECODER in config else {**config, **mapped}


def declared_tokens(directory: Path) -> list[DeclaredToken]:
    """The tokens in the files beside a tokenizer, in the order in which they are added to its vocabulary.

    Raises:
        HexadError: a file is not JSON, or does not describe tokens.
    """
    config, mapped = _read(directory / _CONFIG), _read(directory / _MAP)
    try:
        if _DECODER in config:  # all added tokens are there
            named, unnamed = _named(config), _unnamed(config)
            numbered = [_token(entry, _CONFIG, int(key)) for key, entry in config[_DECODER].items()]
        else:
            named = {**_named(config), **_named(mapped)}
            unnamed = [*_unnamed(config), *_unnamed(mapped, _LISTS[:1])]
            special = {_token(value).content for value in (*named.values(), *unnamed)}
            unnamed = unnamed or _unnamed(mapped)
            numbered = [
                DeclaredToken(text, _ADDED, int(number), _added_flags(text in special))
                for text, number in _read(directory / _ADDED).items()
            ]
        usual = [named.pop(name) for name in _NAMES if name in named]
        others = (_token(value) for value in (*usual, *named.values(), *unnamed))
        tokens: dict[str, DeclaredToken] = {}
        for token in (*sorted(numbered, key=lambda token: token.number or 0), *others):
            tokens.setdefault(token.content, token)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise HexadError(f"{directory}: its files do not describe tokens: {one_line(error)}") from None
    return list(tokens.values())


def token_text(value: Any) -> Any:
    """The text of a token that a setting names, as text or as an object."""
    return value.get("content") if isinstance(value, dict) else value


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that settings name, by the name."""
    named = {
        name: value
        for name, value in settings.items()
        if name in _NAMES or (name.endswith("_token") and isinstance(value, str))
    }
    lists = (settings[name] for name in _LISTS if isinstance(settings.get(name), dict))
    return named | next(lists, {})


def _unnamed(settings: Mapping[str, Any], lists: Sequence[str] = _LISTS) -> list[Any]:
    """The special tokens that are only listed."""
    values: Any = next((settings[name] for name in lists if settings.get(name)), [])
    return [] if isinstance(values, dict) else list(values)


def _token(value: Any, file: str = "", number: int | None = None) -> DeclaredToken:
    if isinstance(value, str):
        return DeclaredToken(value, file, number, {"special": True})
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    if number is None:
        flags["special"] = True
    return DeclaredToken(str(value["content"]), file, number, flags)


def _added_flags(special: bool) -> dict[str, bool]:
    return {"special": special, "normalized": not special}


def _read(path: Path) -> dict[str, Any]:
    """The entries of a JSON object that are not null; none where there is no file."""
    try:
        content = read_json(path)
        return {key: value for key, value in content.items() if value is not None}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise HexadError(f"{path}: not readable as JSON: {one_line(error)}") from None
