"""A configuration whose model is complete: preset, family and the weights to load filled in. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hexad.config import Config, ConfigError, blaming, parse_config, read_tree, shown
from hexad.config.hub import local, local_tokenizer
from hexad.config.model import ModelSettings, MoeSettings

from .families import families, family, preset
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
        source = getattr(settings, name)
        with blaming(f"{group}.{name}"):
            directory = None if source is None else find(source)
        if directory != source:
            config = config.model_copy(update={group: settings.model_copy(update={name: directory})})
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
    configured: dict[str, Any] = {name: getattr(model, name) for name in model.model_fields_set}
    if model.preset is not None:
        shape = preset(model.preset)
        if configured.get("family", shape["family"]) != shape["family"]:
            raise ConfigError(
                "model.family",
                f"found {configured['family']!r}, but model.preset {model.preset} is of family "
                f"{shape['family']!r}; remove one of the two",
            )
        if isinstance(experts := configured.get("moe"), MoeSettings) and shape.get("moe") is not None:
            configured["moe"] = {
                **shape["moe"],
                **{name: getattr(experts, name) for name in experts.model_fields_set},
            }
        configured = {**shape, **configured}
    if model.load is not None:
        configured = with_source(model.load, configured)
    model = ModelSettings.model_validate(configured)
    if model.head_dim == "auto" and model.mla is None and model.hidden % model.heads:
        raise ConfigError(
            "model.hidden",
            f"{model.hidden} is not divisible by model.heads {model.heads}; change one or set model.head_dim",
        )
    _check_latent(model)
    if model.moe is None and not family(model.family).mixture(model):
        settings = "{experts, top_k, ffn_hidden, ...}"
        raise ConfigError("model.moe", f"found null, but {model.family} has experts; set {settings}")
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


def _check_latent(model: ModelSettings) -> None:
    """Refuse latent attention in a family that has none, its absence in one that has it, and settings that
    contradict it."""
    name, mla = model.family, model.mla
    if mla is None:
        if family(name).latent:
            ranks = "{q_rank, kv_rank, nope_dim, rope_dim, value_dim}"
            raise ConfigError("model.mla", f"found null, but {name} has latent attention; set {ranks}")
        return
    if not family(name).latent:
        having = [other for other in families() if family(other).latent]
        raise ConfigError(
            "model.mla",
            f"found {shown(mla.model_dump())}, but {name} has no latent attention; remove it, or use "
            f"model.family {' or '.join(having)}",
        )
    if mla.rope_dim % 2:
        raise ConfigError(
            "model.mla.rope_dim", f"found {mla.rope_dim}, expected an even number (rotary pairs)"
        )
    follows = {
        "kv_heads": (model.heads, "every head has its own keys and values: model.heads"),
        "head_dim": (mla.head_dim, "nope_dim + rope_dim of model.mla"),
        "qkv_bias": (False, "its projections have no biases"),
        "out_bias": (False, "its projections have no biases"),
        "qk_norm": (False, "it has norms of the latent vectors"),
        "rotary_fraction": (1.0, "model.mla.rope_dim is what is rotated"),
    }
    for field, (value, why) in follows.items():
        if (setting := getattr(model, field)) not in ("auto", value):
            problem = f"found {setting}, expected {value} with model.mla ({why}); remove it"
            raise ConfigError(f"model.{field}", problem)


def _check_used(settings: ModelSettings, model: ModelSettings) -> None:
    """Refuse settings that the user gave and the family does not use; values that a resolved configuration
    contains, defaults and those of its preset, are accepted."""
    harmless = {ModelSettings().rope_theta}
    if settings.preset is not None:
        harmless.add(preset(settings.preset).get("rope_theta", ModelSettings().rope_theta))
    if not family(model.family).rotary and settings.rope_theta not in harmless:
        raise ConfigError(
            "model.rope_theta",
            f"found {settings.rope_theta!r}, but {model.family} has learned positions, not rotary ones; "
            "remove it",
        )
