"""Import of other systems' checkpoints: their tensors, read one at a time, in one file of ours, and the
published model that ``checkpoint import --model`` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hexad.checkpoint.hugging_face.importing import origin_of_import
from hexad.checkpoint.index import FileRecord, Index
from hexad.checkpoint.manifest_writer import write_manifest
from hexad.checkpoint.tensor_file import Part, TensorFile, dtype_name
from hexad.config import Config, HexadError
from hexad.model.hugging_face import CONFIG_FILE
from hexad.parallel.rectangle import Rectangle


def model_directory(named: Path) -> Path:
    """The directory of a Hugging Face model that is named, or whose ``config.json`` is.

    Raises:
        HexadError: there is none.
    """
    if named.is_dir():
        return named
    if named.name == CONFIG_FILE and named.is_file():
        return named.parent
    if named.exists():
        raise HexadError(
            f"--model: found the file {named}, expected a Hugging Face model's directory or its {CONFIG_FILE}"
        )
    raise HexadError(f"--model: {named}: no such directory or file")


@dataclass(frozen=True)
class ImportResult:
    """The result of an import.

    Attributes:
        config: of the checkpoint, resolved; None for the state of a plain module.
        step, samples: done, according to the other system; 0 with weights only.
        parameters: values of weights and buffers.
        optimizer: whether Adam's moments came with them.
        tokenizer: whether one came with the model.
    """

    config: Config | None
    step: int
    samples: int
    parameters: int
    optimizer: bool
    tokenizer: bool


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor to write.

    Attributes:
        name: in our checkpoint: ``model.<name>`` or ``optimizer.<moment>.<name>``.
        shape: of it, never of a single value.
        dtype: in which it is stored.
        read: returns its values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def write_foreign(
    tensors: Sequence[ForeignTensor],
    directory: Path,
    source: Path,
    progress: Mapping[str, Any],
    config: Config | None = None,
    others: Mapping[str, FileRecord] | None = None,
) -> None:
    """Write the files of a checkpoint.

    Args:
        tensors: all of it.
        directory: empty.
        source: where they come from, for the manifest.
        progress: ``step``, ``updates`` and ``samples``.
        config: that the tensors belong to; None for the state of a plain module.
        others: further files that exist already, by name.

    Raises:
        HexadError: a tensor cannot be read.
        OSError: the files cannot be written.
    """
    index, expected = _written(tensors, directory), {each.name: each.shape for each in tensors}
    write_manifest(directory, index, expected, config, progress, origin_of_import(source), others)


def _written(tensors: Sequence[ForeignTensor], directory: Path) -> Index:
    file = TensorFile.alone(
        Part(Rectangle.whole(each.name, each.shape), dtype_name(each.dtype)) for each in tensors
    )
    with file.open(directory) as writer:
        for each in tensors:
            writer.write(each.read())
        return file.index(writer.close())
