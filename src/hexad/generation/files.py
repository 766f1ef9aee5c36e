"""Prompts in a file, a JSON object on each line, and the texts that a model has written after them in
another, which an interrupted generation continues. No torch.

A row of the output has the keys of its prompt's row, and ``text``, ``tokens``, ``ended``; ``sample`` where
there are several, ``logprobs``, ``prompt_logprobs`` and ``routing`` where they were asked for. ``request``
is a digest of the prompt's place in its file, the prompt, the settings and the sample: rows whose digest is
there already are not computed again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hexad.config import HexadError, json_text, one_line
from hexad.config.files import readable
from hexad.dataset.files import acquire

from .prompts import form_of
from .requests import Logprob
from .sampling import CHOICE_SETTINGS, Sampling, settings
from .texts import Continuation


def read_prompts(file: str) -> Iterator[dict[str, Any]]:
    """The lines of a file of prompts; ``-`` is stdin.

    Raises:
        HexadError: it cannot be read, or a line is malformed.
    """
    name = "stdin" if file == "-" else file
    try:
        with sys.stdin if file == "-" else readable(file).open(encoding="utf-8", newline="\n") as lines:
            yield from parse_prompts(lines, name)
    except (OSError, UnicodeDecodeError) as error:
        raise HexadError(f"``prompts``: {name}: cannot be read: {one_line(error)}") from None


def parse_prompts(lines: Iterator[str] | Any, name: str) -> Iterator[dict[str, Any]]:
    """The prompts of lines that end at line feeds only; other separators may stand inside a JSON string."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise HexadError(f"``prompts``: {name}:{number}: not JSON: {error}") from None
        try:
            form_of(entry)
        except HexadError as error:
            raise HexadError(f"``prompts``: {name}:{number}: {error}") from None
        yield entry


def row(prompt: Mapping[str, Any], text: Continuation, sampling: Sampling) -> dict[str, Any]:
    """The object that is written for a text."""
    document = {**prompt, "text": text.text, "tokens": text.tokens, "ended": text.ended}
    if sampling.samples > 1:
        document["sample"] = text.sample
    if text.logprobs is not None:
        document["logprobs"] = _values(text.logprobs, sampling.logprobs)
    if text.prompt_logprobs is not None:
        document["prompt_logprobs"] = _values(text.prompt_logprobs, sampling.prompt_logprobs)
    if text.routing is not None:
        document["routing"] = {name: array.tolist() for name, array in text.routing._asdict().items()}
    return document


def _values(logprobs: Sequence[Logprob], count: int | None) -> list[Any]:
    """Numbers, or with several tokens of each place, objects."""
    if not count:
        return [logprob.value for logprob in logprobs]
    return [
        {"token": logprob.token, "value": logprob.value, "top": [list(pair) for pair in logprob.top]}
        for logprob in logprobs
    ]


def digest(place: int, prompt: Mapping[str, Any], sample: int, model: str, sampling: Sampling) -> str:
    """The digest of a text to be written."""
    content = json.dumps([place, prompt, sample, model, _changed_settings(sampling)], sort_keys=True)
    return blake2b(content.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def _changed_settings(sampling: Sampling) -> str:
    """The settings that are not at their defaults, in a form that never changes: files outlive versions, also
    those that know fewer settings."""
    default = Sampling()
    changed = {
        name: repr(value)
        for name in settings()
        if (value := getattr(sampling, name)) != getattr(default, name)
    }
    if changed.keys() & set(CHOICE_SETTINGS):
        values = (f"{name}={getattr(sampling, name)!r}" for name in CHOICE_SETTINGS)
        changed["sampling"] = f"Sampling({', '.join(values)})"
    names = ["tokens", "sampling", *(name for name in settings() if name not in ("tokens", *CHOICE_SETTINGS))]
    return "{" + ", ".join(f"{name!r}: {changed[name]}" for name in names if name in changed) + "}"


class TextFile:
    """The file that texts are added to as they end. Used as a context manager; one process writes it.

    Attributes:
        known: digests of the texts that it has.

    Args:
        path: of the file; made if it does not exist.

    Raises:
        HexadError: it cannot be read or written, has other contents, or another process writes it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.known: set[str] = set()
        self._complete = 0  # bytes of complete lines
        try:
            self._file = open(self._path, "ab+")  # noqa: SIM115 (closed by __exit__)
            if acquire(self._file, 0.0) is False:
                problem = "another process adds texts to it; wait until that has ended, or give another file"
                raise HexadError(f"``output``: {self._path}: {problem}")
            self._read()
        except OSError as error:
            raise self._unwritable(error) from None

    def _read(self) -> None:
        """Read the digests; what an interrupted process has written of a last line does not count."""
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            complete = line.endswith(b"\n")
            try:
                row = json.loads(line)
                if complete:
                    self.known.add(row["request"])
                    self._complete += len(line)
                    continue
            except (ValueError, KeyError, TypeError, RecursionError):
                if not complete and line.startswith(b'{"'):
                    return
            problem = "not a line that 'hexad generate' has written; give another file"
            raise HexadError(f"``output``: {self._path}:{number}: {problem}")

    def check(self, digests: set[str]) -> None:
        """Check that the file has no texts but those of some digests, and remove an incomplete last line.

        Raises:
            HexadError: some belong to other prompts, settings, or another model.
        """
        if other := len(self.known - digests):
            raise HexadError(
                f"``output``: {self._path}: {other} of its {len(self.known)} texts belong to other prompts "
                "or settings; give another file, or remove it"
            )
        self._file.truncate(self._complete)

    def add(self, document: Mapping[str, Any], request: str) -> None:
        """Write a line.

        Raises:
            HexadError: it cannot be written.
        """
        try:
            line = json_text({**document, "request": request}, ensure_ascii=False)
            self._file.write(line.encode(errors="backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None
        self.known.add(request)

    def __enter__(self) -> TextFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            if kind is None:
                raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> HexadError:
        return HexadError(f"``output``: {self._path}: cannot be written: {one_line(error)}")
