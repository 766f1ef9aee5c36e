"""A configuration whose model is complete: preset, family and the weights to load filled in. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hexad.config import Config, ConfigError, blaming, parse_config, read_tree
from hexad.config.hub import local, local_tokenizer
from hexad.config.model import ModelSettings

from .families import family, preset
from .pretrained import with_source


def load_config(path: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration file, apply ``a.b=value`` overrides and check it.

    What depends on the world or on the tokenizer stays ``auto`` until :func:`hexad.planning.resolve`.

    Args:
        path: a YAML file, an already parsed mapping, or None for all defaults.
        overrides: ``parallel.tensor=2`` style strings; values are YAML.

    Raises:
        ConfigError: an unknown or malformed setting, naming it and the nearest known one.
        HexadError: a missing file or text that is not YAML.
    """
    return build_config(read_tree(path, overrides))


def build_config(tree: Mapping[str, Any]) -> Config:
    """A checked :class:`Config` from a raw tree; what its model's settings leave out is filled in."""
    config = parse_config(tree)
    if config.model.load is not None and config.checkpoint.load is not None:
        raise ConfigError(
            "model.load",
            f"found {config.model.load!r} beside checkpoint.load {config.checkpoint.load!r}, which brings "
            "weights too; remove one of the two",
        )
    config = _with_local_sources(config)
    model = complete_model(config.model, config.data.sequence)
    _check_used(config.model, model)
    return config.model_copy(update={"model": model})


def _with_local_sources(config: Config) -> Config:
    """The configuration with directories in place of the names of published models."""
    for group, name, find in (("model", "load", local), ("data", "tokenizer", local_tokenizer)):
        settings = getattr(config, group)
        given = getattr(settings, name)
        with blaming(f"{group}.{name}"):
            found = None if given is None else find(given)
        if found != given:
            config = config.model_copy(update={group: settings.model_copy(update={name: found})})
    return config


def complete_model(model: ModelSettings, sequence: int | None = None) -> ModelSettings:
    """Fill in the preset, the settings of the weights to load, then the family's defaults; keys the user gave
    win.

    Args:
        model: as the user gave it.
        sequence: ``data.sequence``, for ``max_positions``; None leaves that ``auto``.

    Raises:
        ConfigError: an unknown preset, or one of another family than the one given, a family that is not
            supported, or weights that cannot be used with these settings.
    """
    given: dict[str, Any] = {name: getattr(model, name) for name in model.model_fields_set}
    if model.preset is not None:
        shape = preset(model.preset)
        if given.get("family", shape["family"]) != shape["family"]:
            raise ConfigError(
                "model.family",
                f"found {given['family']!r}, but model.preset {model.preset} is of family "
                f"{shape['family']!r}; remove one of the two",
            )
        given = {**shape, **given}
    if model.load is not None:
        given = with_source(model.load, given)
    model = ModelSettings.model_validate(given)
    if model.head_dim == "auto" and model.hidden % model.heads:
        raise ConfigError(
            "model.hidden",
            f"{model.hidden} is not divisible by model.heads {model.heads}; change one or set model.head_dim",
        )
    defaults = family(model.family).defaults(model)
    if sequence is not None:
        scaling = model.rope_scaling  # a model is made for what its frequencies are scaled for
        scaled = 0
        if scaling is not None and scaling.type != "linear":  # which does not say from where
            scaled = int(scaling.original_positions * (1 if scaling.type == "dynamic" else scaling.factor))
        defaults["max_positions"] = max(sequence, scaled)
    filled = {name: value for name, value in defaults.items() if getattr(model, name) == "auto"}
    model = model.model_copy(update=filled)
    if model.moe is not None and model.moe.ffn_hidden == "auto":
        experts = model.moe.model_copy(update={"ffn_hidden": int(model.ffn_hidden)})
        return model.model_copy(update={"moe": experts})
    return model


def _check_used(given: ModelSettings, model: ModelSettings) -> None:
    """Refuse settings that the user gave and the family does not use; values that a resolved configuration
    contains, defaults and those of its preset, are accepted."""
    harmless = {ModelSettings().rope_theta}
    if given.preset is not None:
        harmless.add(preset(given.preset).get("rope_theta", ModelSettings().rope_theta))
    if not family(model.family).rotary and given.rope_theta not in harmless:
        raise ConfigError(
            "model.rope_theta",
            f"found {given.rope_theta!r}, but {model.family} has learned positions, not rotary ones; "
            "remove it",
        )
