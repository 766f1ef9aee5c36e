"""``model.load``: the model settings of whoever trained the weights. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hexad.config import ConfigError, HexadError, blaming, one_line, shown
from hexad.config.hub import PREFIX as HUGGING_FACE
from hexad.config.load import read_yaml
from hexad.config.model import ModelSettings, MoeSettings

from .families import family
from .hugging_face import CONFIG_FILE, OPTIONS, model_settings, read_config

TRAINED = ("train", "lora")
"""Settings of what is trained, which weights neither depend on nor bring along."""

FREE = ("dropout", "attention_dropout", "init_std")
"""Settings that the weights do not depend on."""


def hugging_face_directory(load: str) -> Path | None:
    """The directory of ``hf:DIR``; None for a run or checkpoint of ours."""
    return Path(load.removeprefix(HUGGING_FACE)) if load.startswith(HUGGING_FACE) else None


def with_source(load: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Model settings, completed from those of the weights that ``model.load`` names.

    A resolved configuration, which gives all of them, needs no source: a run resumes from its own checkpoints
    after the weights that it was started with are gone.

    Raises:
        ConfigError: the source cannot be read or is not supported, or a setting is given another value.
    """
    settings = {name: value for name, value in settings.items() if value != "auto"}
    try:
        with blaming("model.load"):
            source = _settings(load)
    except ConfigError:
        if _complete(settings):
            return settings  # if the weights are wanted after all, whoever opens them says what is wrong
        raise
    if isinstance(experts := settings.get("moe"), MoeSettings) and source.moe is not None:
        settings["moe"] = _experts(load, source.moe, experts)
    for name in source.model_fields_set - {*FREE, *_unused(source.family), *_movable(source.family), "moe"}:
        if name in settings and settings[name] != (expected := getattr(source, name)):
            raise _contradiction(load, name, settings[name], expected)
    if "moe" in settings and (settings["moe"] is None) != (source.moe is None):
        raise _contradiction(load, "moe", settings["moe"], source.moe)
    return {**{name: getattr(source, name) for name in source.model_fields_set}, **settings}


def _experts(load: str, source: MoeSettings, settings: MoeSettings) -> MoeSettings:
    """The experts of the weights, with the settings of their training that were given; others must be the
    same."""
    free = settings.OF_TRAINING
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    values = {name: value for name, value in values.items() if value != "auto" or name in free}
    for name, value in values.items():
        if name not in free and value != (expected := getattr(source, name)):
            raise _contradiction(load, f"moe.{name}", value, expected)
    return source.model_copy(update=values)


def _contradiction(load: str, name: str, value: Any, expected: Any) -> ConfigError:
    setting, other = (shown(_plain(side)) for side in (value, expected))
    fix = "; hexad checkpoint upcycle makes one with experts" if name == "moe" and expected is None else ""
    return ConfigError(
        f"model.{name}", f"found {setting}, but {load} (model.load) has {other}; remove one of the two{fix}"
    )


def _complete(settings: Mapping[str, Any]) -> bool:
    """Whether nothing is left to fill in but what is the same in every model of the family: files that are
    older than such a setting lack it."""
    kind = family(settings.get("family", ModelSettings().family))
    same = {*OPTIONS, "attention_multiplier", "out_bias", "mlp_bias"} - set(kind.keys)
    same |= set() if kind.latent else {"mla"}
    same |= set() if kind.experts else {"moe"}
    free = {*FREE, *_unused(kind.name), *_movable(kind.name), *same}
    return set(ModelSettings.model_fields) - free <= set(settings)


def _unused(name: str) -> tuple[str, ...]:
    """Settings that weights of this family neither determine nor bring along."""
    positions = () if family(name).rotary else ("rope_theta", "rope_scaling")
    return "preset", "load", *TRAINED, *positions


def _movable(name: str) -> tuple[str, ...]:
    """Settings that weights bring along, but do not determine: rotary positions have no weights, so that a
    run may raise their number."""
    return ("max_positions",) if family(name).rotary else ()


def _settings(load: str) -> ModelSettings:
    directory = hugging_face_directory(load)
    if directory is not None:
        tree, path = model_settings(read_config(directory), directory / CONFIG_FILE), directory / CONFIG_FILE
    else:
        path = Path(load) / "config.yaml"
        tree = _saved(path)
    try:
        return ModelSettings.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise HexadError(f"{path}: {name}: found {shown(first['input'])}: {first['msg']}") from None


def _saved(path: Path) -> dict[str, Any]:
    """The model settings of a run or checkpoint, both of which have a resolved ``config.yaml``."""
    try:
        tree = read_yaml(path)["model"]
        unused = _unused(tree["family"])
        return {name: value for name, value in tree.items() if name not in unused and value != "auto"}
    except FileNotFoundError:
        raise HexadError(
            f"{path.parent}: neither a run nor a checkpoint: {path.name} is missing "
            f"(a Hugging Face model is given as {HUGGING_FACE}{path.parent})"
        ) from None
    except (OSError, UnicodeDecodeError, TypeError, KeyError, AttributeError) as error:
        raise HexadError(f"{path}: cannot be read: {one_line(error)}") from None


def _plain(value: Any) -> Any:
    """A setting's value as it stands in YAML."""
    return value.model_dump() if hasattr(value, "model_dump") else value
