"""The one kind of exception that a user can cause and fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from itertools import islice
from typing import Self

_NAME = re.compile(r"``([A-Za-z_][\w.]*)``|(?<![\w-])(--[a-z][\w-]*)")
_LONGEST_NAME = 100
_LONGEST, _HEAD, _TAIL = 2000, 700, 250
USER_ERROR = 2
"""Exit status of a command that met a mistake the user can fix."""


class HexadError(Exception):
    """A mistake the user can fix: shown as one line, without a traceback, with exit status 2. Where
    a long value is quoted, the middle of the message is left out.

    Args:
        message: for the user. Names of settings and arguments that interfaces may call differently stand
            between double backticks, as Python calls them, or are flags of a launch line (``--num-layers``).
            ``str()`` leaves out the backticks, :attr:`marked` has them, :meth:`worded` puts words of an
            interface in the place of names.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_HEAD]} ... {message[-_TAIL:]}")

    def __str__(self) -> str:
        return worded(self.args[0], lambda name: name)

    @property
    def marked(self) -> str:
        """The message with double backticks around names, for a message that quotes it."""
        text: str = self.args[0]
        return text

    def worded(self, word: Callable[[str], str]) -> Self:
        """This error in the words of an interface; ``word`` gives that of a name, or the name itself."""
        error = copy(self)
        error.args = (worded(self.args[0], word), *self.args[1:])
        return error


class AgreedError(HexadError):
    """A mistake that every rank of the world knows of, so that one of them reports it.

    Args:
        message: the same on all ranks.
        kind: of the error on the rank that detected it.
    """

    def __init__(self, message: str, kind: type[HexadError] = HexadError) -> None:
        super().__init__(message)
        self.kind = kind


class ConfigError(HexadError):
    """A setting that is unknown, malformed or does not fit the others.

    Args:
        field: dotted name of the setting, such as ``parallel.tensor``.
        problem: what was found, what was expected, and how to fix it.
    """

    def __init__(self, field: str, problem: str) -> None:
        marked = f"``{field}``" if len(field) <= _LONGEST_NAME else field
        super().__init__(f"{marked if _NAME.fullmatch(marked) else field}: {problem}")
        self.field = field
        self.problem = problem

    def worded(self, word: Callable[[str], str]) -> ConfigError:
        """This error in the words of an interface, its field too."""
        error = copy(self)
        error.field, error.problem = word(self.field), worded(self.problem, word)
        error.args = (worded(self.args[0], word),)
        return error

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        # An exception is unpickled from its args, here the one message: it must cross process borders.
        return type(self), (self.field, self.problem)


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """Turn an error inside into one that names the setting which led there.

    Raises:
        ConfigError: for any :class:`HexadError` that is none yet.
    """
    try:
        yield
    except ConfigError:
        raise
    except HexadError as error:
        raise ConfigError(field, error.marked) from None


def one_line(error: Exception) -> str:
    """The text of another package's or the operating system's error, for a message. It may quote a file."""
    text = getattr(error, "strerror", None) or str(error)  # without the number that str() gives
    return shortened(" ".join(text.split())) or type(error).__name__


def shortened(text: str, most: int = 400) -> str:
    """A text, or its beginning and ``...`` where it is long."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def worded(text: str, word: Callable[[str], str]) -> str:
    """A message with the words of an interface in the place of names, see :class:`HexadError`."""
    return _NAME.sub(lambda name: word(name[1] or name[2]), text)


@contextmanager
def wording(word: Callable[[str], str]) -> Iterator[None]:
    """Raise the errors of what is inside in the words of an interface, see :meth:`HexadError.worded`."""
    try:
        yield
    except HexadError as error:
        raise error.worded(word).with_traceback(error.__traceback__) from error.__cause__


def alternatives(values: Sequence[object]) -> str:
    """``1, 2 or 4``."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def divisors(number: int) -> str:
    """``1, 2 or 4``: the divisors of ``number`` up to 64."""
    return alternatives([n for n in range(1, min(number, 64) + 1) if number % n == 0])


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``1,024 ranks``, ``2 microbatches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known word nearest to ``word``, or an empty string."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""


_MOST_SHOWN = 20
"""Elements of a list or an object in a message."""


def shown(value: object, length: int = 60, depth: int = 3) -> str:
    """The beginning of a value as Python writes it, however large the value is."""
    if isinstance(value, str | bytes):
        return repr(value[:length])[:length]
    if not isinstance(value, dict | list | tuple) or not value:
        return repr(value)[:length]
    if not depth:
        return "..."
    first = islice(value.items() if isinstance(value, dict) else value, _MOST_SHOWN)
    if isinstance(value, dict):
        parts = [f"{shown(key)}: {shown(inner, length, depth - 1)}" for key, inner in first]
    else:
        parts = [shown(inner, length, depth - 1) for inner in first]
    text = ", ".join([*parts, *["..."] * (len(value) > _MOST_SHOWN)])
    kind = dict if isinstance(value, dict) else tuple if isinstance(value, tuple) else list
    return {dict: f"{{{text}}}", tuple: f"({text})", list: f"[{text}]"}[kind][:length]
