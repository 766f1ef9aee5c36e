"""Reading the pickles of other systems' checkpoints without running code that they name.

A pickle names functions and classes, and calls them. Here tensors, numbers, texts and Python's own containers
are read, and objects of some named classes as :class:`Inert`. A file that names anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from hexad.config import HexadError, one_line


class Inert:
    """A placeholder for an object of another class: its content in the file, without behaviour.

    Attributes:
        arguments: those of its constructor.
        state: of the object: a dictionary of attributes, unless its class pickles something else.
    """

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Inert:
        """Keep the arguments of a class, or of a function, that is not called."""
        inert = super().__new__(cls)
        inert.arguments, inert.state = arguments, {}
        return inert

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def attributes(self) -> dict[str, Any]:
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
    with _naming(path), path.open("rb") as file:
        source: IO[bytes] = file if content is None else io.BytesIO(content)
        pickled, size = _checked_archive(path, source)
        _Unpickler(path, pickled, None).load()  # which refuses what would take more memory than it has
        source.seek(0)
        with warnings.catch_warnings(), _inert_only((*_OF_SCRIPTS, _OF_ENUMS, *classes)):
            warnings.simplefilter("ignore")  # of deprecated storage classes
            value = torch.load(
                path if content is None else source,
                map_location="cpu",
                weights_only=True,
                mmap=content is None,
            )
        _check_value(path, value, len(pickled), size)
        return value


def _checked_archive(path: Path, source: IO[bytes]) -> tuple[bytes, int]:
    """The pickle in a file of ``torch.save``, and the size of the file: its entries are not compressed, do
    not overlap, and have their checksums.

    Raises:
        HexadError: it is another archive.
    """
    size = source.seek(0, io.SEEK_END)
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        if not stored:
            raise HexadError(f"{path}: its entries are compressed, not written by torch.save; save it again")
        if sum(entry.file_size for entry in entries) > size or len({*archive.namelist()}) < len(entries):
            raise HexadError(f"{path}: damaged: its entries overlap, or two have one name")
        damaged = archive.testzip()
        if damaged is not None:
            raise HexadError(
                f"{path}: damaged: the checksum of {_visible(damaged)} does not match its content"
            )
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise HexadError(f"{path}: not written by torch.save: found {len(pickles)} entries data.pkl")
        return archive.read(pickles[0]), size


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


_LONGEST_INTEGER = 1024
"""Bytes of an integer; those of random states have 16."""
_SHARED, _VALUES = 100, 1_000_000
"""How many values a file may stand for, where what it refers to several times counts each time: so many, and
so many for each byte of its pickle."""
_DEEPEST = 200
"""Containers in one another; what reads them calls itself."""


def _count_tuple(load: Callable[[Any], None], reader: Any) -> None:
    """Load a tuple, whose hash takes as much time as it has values, nested ones counted each time."""
    load(reader)
    value, counts = reader.stack[-1], reader.tuples
    count = 1 + sum(counts[id(item)][0] if id(item) in counts else 1 for item in value)
    if count > _VALUES + reader.size:
        raise pickle.UnpicklingError("tuples in one another")
    counts[id(value)] = count, value  # which keeps its id from being used again


class _Ignored:
    """A placeholder for an object of any class, container or tensor of a file that is only checked."""

    def __new__(cls, *arguments: Any) -> _Ignored:
        return super().__new__(cls)

    def ignore(self, *arguments: Any) -> None:
        """Do nothing."""

    __init__ = __setitem__ = __setstate__ = append = extend = ignore


class _Unpickler(pickle._Unpickler):
    """Creates only Python's values, formats and shapes of tensors, and :class:`Inert`; what it creates takes
    memory in proportion to the file. Python's own reader in C believes what a file says about lengths.

    Args:
        path: of the file, for messages.
        content: a pickle.
        classes: which are read as :class:`Inert`; None: all, and tensors, so that nothing of it can be used.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    def __init__(self, path: Path, content: bytes, classes: Iterable[str] | None) -> None:
        super().__init__(io.BytesIO(content))
        self._path, self.size = path, len(content)
        self._classes = None if classes is None else frozenset(classes)
        self.tuples: dict[int, tuple[int, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if self._classes is None:
            return self._bytes_of if name == "bytearray" else _Ignored
        if full in self._classes or full == _OF_ENUMS:
            return Inert
        if full == "collections.OrderedDict":
            return OrderedDict
        if full == "torch.Size":
            return torch.Size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise HexadError(f"{self._path}: {_refused(full)}")

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage."""
        if self._classes is None:
            return _Ignored()
        raise pickle.UnpicklingError("it refers to objects outside the file")

    def _bytes_of(self, *arguments: Any) -> Any:
        """An object of ``bytearray``: of a text or bytes, not of a number of zeros."""
        if arguments and isinstance(arguments[0], int) and arguments[0] > self.size:
            raise pickle.UnpicklingError(f"a bytearray of {arguments[0]:,} bytes, more than the file has")
        return _Ignored()

    def _read_length(self, form: str) -> int:
        (length,) = struct.unpack(form, self.read(struct.calcsize(form)))
        if not 0 <= length <= self.size:
            raise pickle.UnpicklingError(f"a value of {length:,} bytes, more than the file has")
        return int(length)

    def _load_bytearray(self) -> None:
        self.append(bytearray(self.read(self._read_length("<Q"))))

    def _load_long(self) -> None:
        length = self._read_length("<i")
        if length > _LONGEST_INTEGER:
            raise pickle.UnpicklingError(f"an integer of {length:,} bytes")
        self.append(pickle.decode_long(self.read(length)))

    def _load_bytes(self) -> None:
        self.append(self.read(self._read_length("<Q")))

    def _load_text(self) -> None:
        self.append(str(self.read(self._read_length("<Q")), "utf-8", "surrogatepass"))

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray
    dispatch[pickle.LONG4[0]] = _load_long
    dispatch[pickle.BINBYTES8[0]] = _load_bytes
    dispatch[pickle.BINUNICODE8[0]] = _load_text
    for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[_code[0]] = partial(_count_tuple, dispatch[_code[0]])


def unpickle_inert(path: Path, classes: Iterable[str]) -> Any:
    """The content of a plain pickle, objects of ``classes`` as :class:`Inert`.

    Raises:
        HexadError: as for :func:`load_inert`.
    """
    with _naming(path):
        content = path.read_bytes()
        value = _Unpickler(path, content, classes).load()
        _check_value(path, value, len(content), len(content))
        return value


def _check_value(path: Path, value: Any, pickled: int, size: int) -> None:
    """Refuse containers that are nested too deeply, or in which few stand for many, and tensors of more
    values than are in the file; and keep methods of dictionaries from being replaced.

    Args:
        value: the content of the file.
        pickled: bytes of its pickle.
        size: bytes of the file.
    """
    most = _VALUES + _SHARED * pickled
    counts: dict[int, int] = {}
    above: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:
        item, counted = waiting.pop()
        if isinstance(item, Tensor):
            _check_tensor(path, item, size)
        if isinstance(item, OrderedDict):
            vars(item).clear()
        inner = _inner(item)
        if counted:
            above.discard(id(item))
            counts[id(item)] = 1 + sum(counts.get(id(part), 1) for part in inner)
            if counts[id(item)] > most:
                raise HexadError(f"{path}: its containers stand for more than {most:,} values")
        elif inner and id(item) not in counts:
            if id(item) in above or len(above) > _DEEPEST:
                raise HexadError(f"{path}: containers in one another, more than {_DEEPEST}, or in themselves")
            above.add(id(item))
            waiting.append((item, True))
            waiting += [(part, False) for part in inner]


def _inner(item: Any) -> list[Any]:
    """What is in a container."""
    if isinstance(item, Mapping):
        return [part for pair in dict.items(item) for part in pair] if isinstance(item, dict) else []
    if isinstance(item, Inert):
        return [item.arguments, item.state]
    return list(item) if isinstance(item, list | tuple | set | frozenset) else []


def _check_tensor(path: Path, tensor: Tensor, size: int) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise HexadError(f"{path}: found a tensor that is sparse, quantized or without values; save it dense")
    if tensor.numel() * tensor.element_size() > size:
        raise HexadError(
            f"{path}: found a tensor of {tuple(tensor.shape)}, larger than the file, which has {size:,} bytes"
        )


def _reason(error: Exception) -> str:
    """Why a file is refused, in one line."""
    text = " ".join(str(error).split())  # of many lines
    named = re.search(r"(?:[Uu]nsupported (?:global: )?GLOBAL|but got|function) (\S+)", text)
    if named and isinstance(error, pickle.UnpicklingError):
        return _refused(named[1])
    return f"cannot be read: {one_line(error).split('. ')[0]}"


def _visible(name: str) -> str:
    """A name from a file, in one line."""
    return name.encode("unicode_escape").decode()


def _refused(name: str) -> str:
    return (
        f"found {_visible(name)} in its pickle, which is not loaded, as it could run code; save it without "
        "that object"
    )
