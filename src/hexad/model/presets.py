"""The published models that ``model.preset`` names, as a table. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from hexad.config.model import ModelSettings

from .configuration import complete_model
from .counts import parameter_count
from .families import family, presets


@dataclass(frozen=True)
class Preset:
    """A published model.

    Attributes:
        name: for ``model.preset``.
        family: of its architecture.
        parameters: exact number, a tied embedding counted once.
        layers, hidden, heads, kv_heads, ffn_hidden, vocab: as the settings of the same name.
        context: tokens of the longest sequence that it was published for; None if not stated.
    """

    name: str
    family: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    context: int | None


def preset_table() -> list[Preset]:
    """All presets, family after family, in the order of their declaration."""
    return [_row(name) for name in presets()]


def _row(name: str) -> Preset:
    model = complete_model(ModelSettings(preset=name))
    return Preset(
        name=name,
        family=model.family,
        parameters=parameter_count(model),
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=int(model.kv_heads),
        ffn_hidden=int(model.ffn_hidden),
        vocab=int(model.vocab),
        context=family(model.family).context(name),
    )
