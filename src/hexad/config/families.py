"""What a family or a preset fills in, so that a resolved model has no ``auto`` but the vocabulary."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError, did_you_mean
from .presets import PRESETS
from .schema import ModelSettings
from .sources import with_source


def complete_model(model: ModelSettings) -> ModelSettings:
    """Fill in the preset, the settings of the weights to load, then the family's defaults; keys the user gave
    win.

    Raises:
        ConfigError: an unknown preset, or weights that cannot be used with these settings.
    """
    given: dict[str, Any] = {name: getattr(model, name) for name in model.model_fields_set}
    if model.preset is not None:
        if model.preset not in PRESETS:
            hint = did_you_mean(model.preset, PRESETS) or f"; known: {', '.join(sorted(PRESETS))}"
            raise ConfigError("model.preset", f"unknown preset '{model.preset}'{hint}")
        given = {**PRESETS[model.preset], **given}
    if model.load is not None:
        given = with_source(model.load, given)
    model = ModelSettings.model_validate(given)
    gpt2 = model.family == "gpt2"
    defaults = {
        "kv_heads": model.heads if gpt2 or model.heads % 4 else 4,
        "head_dim": model.hidden // model.heads,
        "ffn_hidden": 4 * model.hidden if gpt2 else -(-8 * model.hidden // (3 * 64)) * 64,
        "tied_embeddings": gpt2,
        "qkv_bias": gpt2 or model.family == "qwen2",
        "qk_norm": model.family == "qwen3",
    }
    if model.head_dim == "auto" and model.hidden % model.heads:
        raise ConfigError(
            "model.hidden",
            f"{model.hidden} is not divisible by model.heads {model.heads}; change one or set model.head_dim",
        )
    filled = {name: value for name, value in defaults.items() if getattr(model, name) == "auto"}
    return model.model_copy(update=filled)


def check_used(given: ModelSettings, model: ModelSettings, sequence: int) -> None:
    """Refuse settings that the user gave and the family has no use for.

    What a resolved configuration states of itself is let pass: defaults, what its preset has, and positions
    that equal the sequence length.

    Args:
        given: the user's settings, as they were given.
        model: the same, completed.
        sequence: ``data.sequence``.

    Raises:
        ConfigError: naming the setting.
    """
    preset = PRESETS.get(given.preset or "", {})
    useless: dict[str, tuple[str, set[Any]]] = {
        "rope_theta": ("has learned positions, not rotary ones", {ModelSettings().rope_theta})
    }
    if model.family != "gpt2":
        useless = {"max_positions": ("has rotary positions and no table of them", {"auto", sequence})}
    for name, (why, harmless) in useless.items():
        found = getattr(given, name)
        if name in given.model_fields_set and found not in harmless | {preset.get(name)}:
            raise ConfigError(f"model.{name}", f"found {found!r}, but {model.family} {why}; remove it")
