"""Checks of what a ``tokenizer.json`` asks for, and its library's failures as errors of one line. No torch.

The library is written in Rust. Where a file contradicts itself it may *panic*, when it is loaded or only for
some texts: the exception is no ``Exception``, and Rust writes a message of its own to the standard error.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from hexad.config.errors import HexadError, one_line

LARGEST_FILE = 512 << 20
"""Bytes of a tokenizer's file; published ones have up to 40 MB. In memory it takes some ten times as much."""
LARGEST_ID = (1 << 24) - 1
"""Largest id of a token: the vocabulary's size follows from it, and the embedding has a row for each."""
LONGEST_TOKEN = 4096
"""Characters of a token: models of language search the longest one at every character of a text."""
_LONGEST_WORD = 1000
"""Characters of a word for WordPiece, whose time grows with their cube; published models have 100 or 200."""
_EXPANSION = 64
"""Characters that one character may become. NFKC makes at most 18."""
_PROBE = 64
"""Characters on which a regular expression with repeated groups is tried."""
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([A-Za-z0-9+/]{6})([^"]*)"')
_REPEATED_GROUP = re.compile(r"\)[*+{]")


@contextmanager
def failures(doing: Callable[[], str], quiet: bool = False) -> Iterator[None]:
    """Report a failure of the library as an error.

    Args:
        doing: returns the beginning of its message.
        quiet: keep Rust's message from the standard error, which is replaced meanwhile.

    Raises:
        HexadError: the library fails inside.
    """
    try:
        with _without_panics() if quiet else _unchanged():
            yield
    except HexadError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise HexadError(f"{doing()}: {one_line(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split())[:200]
        raise HexadError(f"{doing()}: its library failed: {text}") from None


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


@contextmanager
def _without_panics() -> Iterator[None]:
    """Keep what is written to the standard error, and write it after all unless there was a panic."""
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        panicked = False
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            if not panicked and (text := kept.read()):
                os.write(2, text)


def check_content(path: Path, content: bytes) -> None:
    """Refuse a file for which the library would allocate memory that it does not fill.

    Raises:
        HexadError: naming the file.
    """
    for match in _CHARSMAP.finditer(content):
        size = int.from_bytes(base64.b64decode(match[1] + b"=="), "little")
        if size > 3 * (len(match[2]) + 6) // 4:
            raise HexadError(
                f"{path}: not a Hugging Face tokenizer.json: its precompiled_charsmap is shorter than the "
                f"{size:,} bytes that it claims"
            )


def check_loaded(path: Path, backend: Any) -> dict[str, int]:
    """Refuse a tokenizer whose time or memory would not be in proportion to a text; returns its vocabulary.

    Raises:
        HexadError: naming the file and what is too large.
    """
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    check_ids(path, vocab)
    longest = getattr(backend.model, "max_input_chars_per_word", None)
    if longest is not None and longest > _LONGEST_WORD:
        raise HexadError(
            f"{path}: model.max_input_chars_per_word: found {longest}, expected at most {_LONGEST_WORD}"
        )
    states = {
        name: json.loads(part.__getstate__())
        for name in ("normalizer", "pre_tokenizer", "decoder")
        if (part := getattr(backend, name)) is not None
    }
    _check_expansion(path, backend, states)
    for name, state in states.items():
        for pattern in _patterns(state):
            if _REPEATED_GROUP.search(pattern):
                _check_pattern(path, name, pattern)
    return vocab


def check_ids(path: Path, vocab: Mapping[Any, int]) -> None:
    """Refuse a vocabulary with a token that is too long, or an id that is too large.

    Raises:
        HexadError: naming the file.
    """
    largest = max(vocab.values(), default=0)
    if largest > LARGEST_ID:
        raise HexadError(f"{path}: found the id {largest} in its vocabulary, expected at most {LARGEST_ID}")
    length = max(map(len, vocab), default=0)
    if length > LONGEST_TOKEN:
        raise HexadError(
            f"{path}: found a token of {length:,} characters, expected at most {LONGEST_TOKEN:,}"
        )


def _steps(state: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, those of sequences in their order."""
    if isinstance(state, Mapping):
        inner = next((value for value in state.values() if isinstance(value, list)), None)
        if state.get("type") == "Sequence" and inner is not None:
            for step in inner:
                yield from _steps(step)
        else:
            yield state


def _patterns(state: Any) -> Iterator[str]:
    for step in _steps(state):
        pattern = step.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
            yield pattern["Regex"]


def _check_expansion(path: Path, backend: Any, states: Mapping[str, Any]) -> None:
    """Refuse replacements that make a text many times as long, one after the other."""
    for name in ("normalizer", "decoder"):
        replacing = [step for step in _steps(states.get(name)) if step.get("type") == "Replace"]
        factor, letters = 1.0, set("a ")
        for step in replacing:
            pattern, content = step["pattern"], str(step["content"])
            text = pattern.get("String", "") if isinstance(pattern, Mapping) else str(pattern)
            factor *= max(1.0, (len(content) + 1) / max(1, len(text)))
            letters |= set((text or pattern.get("Regex", ""))[:64] + content[:64])
            if factor > 1e6:  # too long to be tried
                break
        longest = 0 if factor > 1e6 else _tried(backend, name, letters) if factor > 4 else 0
        if factor > 1e6 or longest > 4 * _EXPANSION:
            raise HexadError(
                f"{path}: {name}: its replacements make a character into more than {_EXPANSION} characters"
            )


def _tried(backend: Any, name: str, letters: Iterable[str]) -> int:
    """The length of the longest text that a normalizer or decoder makes of four equal characters."""
    apply = (
        backend.normalizer.normalize_str
        if name == "normalizer"
        else lambda text: backend.decoder.decode([text])
    )
    return max(len(apply(4 * letter)) for letter in letters)


def _check_pattern(path: Path, name: str, pattern: str) -> None:
    """Refuse a regular expression that takes time which grows exponentially: the library gives up after ten
    million steps, some texts of a few characters need them."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    letters = list(dict.fromkeys(re.sub(r"[\W_]", "", pattern)[:8] + "a1 \n."))
    split = Split(Regex(pattern), "isolated")
    for (first, second), end in product(product(letters, letters), ("", "!", "!" + "".join(letters))):
        text = (first + second) * (_PROBE // 2) + end
        with failures(lambda: f"{path}: {name}: the regular expression {pattern[:200]!r}", quiet=True):
            split.pre_tokenize_str(text)
