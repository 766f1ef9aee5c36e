"""Weights in Hugging Face files under our names: any rectangle of any tensor, read in slices.

The files are not converted: a rank that starts from them (``model.load: hf:DIR``) reads what it holds, and so
does the import, one slice after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from itertools import product
from operator import add
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hexad.config import HexadError, one_line
from hexad.config.files import read_json
from hexad.config.model import ModelSettings
from hexad.model.families import family
from hexad.model.hugging_face import CONFIG_FILE, left_out, read_config
from hexad.parallel.rectangle import Rectangle

from ..tensor_file import SAFETENSORS, Chunk, dtype_name
from .names import HEAD, PublishedTensor, assembled, located, published_tensors

SLICE_BYTES = 64 * 2**20
"""Values held at a time while a model is read or written."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LAYOUTS = (None, "pt", "mlx")
"""Values of ``format`` in a file's header that are read: matrices of others (``tf``, ``flax``) are
transposed."""
_WEIGHTS = {name: dtype for dtype, name in SAFETENSORS.items() if dtype.is_floating_point}
"""Formats of weights, by their names in safetensors."""


class WeightSource(Protocol):
    """A source of weights; each rank reads what it holds."""

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Overwrite the tensors of chunks named ``model.<global name>``.

        Raises:
            HexadError: a tensor is missing, damaged, or does not fit.
        """
        ...


class HuggingFaceModel:
    """The weights of a Hugging Face directory: ``model.safetensors``, or shards of it and their index, with
    exactly the tensors of the model. Used as a context manager, which closes its files.

    Attributes:
        tensors: our global name -> its location.
        dtypes: our global name -> the format it is stored in; of parts in several, one that holds all.
        files: names of the weights' files.
        left_out: tensors of layers that are not read: :func:`hexad.model.hugging_face.left_out`.

    Raises:
        HexadError: files that are missing or cannot be read; a tensor that is missing, unexpected, or of
            another shape or format.
    """

    def __init__(self, directory: Path, model: ModelSettings) -> None:
        self.directory = directory
        self.tensors = published_tensors(model)
        self.files: list[str] = []
        self._open = ExitStack()
        try:
            self._slices = self._opened()
            further = left_out(read_config(directory), directory / CONFIG_FILE, model)
            self._forms = located(self.tensors, self._slices, model, directory, further)
            names = (name.removeprefix(family(model.family).base) for name in self._slices)
            self.left_out = sum(re.fullmatch(further, name) is not None for name in names)
            self.dtypes = {
                ours: reduce(torch.promote_types, map(self._checked, form))
                for ours, form in self._forms.items()
            }
            self._tied = model.tied_embeddings and HEAD in self._slices
            if self._tied:
                self._checked(replace(self._forms["embedding.weight"][0], name=HEAD))
        except BaseException:
            self._open.close()
            raise

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Overwrite the tensors of ``chunks``, reading only what they hold. Floats may be widened.

        Raises:
            HexadError: the model has no such tensor, its shape or format does not fit, or it cannot be read.
        """
        for chunk in chunks:
            name = chunk.name.removeprefix("model.")
            place = self.tensors.get(name)
            shape = chunk.rectangle.shape
            if place is None or place.shape != shape:
                problem = "it is missing" if place is None else f"its shape is {place.shape}"
                raise HexadError(f"{self.directory}: {name} of shape {shape}: {problem}")
            dtype = self.dtypes[name]
            if not chunk.accepts(dtype):
                raise HexadError(
                    f"precision.dtype: {self.directory} stores {self._forms[name][0].name} in "
                    f"{dtype_name(dtype)}, "
                    f"which does not fit into this run's {dtype_name(chunk.tensor.dtype)} master weights; "
                    f"use {'fp64' if dtype == torch.float64 else 'fp32'}"
                )
            begin = chunk.rectangle.offset
            for part in read_slices(chunk.rectangle.named(name), dtype.itemsize):
                starts = [offset - first for offset, first in zip(part.offset, begin)]
                here = tuple(slice(start, start + size) for start, size in zip(starts, part.sizes))
                chunk.tensor.detach()[here] = self.read(part)

    def read(self, rectangle: Rectangle) -> Tensor:
        """A rectangle of one of our tensors, in the format it is stored in.

        Raises:
            HexadError: it cannot be read, or a head that is tied has other values than the embedding.
        """
        name = rectangle.name
        return assembled(self._forms[name], rectangle, self._read, self.dtypes[name])

    def _read(self, part: PublishedTensor, rectangle: Rectangle) -> Tensor:
        place = part.place(rectangle)
        values = self._slice(part.name, place)
        if self._tied and rectangle.name == "embedding.weight":
            head = self._slice(HEAD, place)
            # As bytes: NaN is not equal to itself.
            if head.dtype != values.dtype or not torch.equal(_bytes(head), _bytes(values)):
                raise HexadError(
                    f"{self.directory}: {HEAD} and {part.name} differ, but config.json says "
                    "tie_word_embeddings; set it to false there, or remove the wrong tensor"
                )
        return part.ours(values, rectangle)

    def _slice(self, name: str, place: tuple[slice, ...]) -> Tensor:
        try:
            values: Tensor = self._slices[name][place]
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise HexadError(f"{self.directory}: {name}: cannot be read: {one_line(error)}") from None
        return values

    def _opened(self) -> dict[str, Any]:
        """Open all files; returns the slices of every tensor by its published name."""
        slices: dict[str, Any] = {}
        named = _weight_files(self.directory)
        for file in sorted(set(named.values())) or [SINGLE_FILE]:
            path = self.directory / file
            try:
                self.files.append(file)
                opened = self._open.enter_context(safe_open(path, framework="pt"))
                file_slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                layout = (opened.metadata() or {}).get("format")
            except FileNotFoundError:
                raise HexadError(f"{path}: missing, but {INDEX_FILE} names it") from None
            except (SafetensorError, OSError) as error:
                raise HexadError(f"{path}: cannot be read: {one_line(error)}") from None
            if layout not in _LAYOUTS:
                problem = f"found format {layout!r}, whose matrices are transposed; expected 'pt'"
                raise HexadError(f"{path}: {problem}")
            for name in file_slices:
                if name in slices:
                    raise HexadError(f"{path}: {name} is in another file of the model too")
            slices.update(file_slices)
        for name, file in named.items():
            if name not in slices:
                raise HexadError(f"{self.directory / file}: {name} is missing, but {INDEX_FILE} names it")
        return slices

    def _checked(self, place: PublishedTensor) -> torch.dtype:
        """Check the shape and format of a published tensor; returns the format."""
        name = place.name
        stored, dtype = self._slices[name], _WEIGHTS.get(self._slices[name].get_dtype())
        if tuple(stored.get_shape()) != place.stored_shape:
            raise HexadError(
                f"{self.directory}: tensor {name} has shape {tuple(stored.get_shape())}, "
                f"the model has {place.stored_shape}"
            )
        if dtype is None:
            raise HexadError(
                f"{self.directory}: tensor {name} is {stored.get_dtype()}, which is not supported; "
                f"supported: {', '.join(_WEIGHTS)}"
            )
        return dtype

    def __enter__(self) -> HuggingFaceModel:
        return self

    def __exit__(self, *error: object) -> None:
        self._slices.clear()
        self._open.close()


@contextmanager
def opened_model(directory: Path, model: ModelSettings) -> Iterator[tuple[HuggingFaceModel, str]]:
    """Open a model; yields it and a text that identifies it, which all hosts must have in common.

    Raises:
        HexadError: it is missing, damaged, not supported, or of another model.
    """
    with HuggingFaceModel(directory, model) as source:
        files = [(name, _sampled(directory / name)) for name in source.files]
        yield source, f"{len(files)} files ({xxhash.xxh3_64_hexdigest(repr(files).encode())})"


def read_slices(rectangle: Rectangle, itemsize: int) -> Iterator[Rectangle]:
    """The parts of a rectangle that are held at a time, in the order of its values: :data:`SLICE_BYTES` at
    most, or one row of a matrix."""
    if not rectangle.numel:
        return
    most, sizes = SLICE_BYTES // itemsize, rectangle.sizes
    last = max(0, len(sizes) - 2)
    dim = next((dim for dim in range(last) if math.prod(sizes[dim + 1 :]) <= most), last)
    count = max(1, most // math.prod(sizes[dim + 1 :]))
    for index in product(*(range(size) for size in sizes[:dim])):
        for begin in range(0, sizes[dim], count):
            at = (*index, begin, *(0 for _ in sizes[dim + 1 :]))
            yield replace(
                rectangle,
                offset=tuple(map(add, rectangle.offset, at)),
                sizes=(*(1 for _ in index), min(count, sizes[dim] - begin), *sizes[dim + 1 :]),
            )


def _weight_files(directory: Path) -> dict[str, str]:
    """The file of each published tensor, according to the index; empty where one file has all."""
    if (directory / SINGLE_FILE).is_file():
        return {}
    path = directory / INDEX_FILE
    if not path.is_file():
        others = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pth"))
        instead = ""
        if others:
            instead = (
                f"; {others[0].name} holds pickled objects, which are not read: load it with transformers' "
                "from_pretrained and save_pretrained the result"
            )
        raise HexadError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} exists{instead}")
    try:
        named = read_json(path)["weight_map"]
        if not named or not all(isinstance(file, str) and Path(file).name == file for file in named.values()):
            raise ValueError("weight_map does not give each tensor a file of the directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HexadError(f"{path}: not an index of tensors: {one_line(error)}") from None
    return dict(named)


def _sampled(path: Path) -> str:
    """A checksum of a file's size and of 64 samples spread over it: enough to distinguish a model from a
    fine-tuned version, on every host, without reading all of it."""
    checksum, size = xxhash.xxh3_64(), path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        for place in range(64):
            file.seek(size * place // 64)
            checksum.update(file.read(512))
    return f"{size} {checksum.hexdigest()}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
