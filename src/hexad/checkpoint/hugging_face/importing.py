"""A Hugging Face model as a checkpoint: weights only, in the format its files have, before the first step."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hexad.config import Config, HexadError
from hexad.model.configuration import build_config
from hexad.model.hugging_face import CONFIG_FILE, model_settings, read_config
from hexad.model.transformer import DTYPES
from hexad.parallel.rectangle import Rectangle

from ..directory import origin_of, write_manifest
from ..index import FileRecord, Index
from ..kept_tokenizer import FOLDER, copied_files, keep_files
from ..manifest import STEP_NAME
from ..tensor_file import FilePart, TensorFile, write_shard
from .files import appearing, check_links, has_tokenizer
from .weights import HuggingFaceModel, read_slices

_PRECISIONS = {dtype: name for name, dtype in DTYPES.items() if name != "fp8"}


@dataclass(frozen=True)
class ImportedModel:
    """The result of an import.

    Attributes:
        config: of the checkpoint, resolved.
        parameters: in all.
        tokenizer: whether one came with the model.
        left_out: tensors of layers that predict further tokens, which were not imported.
    """

    config: Config
    parameters: int
    tokenizer: bool
    left_out: int


def import_model(source: Path, to: Path, check: Callable[[Config], object]) -> ImportedModel:
    """Write a checkpoint with the weights of a Hugging Face directory, slice by slice; it is renamed into
    place when all is on disk. ``check`` refuses a configuration that this version cannot run.

    Raises:
        HexadError: the model is not supported, incomplete, or has links out of its directory; or ``to`` is
            not empty or cannot be written.
    """
    check_target(to)
    check_links(source)
    path, raw = source / CONFIG_FILE, read_config(source)
    settings = model_settings(raw, path)
    with appearing(to, "to") as partial:
        plain = build_config({"model": settings, "data": {"sequence": settings["max_positions"]}})
        check(plain)
        with HuggingFaceModel(source, plain.model) as model:
            parameters = sum(math.prod(place.shape) for place in model.tensors.values())
            config = with_precision(plain, precision_of(model))
            config, others = with_tokenizer(config, source, partial, to.resolve())
            index, left_out = _written(model, partial), model.left_out
        expected = {f"model.{name}": place.shape for name, place in model.tensors.items()}
        progress = {"step": 0, "updates": 0, "samples": 0}
        origin = origin_of(f"imported from {source.resolve()}", str(torch.__version__))
        write_manifest(partial, index, expected, config, progress, origin, others)
    return ImportedModel(config, parameters, has_tokenizer(source), left_out)


def check_target(to: Path) -> None:
    """Refuse names that only checkpoints of runs have.

    Raises:
        HexadError: ``to`` has one.
    """
    if STEP_NAME.fullmatch(to.name):
        raise HexadError(f"``to``: found {to.name}, the name of a run's checkpoint; choose another")


def precision_of(model: HuggingFaceModel) -> torch.dtype:
    """The format of most of a model's values."""
    sizes: Counter[torch.dtype] = Counter()
    for name, dtype in model.dtypes.items():
        sizes[dtype] += math.prod(model.tensors[name].shape)
    return sizes.most_common(1)[0][0]


def with_precision(config: Config, dtype: torch.dtype) -> Config:
    """The configuration with the weights' format as ``precision.dtype``."""
    precision = config.precision.model_copy(update={"dtype": _PRECISIONS[dtype]})
    return config.model_copy(update={"precision": precision})


def with_tokenizer(
    config: Config, directory: Path, partial: Path, final: Path
) -> tuple[Config, dict[str, FileRecord]]:
    """The configuration of a checkpoint with the tokenizer of a Hugging Face directory, and the records of
    its files, which are copied to ``partial``: the checkpoint while it is written, later ``final``."""
    data = config.data.model_copy(update={"tokenizer": str(final / FOLDER)})
    records = keep_files(partial, copied_files(str(directory)))
    return config.model_copy(update={"data": data}), records


def _written(model: HuggingFaceModel, directory: Path) -> Index:
    """Write all weights to one tensor file; returns its index."""
    wholes = {name: Rectangle.whole(name, place.shape) for name, place in model.tensors.items()}
    parts = [FilePart(whole.named(f"model.{name}"), model.dtypes[name]) for name, whole in wholes.items()]
    slices = (
        model.read(part)
        for name, whole in wholes.items()
        for part in read_slices(whole, model.dtypes[name].itemsize)
    )
    return write_shard(directory, TensorFile.of_host(0, {0: parts}), slices)
