"""Import of other systems' checkpoints: their tensors, read one at a time, in one file of ours, and the
published model that ``checkpoint import --model`` names."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexad.checkpoint.directory import origin_of, write_manifest
from hexad.checkpoint.hugging_face.files import appearing, check_links, has_tokenizer
from hexad.checkpoint.hugging_face.importing import with_tokenizer
from hexad.checkpoint.index import FileRecord
from hexad.checkpoint.tensor_file import FilePart, TensorFile, write_shard
from hexad.config import Config, HexadError
from hexad.model.hugging_face import CONFIG_FILE, model_settings, read_config
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
    """A tensor of another system to write to a checkpoint.

    Attributes:
        name: in our checkpoint: ``model.<name>`` or ``optimizer.<moment>.<name>``.
        shape: of it, never of a single value.
        dtype: in which it is stored.
        read: returns its values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def published_config(folder: Path) -> dict[str, Any]:
    """The settings of the model in a Hugging Face directory, as groups of a configuration.

    Raises:
        HexadError: it is not supported, or has links out of its directory.
    """
    check_links(folder)
    settings = model_settings(read_config(folder), folder / CONFIG_FILE)
    return {"model": settings, "data": {"sequence": settings["max_positions"]}}


def write_import(
    tensors: Sequence[ForeignTensor],
    to: Path,
    source: Path,
    progress: Mapping[str, Any],
    config: Config | None = None,
    folder: Path | None = None,
) -> ImportResult:
    """Write a checkpoint, renamed into place when all is on disk.

    Args:
        source: where the tensors come from, for the manifest.
        progress: ``step``, ``updates`` and ``samples``.
        config: that the tensors belong to; None for the state of a plain module.
        folder: the Hugging Face directory of the model, whose tokenizer is copied.

    Raises:
        HexadError: a tensor cannot be read, or ``to`` is not empty or cannot be written.
    """
    expected = {tensor.name: tensor.shape for tensor in tensors}
    with appearing(to, "to") as directory:
        others: dict[str, FileRecord] = {}
        if config is not None and folder is not None:
            config, others = with_tokenizer(config, folder, directory, to.resolve())
        parts = [FilePart(Rectangle.whole(tensor.name, tensor.shape), tensor.dtype) for tensor in tensors]
        values = (tensor.read() for tensor in tensors)
        index = write_shard(directory, TensorFile.of_host(0, {0: parts}), values)
        origin = origin_of(f"imported from {source.resolve()}", str(torch.__version__))
        write_manifest(directory, index, expected, config, progress, origin, others)
    return ImportResult(
        config,
        progress["step"],
        progress["samples"],
        sum(math.prod(shape) for name, shape in expected.items() if name.startswith("model.")),
        any(name.startswith("optimizer.") for name in expected),
        folder is not None and has_tokenizer(folder),
    )
