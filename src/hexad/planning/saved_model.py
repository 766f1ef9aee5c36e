"""The configuration of a saved model, for generation and evaluation: a checkpoint's, or a published
model's. No torch."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hexad.checkpoint.directory import check_same_model, find_checkpoint
from hexad.checkpoint.kept_tokenizer import tokenizer_of_checkpoint
from hexad.checkpoint.manifest import read_manifest
from hexad.config import Config, ConfigError, apply_overrides, blaming, listed_overrides
from hexad.config.hub import local
from hexad.config.schema import prefixes
from hexad.dataset.built import check_targets, open_built
from hexad.dataset.text.tokenizer import Tokenizer, load_tokenizer
from hexad.model.configuration import build_config
from hexad.model.families import family
from hexad.model.hugging_face import CONFIG_FILE, model_settings, read_config
from hexad.model.pretrained import hugging_face_directory
from hexad.topology.layout import Layout

from .layouts import check_replica, check_stages, planned_layout
from .resolve import resolve

_LONGEST = 4096
"""``data.sequence`` of a published model that can read more."""


@dataclass(frozen=True)
class SavedModel:
    """A saved model and the configuration to run it with.

    Attributes:
        source: a checkpoint's directory, or ``hf:DIR``.
        config: for what it is wanted now.
        positions: the longest sequence that it was made for, in tokens.
    """

    source: str
    config: Config
    positions: int

    @property
    def weights(self) -> Path | str:
        """The source that :func:`hexad.checkpoint.base.load_model_weights` loads."""
        return self.source if hugging_face_directory(self.source) is not None else Path(self.source)

    @property
    def most_positions(self) -> int | None:
        """Tokens of a sequence at most: where the model has a table of positions, or frequencies for each
        length of a document, with which the keys of a growing one would change."""
        model = self.config.model
        scaling = model.rope_scaling
        if scaling is not None and scaling.type == "dynamic":
            return scaling.original_positions
        return None if family(model.family).rotary else int(model.max_positions)

    def tokenizer(self) -> Tokenizer:
        """Load ``data.tokenizer``: another one than in training is accepted if the model has all its ids.

        Raises:
            ConfigError: it cannot be read, or has more ids.
        """
        config = self.config
        with blaming("data.tokenizer"):
            tokenizer = load_tokenizer(config.data.tokenizer)
        vocab = int(config.model.vocab)
        if tokenizer.vocab_size > vocab:
            other = f"found {config.data.tokenizer} with {tokenizer.vocab_size} ids"
            fix = "give the one that the model was trained with"
            raise ConfigError("data.tokenizer", f"{other}, more than the model's {vocab}; {fix}")
        return tokenizer


def find_model(source: str) -> str:
    """``hf:DIR`` as it is, or that of ``hf:ORG/NAME``; else the checkpoint that a path means.

    Raises:
        HexadError: there is none.
    """
    return local(source) if hugging_face_directory(source) is not None else str(find_checkpoint(source))


def saved_model(
    source: str,
    overrides: Iterable[str],
    groups: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any] | None = None,
) -> SavedModel:
    """A saved model and the configuration to use it with.

    Args:
        source: from :func:`find_model`.
        overrides: ``precision.dtype=fp32`` style strings, on top of the saved settings.
        groups: replace those settings' groups.
        data: replace single settings of ``data``.

    Raises:
        HexadError: it cannot be read, or the overrides do not fit it.
    """
    directory, saved = hugging_face_directory(source), None
    if directory is None:
        saved = read_manifest(Path(source)).config
        tree = deepcopy(saved)
        tree.setdefault("data", {})["tokenizer"] = tokenizer_of_checkpoint(Path(source), saved)
        model = tree["model"]
        model.pop("load", None)  # the weights are the checkpoint's
        positions = model["max_positions"]
        if family(model["family"]).rotary:
            model.pop("max_positions")  # there is no table of them
        if tree.get("precision", {}).get("dtype") == "fp8":
            tree["precision"]["dtype"] = "bf16"  # what the weights are kept in: any device computes it
    else:
        with blaming("model.load"):
            positions = int(model_settings(read_config(directory), directory / CONFIG_FILE)["max_positions"])
        tree = {
            "model": {"load": source},
            "data": {"tokenizer": str(directory), "sequence": min(positions, _LONGEST)},
        }
    tree |= {name: dict(group) for name, group in groups.items()}
    tree["data"] |= data or {}
    apply_overrides(tree, overrides)
    config = build_config(tree)
    if saved is not None:
        check_same_model(Path(source), saved, config)
    return SavedModel(source, config, int(positions))


def generating_model(source: str, overrides: Iterable[str], ranks: int) -> SavedModel:
    """A saved model with the configuration to generate on so many ranks: tensor-parallel, unless overridden;
    data ranks have replicas. ``data.sequence``, which generation does not use, is rounded to a multiple of
    the context degree. ``source`` is from :func:`find_model`.

    Raises:
        HexadError: it cannot be read, or the overrides do not fit it or the ranks.
    """
    overrides = listed_overrides(overrides)
    groups: dict[str, dict[str, Any]] = {name: {} for name in ("memory", "validate", "checkpoint")}
    groups |= {"parallel": {"sequence": False}, "batch": {"micro": 1, "global": 1}}
    model = saved_model(source, overrides, groups)
    if model.config.precision.dtype == "fp8":
        raise ConfigError("precision.dtype", "found fp8, which generation does not support; use bf16")
    tensor_override = any(override.startswith("parallel.tensor=") for override in overrides)
    config = _with_ranks(model.config, tensor_override, ranks)
    resolve(config, planned_layout(config, ranks))  # refuses what does not fit
    return replace(model, config=config)


def model_in_training(
    config: Config, overrides: Iterable[str], degrees: Mapping[str, int], ranks: int
) -> SavedModel:
    """The model that an engine trains with ``config``, with the configuration to generate on the same ranks;
    as :func:`generating_model`, but that ranks have replicas unless ``degrees`` say otherwise.

    Raises:
        HexadError: the overrides or degrees do not fit it or the ranks.
    """
    tree = config.model_dump(mode="json", by_alias=True)
    for name in ("memory", "validate", "checkpoint"):
        tree.pop(name, None)
    tree["parallel"] = {"sequence": False, "tensor": 1, **degrees}
    tree["batch"] = {"micro": 1, "global": 1}
    if config.precision.dtype == "fp8":
        tree["precision"]["dtype"] = "bf16"  # what the weights are in
    apply_overrides(tree, overrides)
    generating = _with_ranks(build_config(tree), True, ranks, "Generator")
    resolve(generating, planned_layout(generating, ranks))
    return SavedModel(config.model.load or "", generating, int(config.model.max_positions))


def _with_ranks(config: Config, tensor_given: bool, ranks: int, field: str = "nproc") -> Config:
    """The configuration with degrees that use all ranks, and a length that context ranks divide; ``field`` is
    named where they do not."""
    parallel, data = config.parallel, config.data
    others = parallel.context * parallel.pipeline
    if tensor_given and parallel.data == "auto" and ranks % (parallel.tensor * others) == 0:
        parallel = parallel.model_copy(update={"data": ranks // (parallel.tensor * others)})
    replicas = 1 if parallel.data == "auto" else parallel.data
    if not tensor_given and ranks % (others * replicas) == 0:
        parallel = parallel.model_copy(update={"tensor": ranks // (others * replicas)})
    if (product := parallel.tensor * others * replicas) != ranks:
        raise ConfigError(
            field,
            f"found {ranks}, expected parallel.tensor {parallel.tensor} x parallel.context "
            f"{parallel.context} x parallel.pipeline {parallel.pipeline} x parallel.data {replicas} = "
            f"{product}",
        )
    check_stages(parallel)
    parallel = parallel.model_copy(update={"data": replicas})
    check_replica(Layout.from_settings(parallel, ranks))
    sequence = max(parallel.context, data.sequence // parallel.context * parallel.context)
    data = data.model_copy(update={"sequence": sequence})
    batch = config.batch.model_copy(update={"micro": 1, "global_": replicas})
    return config.model_copy(update={"parallel": parallel, "data": data, "batch": batch})


def scored_model(
    source: str, overrides: Iterable[str], ranks: int, data: Mapping[str, Any] | None = None
) -> SavedModel:
    """A saved model, configured for the training forward pass on so many ranks: data-parallel unless
    overridden.

    ``source`` is from :func:`find_model`; ``data`` replaces single settings of ``data``.

    Raises:
        HexadError: it cannot be read, or the overrides do not fit it or the ranks.
    """
    groups: dict[str, dict[str, Any]] = {
        name: {} for name in ("parallel", "memory", "validate", "checkpoint")
    }
    model = saved_model(source, overrides, groups, data)
    config = _divisible(model.config, ranks)
    resolve(config, planned_layout(config, ranks))
    return replace(model, config=config)


def evaluated_model(
    source: str, data: Mapping[str, Any], overrides: Iterable[str], ranks: int
) -> tuple[SavedModel, Tokenizer]:
    """A saved model, configured to be evaluated on so many ranks (data-parallel unless overridden), and its
    tokenizer.

    ``source`` is from :func:`find_model`; ``data`` are data sets by name, if there are none those of
    ``data.validation``.

    Raises:
        HexadError: it cannot be read, or something does not fit.
    """
    model = scored_model(source, overrides, ranks, {"validation": dict(data)} if data else {})
    config, tokenizer = model.config, model.tokenizer()
    resolve(config, planned_layout(config, ranks), tokenizer.vocab_size)
    if not config.data.validation_sets:
        raise ConfigError("data", "found none, and the run has no data.validation; name .bin/.idx prefixes")
    for names in config.data.validation_sets.values():
        with blaming("data"):
            check_targets([open_built(prefix, None, None, None) for prefix in prefixes(names)])
    return model, tokenizer


def _divisible(config: Config, ranks: int) -> Config:
    """The configuration with as many sequences per batch as the data ranks can divide: their number changes
    no result."""
    data = int(planned_layout(config, ranks).data)
    step = config.batch.micro * data
    if not any(size % step for size in config.batch.sizes):
        return config
    batch = config.batch.model_copy(update={"global_": -(-config.batch.global_ // step) * step, "ramp": None})
    return config.model_copy(update={"batch": batch})
