"""Reading the pickles of other systems' checkpoints without running code that they name.

A pickle names functions and classes, and calls them. Here tensors, numbers, texts and Python's own containers
are read, and objects of some named classes as :class:`Inert`. A file that names anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hexad.config import HexadError, one_line


class Inert:
    """A placeholder for an object of another class: its content in the file, without behaviour.

    Attributes:
        given: the arguments of its constructor.
        state: of the object: a dictionary of attributes, unless its class pickles something else.
    """

    given: tuple[Any, ...]
    state: Any

    def __new__(cls, *given: Any) -> Inert:
        """Keep the arguments of a class, or of a function, that is not called."""
        inert = super().__new__(cls)
        inert.given, inert.state = given, {}
        return inert

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def held(self) -> dict[str, Any]:
        """The attributes of the object; empty where the state is of another form."""
        return self.state if isinstance(self.state, dict) else {}


_OF_SCRIPTS = (
    "argparse.Namespace",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
)
"""What scripts add to a checkpoint: their options, and the states of NumPy's random numbers."""

_OF_ENUMS = "builtins.getattr"
"""Python 3.11.0 to 3.11.3 pickle members of enumerations by it; it is not called either."""


def load_inert(path: Path, classes: Iterable[str], content: bytes | None = None) -> Any:
    """Load a file of ``torch.save``: tensors on the CPU, in Python's containers.

    Args:
        path: of the file, which is mapped: tensors are read when they are used.
        classes: names that are read as :class:`Inert`, neither imported nor called, beside those of scripts.
        content: a part of the file to read instead of all of it.

    Raises:
        HexadError: it is missing, damaged, or names another class or function.
    """
    source: Path | io.BytesIO = path if content is None else io.BytesIO(content)
    with _naming(path):
        with zipfile.ZipFile(source) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise HexadError(f"{path}: damaged: the checksum of {damaged} does not match its content")
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with warnings.catch_warnings(), _inert_only((*_OF_SCRIPTS, _OF_ENUMS, *classes)):
            warnings.simplefilter("ignore")  # of deprecated storage classes
            return torch.load(source, map_location="cpu", weights_only=True, mmap=content is None)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors of reading it."""
    try:
        yield
    except HexadError:
        raise
    except FileNotFoundError:
        raise HexadError(f"{path}: missing") from None
    except zipfile.BadZipFile:
        raise HexadError(f"{path}: truncated, or not written by torch.save of torch 1.6 or later") from None
    except Exception as error:  # of any kind: the pickle is damaged
        raise HexadError(f"{path}: {_reason(error)}") from None


@contextmanager
def _inert_only(names: Iterable[str]) -> Iterator[None]:
    """Let torch's weights-only reader read these names as :class:`Inert`, and no class that packages have
    declared safe in this process: it would make objects of these."""
    declared = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([(Inert, name) for name in names])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(declared)


class _Unpickler(pickle.Unpickler):
    """Creates only Python's values, formats and shapes of tensors, and :class:`Inert`."""

    def __init__(self, path: Path, content: bytes, classes: Iterable[str]) -> None:
        super().__init__(io.BytesIO(content))
        self._path, self._classes = path, frozenset(classes)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._classes or full == _OF_ENUMS:
            return Inert
        if full == "collections.OrderedDict":
            return OrderedDict
        if full == "torch.Size":
            return torch.Size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise HexadError(f"{self._path}: {_refused(full)}")


def unpickle_inert(path: Path, classes: Iterable[str]) -> Any:
    """The content of a plain pickle, objects of ``classes`` as :class:`Inert`.

    Raises:
        HexadError: as for :func:`load_inert`.
    """
    with _naming(path):
        return _Unpickler(path, path.read_bytes(), classes).load()


def _reason(error: Exception) -> str:
    """Why a file is refused, in one line."""
    text = one_line(error)
    named = re.search(r"(?:[Uu]nsupported (?:global: )?GLOBAL|but got|function) (\S+)", text)
    if named and isinstance(error, pickle.UnpicklingError):
        return _refused(named[1])
    return f"cannot be read: {text.split('. ')[0]}"


def _refused(name: str) -> str:
    return (
        f"found {name} in its pickle, which is not loaded, as it could run code; save it without that object"
    )
