"""A model with experts from a dense one (sparse upcycling: Komatsuzaki et al., arXiv 2212.05055): every
expert begins as a copy of its layer's feed-forward weights, routers are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexad.config import Config, ConfigError, HexadError, apply_overrides
from hexad.config.model import ModelSettings
from hexad.model.configuration import build_config
from hexad.model.families import family
from hexad.model.families.mixture import normalised
from hexad.model.hugging_face import CONFIG_FILE, architecture, model_settings, read_config
from hexad.model.inventory import ModelInventory
from hexad.model.pretrained import hugging_face_directory
from hexad.parallel.inventory import Weight
from hexad.parallel.rectangle import Rectangle
from hexad.parallel.sharding import fill_initial

from .directory import find_checkpoint, origin_of, write_manifest
from .hugging_face.exporting import saved_config
from .hugging_face.files import appearing, check_links
from .hugging_face.importing import check_target, precision_of, with_precision, with_tokenizer
from .hugging_face.weights import HuggingFaceModel, read_slices
from .index import FileRecord, Index
from .kept_tokenizer import FOLDER, keep_files, tokenizer_files_of
from .merged import StoredWeights, opened_weights, published_weights
from .reader import Checkpoint
from .tensor_file import FilePart, TensorFile, write_shard

_SETTINGS = ("model.moe", "run.seed")


@dataclass(frozen=True)
class Upcycled:
    """The result of upcycling.

    Attributes:
        config: of the checkpoint, resolved.
        parameters: in all.
        same: whether the model computes what the dense one does, up to rounding.
    """

    config: Config
    parameters: int
    same: bool


@dataclass(frozen=True)
class _Dense:
    """A dense model.

    Attributes:
        config: its own.
        weights: its tensors.
        tokenizer: its files, by their paths; empty for the ``byte`` tokenizer.
        folder: the Hugging Face directory that it is, if it is one.
    """

    config: Config
    weights: StoredWeights
    tokenizer: dict[str, bytes]
    folder: Path | None


def upcycle(source: str, to: Path, overrides: Sequence[str], check: Callable[[Config], object]) -> Upcycled:
    """Write a checkpoint of a model with experts, slice by slice; it is renamed into place when all is on
    disk.

    Args:
        source: ``hf:DIR``, or a run or checkpoint; adapters are merged.
        to: the checkpoint.
        overrides: ``model.moe.NAME=VALUE``, and ``run.seed=NUMBER``, which the routers are drawn from.
        check: refuses a configuration that this version cannot run.

    Raises:
        HexadError: the source is not a dense model, cannot be read, or does not fit the settings; or ``to``
            is not empty or cannot be written.
    """
    for override in overrides:
        name = override.partition("=")[0]
        if name not in _SETTINGS and not name.startswith("model.moe."):
            raise HexadError(f"found {name}: upcycle sets {' and '.join(_SETTINGS)} only; remove it")
    check_target(to)
    with ExitStack() as stack:
        dense = _opened(source, stack)
        config = _config(source, dense, overrides)
        check(config)
        model = config.model
        assert model.moe is not None
        with appearing(to, "to") as partial:
            config, others = _with_tokenizer(config, dense, partial, to.resolve())
            index = _written(dense.weights, config, partial)
            weights = ModelInventory(model).weights()
            expected = {f"model.{name}": weight.shape for name, weight in weights.items()}
            progress = {"step": 0, "updates": 0, "samples": 0}
            origin = origin_of(f"upcycled from {source}", str(torch.__version__))
            write_manifest(partial, index, expected, config, progress, origin, others)
    moe = model.moe
    same = normalised(moe) and moe.scale == 1 and moe.capacity_factor is None
    return Upcycled(config, sum(prod(shape) for shape in expected.values()), same)


def _opened(source: str, stack: ExitStack) -> _Dense:
    """Open a model for as long as the stack is."""
    folder = hugging_face_directory(source)
    if folder is None:
        path = find_checkpoint(source)
        checkpoint = stack.enter_context(Checkpoint(path))
        config = saved_config(checkpoint)
        weights = stack.enter_context(opened_weights(checkpoint, config))
        return _Dense(config, weights, tokenizer_files_of(path, config.data.tokenizer), None)
    check_links(folder)
    settings = model_settings(read_config(folder), folder / CONFIG_FILE)
    config = build_config({"model": settings, "data": {"sequence": settings["max_positions"]}})
    published = stack.enter_context(HuggingFaceModel(folder, config.model))
    return _Dense(with_precision(config, precision_of(published)), published_weights(published), {}, folder)


def _config(source: str, dense: _Dense, overrides: Sequence[str]) -> Config:
    """The configuration of the model with experts.

    Raises:
        ConfigError: settings with which experts cannot begin as copies.
    """
    dense_config = dense.config
    if dense_config.model.moe is not None:
        raise HexadError(f"``from``: {source} has experts; upcycle begins with a dense model")
    dropped = ("preset", "load", "train", "lora", "moe")
    model = {
        name: value
        for name, value in dense_config.model.model_dump(mode="json").items()
        if name not in dropped and value is not None
    }
    tree: dict[str, Any] = {
        "model": {**model, "moe": {}},
        "data": {"sequence": dense_config.data.sequence, "tokenizer": dense_config.data.tokenizer},
        "precision": dense_config.precision.model_dump(mode="json"),
    }
    apply_overrides(tree, overrides)
    config = build_config(tree)
    moe, width = config.model.moe, config.model.ffn_hidden
    if moe is None:
        raise ConfigError("model.moe", "found null, expected the settings of experts")
    if moe.ffn_hidden != width:
        problem = f"found {moe.ffn_hidden}, but experts are copies of layers of {width}; leave it out"
        raise ConfigError("model.moe.ffn_hidden", problem)
    if moe.shared_experts:
        problem = f"found {moe.shared_experts}, which no layer of a dense model can begin as; use 0"
        raise ConfigError("model.moe.shared_experts", problem)
    return config.model_copy(update={"model": _named(config.model)})


def _named(model: ModelSettings) -> ModelSettings:
    """The model as one of the family of published models that have such experts, if there is one."""
    try:
        return model.model_copy(update={"family": architecture(model).name})
    except ConfigError:
        return model


def _with_tokenizer(
    config: Config, dense: _Dense, partial: Path, final: Path
) -> tuple[Config, dict[str, FileRecord]]:
    """The configuration with the tokenizer that is copied to ``partial``, and the records of its files."""
    if dense.folder is not None:
        return with_tokenizer(config, dense.folder, partial, final)
    if not dense.tokenizer:
        return config, {}
    data = config.data
    if data.tokenizer != "byte":
        data = data.model_copy(update={"tokenizer": str(final / FOLDER)})
    return config.model_copy(update={"data": data}), keep_files(partial, dense.tokenizer)


def _written(dense: StoredWeights, config: Config, directory: Path) -> Index:
    """Write all weights to one tensor file; returns its index."""
    gated = family(config.model.family).gated
    weights = ModelInventory(config.model).weights()
    copies = {name: _copied(name, gated) for name in weights}
    _check(weights, copies, dense)
    dtypes = {name: _dtype(weight, copies[name], dense) for name, weight in weights.items()}
    wholes = {name: Rectangle.whole(name, weight.shape) for name, weight in weights.items()}
    values = (
        _values(part, weights[name], copies[name], dense, config.run.seed, dtypes[name])
        for name, whole in wholes.items()
        for part in read_slices(whole, 8)
    )
    parts = [FilePart(whole.named(f"model.{name}"), dtypes[name]) for name, whole in wholes.items()]
    return write_shard(directory, TensorFile.of_host(0, {0: parts}), values)


def _check(weights: Mapping[str, Weight], copies: Mapping[str, Sequence[str]], dense: StoredWeights) -> None:
    """Refuse a dense model in which a tensor is missing, has another shape, or is part of nothing."""
    for name, weight in weights.items():
        for other in copies[name]:
            dense.check(other, weight.shape if other == name else weight.shape[-2:])
    copied = {name for names in copies.values() for name in names}
    left = next((n for n in dense.tensors if n not in copied and ".lora_" not in n), None)
    if left is not None:
        raise HexadError(f"{dense.where}: found tensor model.{left}, which the model does not have")


def _copied(name: str, gated: bool) -> tuple[str, ...]:
    """The dense tensors that a weight is made of: of a stack of experts those of a layer, one per matrix;
    none if it is drawn."""
    layer, marker, rest = name.partition(".ffn.")
    if rest == "experts.gate_up":
        return tuple(f"{layer}.ffn.{part}.weight" for part in (("gate", "up") if gated else ("up",)))
    if rest == "experts.down":
        return (f"{layer}.ffn.down.weight",)
    return () if marker and rest.startswith("router.") else (name,)


def _dtype(weight: Weight, copies: Sequence[str], dense: StoredWeights) -> torch.dtype:
    """The format of a weight: that of its copies; of a router that of the norm before it, or a wider one."""
    if copies:
        return reduce(torch.promote_types, map(dense.dtype, copies))
    beside = dense.dtype(f"{weight.name.partition('.ffn.')[0]}.ffn_norm.weight")
    return torch.promote_types(beside, torch.float32) if weight.wide else beside


def _values(
    part: Rectangle,
    weight: Weight,
    copies: Sequence[str],
    dense: StoredWeights,
    seed: int,
    dtype: torch.dtype,
) -> Tensor:
    if not copies:
        drawn = torch.empty(part.sizes, dtype=dtype)
        fill_initial(drawn, part, weight, seed)
        return drawn
    if copies == (weight.name,):
        return dense.read(weight.name, part.offset, part.sizes)
    values, place = torch.empty(part.sizes, dtype=dtype), (part.offset[-2:], part.sizes[-2:])
    matrices: dict[str, Tensor] = {}
    for index in _leading(part):
        name = copies[part.offset[1] + index[1] if len(index) > 1 else 0]
        if name not in matrices:
            matrices[name] = dense.read(name, *place).to(dtype)
        values[index] = matrices[name]
    return values


def _leading(part: Rectangle) -> Iterator[tuple[int, ...]]:
    """The indexes of a slice's matrices in it."""
    return product(*(range(size) for size in part.sizes[:-2]))
