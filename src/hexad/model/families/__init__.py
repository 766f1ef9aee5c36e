"""Families of models: one file each, found by the name that ``model.family`` gives. No torch."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import get_args

from hexad.config import ConfigError, did_you_mean
from hexad.config.model import Family as FamilyName

from .family import Family, ModelShape


def families() -> tuple[str, ...]:
    """The names of ``model.family`` that this version supports."""
    return tuple(name for name in get_args(FamilyName) if find_spec(f"{__name__}.{name}"))


@cache
def family(name: str) -> Family:
    """A family's entry.

    Raises:
        ConfigError: this version does not support it.
    """
    if name not in families():
        choices = ", ".join(families())
        raise ConfigError(
            "model.family", f"found {name!r}, which this version does not support; use {choices}"
        )
    return import_module(f"{__name__}.{name}").FAMILY


def preset(name: str) -> ModelShape:
    """The settings of a published model.

    Raises:
        ConfigError: there is none of this name.
    """
    known = presets()
    if name not in known:
        # Of other makers are sizes that look alike, but never what was meant.
        alike = [other for other in known if other[:1] == name[:1].lower()]
        hint = did_you_mean(name.lower(), alike) or f"; known: {', '.join(sorted(known))}"
        raise ConfigError("model.preset", f"unknown preset '{name}'{hint}")
    return known[name]


@cache
def presets() -> dict[str, ModelShape]:
    """Settings of all published models, by name."""
    return {
        name: {"family": known, "qkv_bias": family(known).qkv_bias, "qk_norm": family(known).qk_norm, **shape}
        for known in families()
        for name, shape in family(known).presets.items()
    }
