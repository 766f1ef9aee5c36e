"""Families of models: the modules and options it picks, its published names, and how its ``config.json`` is
read, with errors that name the key. No torch."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, Literal

from hexad.config import HexadError
from hexad.config.model import ModelSettings, RopeScaling

_LARGEST = 1e300
"""Integers in JSON may be too large for a float."""
_MOST_SHOWN = 200
"""Letters of a value in a message."""


class ConfigFile:
    """A ``config.json`` with what missing keys mean in its family; messages name its path."""

    def __init__(self, raw: Mapping[str, Any], path: Path, absent: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = {**absent, **raw}

    def problem(self, key: str, expected: str, found_value: Any = ...) -> HexadError:
        """An error that names the file, the key and the value found."""
        value = self.raw.get(key) if found_value is ... else found_value
        text = json.dumps(value)
        text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."
        return HexadError(f"{self.path}: {key}: found {text}, {expected}")

    def count(self, key: str, absent: int | None = None) -> int:
        """A whole number from 1; ``absent`` is what null means, if it means anything."""
        value = self.raw.get(key)
        if value is None and absent is not None:
            return absent
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.problem(key, "expected a whole number from 1")
        return value

    def number(self, key: str) -> float:
        """Any number from 0; null is 0."""
        value = self.raw.get(key)
        kinds = int, float, type(None)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= (value or 0) < _LARGEST:
            raise self.problem(key, "expected a number from 0")
        return float(value or 0)

    def above_zero(self, key: str, value: Any) -> float:
        """A value that stands at ``key``: any number above 0."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
            raise self.problem(key, "expected a number above 0", value)
        return value

    def switch(self, key: str) -> bool:
        """True or false."""
        value = self.raw.get(key)
        if not isinstance(value, bool):
            raise self.problem(key, "expected true or false")
        return value


def one_dropout(keys: ConfigFile) -> dict[str, Any]:
    """Refuse a ``config.json`` that drops embeddings and branches with different probabilities."""
    dropout = keys.number("resid_pdrop")
    if keys.number("embd_pdrop") != dropout:
        raise keys.problem(
            "embd_pdrop", f"expected that of resid_pdrop, {dropout}: model.dropout is for both"
        )
    return {}


ModelShape = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One entry: everything that the code must know of a family.

    Attributes:
        name: of the family, and ``model_type`` of its ``config.json``.
        classes: of ``transformers``: with the head, and without.
        norm: over the residual stream: RMSNorm or LayerNorm.
        rotary: rotary positions; otherwise a learned table.
        gated: SwiGLU; otherwise GELU.
        qkv_bias, out_bias, mlp_bias, qk_norm, tied: defaults of ``model.qkv_bias``, ``out_bias``,
            ``mlp_bias``, ``qk_norm`` and ``tied_embeddings``.
        biases: key of ``config.json`` -> the settings of biases that it switches.
        grouped: ``model.kv_heads`` is 4 by default, where that divides the heads; otherwise all heads.
        latent: multi-head latent attention (``model.mla``), whose rotary pairs are neighbours.
        whole_heads: its class of ``transformers`` requires ``hidden`` to be a multiple of ``heads``.
        presets: published models by name: values of :class:`ModelSettings`, each with the checkpoint whose
            ``config.json`` it was taken from.
        contexts: what names of presets begin with -> tokens of the longest sequence they were published for,
            without extensions that the preset lacks; for display.
        modules: our module -> its name in a published state dict. Several of ours with one of theirs are
            fused there, one after the other along the outputs.
        experts: weight of a layer's experts -> names of an expert's matrices in published files, one after
            the other in ours; ``{}`` is the number of the expert. Its name in ``modules`` is that of all
            experts' in one tensor, as a model of ``transformers`` 5 has them in memory.
        in_memory: our module -> its name in such a model, where files have another.
        mixture: whether a model's experts are some that the family can have.
        prediction_layers: key of ``config.json`` with the number of layers behind the last, which predict
            further tokens and are left out.
        types: further values of ``model_type``.
        theta: what ``transformers`` takes for a missing base of the rotary frequencies.
        base: what all published names but the head's begin with; files saved without the head lack it.
        layer: what a layer's published names begin with, after ``base``.
        transposed: matrices of layers are stored as ``[in, out]``.
        scalings: types of ``model.rope_scaling`` that its configuration class accepts.
        buffers: pattern of stored tensors, after ``base``, that are no weights.
        keys: setting -> key of ``config.json``.
        absent: what ``transformers`` takes for keys that a ``config.json`` lacks.
        aliases: further names of keys.
        layer_types: of ``config.json``, one of which all layers have.
        fixed: keys and the values with which ``transformers`` computes what we do; written on export, and
            any other value is refused on import.
        also: further values of ``fixed`` keys that mean the same.
        reads: keys that ``read`` accepts, and other families do not.
        read: settings from what else its ``config.json`` has; refuses what is not supported.
        write: keys of ``config.json`` from further settings.
    """

    name: str
    classes: tuple[str, str]
    modules: Mapping[str, str]
    keys: Mapping[str, str]
    absent: Mapping[str, Any]
    norm: Literal["rms", "layer"] = "rms"
    rotary: bool = True
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    grouped: bool = True
    latent: bool = False
    whole_heads: bool = False
    presets: Mapping[str, ModelShape] = field(default_factory=dict)
    contexts: Mapping[str, int] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_memory: Mapping[str, str] = field(default_factory=dict)
    mixture: Callable[[ModelSettings], bool] = lambda model: model.moe is None
    prediction_layers: str = ""
    types: tuple[str, ...] = ()
    theta: float = 10000.0
    base: str = "model."
    layer: str = "layers.{}."
    transposed: bool = False
    scalings: tuple[str, ...] = tuple(RopeScaling.USED)
    buffers: str = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    aliases: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layer_types: tuple[str, ...] = ("full_attention",)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    read: Callable[[ConfigFile], dict[str, Any]] = lambda keys: {}
    write: Callable[[ModelSettings], dict[str, Any]] = lambda model: {}

    def context(self, preset: str) -> int | None:
        """Tokens that a preset was published for; None if not stated."""
        starts = [start for start in self.contexts if preset.startswith(start)]
        return self.contexts[max(starts, key=len)] if starts else None

    def published(self, name: str) -> str:
        """The name in a published state dict of one of our tensors, or of a module."""
        before, rest = _in_layer(name)
        return self._published(before, rest, self.modules)

    def spellings(self, name: str) -> tuple[str, ...]:
        """The names that one of our tensors, or a module, may have in a published state dict; the one in
        files first."""
        before, rest = _in_layer(name)
        names = [self._published(before, rest, self.modules)]
        if self._module(rest, self.in_memory) is not None:
            names.append(self._published(before, rest, self.in_memory))
        return tuple(names)

    def names(self, name: str, expert: int = 0) -> tuple[str, ...]:
        """All published names of one of our tensors or of a module; of a stack of experts' matrices, those of
        one expert too. Empty where the family has none."""
        if self.of_experts(name):
            return (*self.spellings(name), *(path.format(expert) for path in self.expert_names(name)))
        try:
            return self.spellings(name)
        except KeyError:
            return ()

    def of_experts(self, name: str) -> bool:
        """Whether one of our tensors is published expert by expert."""
        return _in_layer(name)[1] in self.experts

    def expert_names(self, name: str) -> tuple[str, ...]:
        """The names of the matrices of an expert, ``{}``, in one of our stacks."""
        before, rest = _in_layer(name)
        return tuple(f"{self.base}{self.layer.format(before)}{path}" for path in self.experts[rest])

    def _published(self, layer: str, rest: str, modules: Mapping[str, str]) -> str:
        module = self._module(rest, modules)
        if module is None:
            raise KeyError(rest)
        base = "" if not layer and module == "head" else self.base
        before = self.layer.format(layer) if layer else ""
        return f"{base}{before}{modules[module]}{rest.removeprefix(module)}"

    @staticmethod
    def _module(rest: str, modules: Mapping[str, str]) -> str | None:
        return next((path for path in (rest, rest.rpartition(".")[0]) if path in modules), None)

    def defaults(self, model: ModelSettings) -> dict[str, Any]:
        """Values of ``auto`` for the settings that follow from others."""
        heads, hidden = model.heads, model.hidden
        width = hidden // heads if model.mla is None else model.mla.head_dim
        return {
            "kv_heads": 4 if self.grouped and model.mla is None and heads % 4 == 0 else heads,
            "head_dim": width,
            "ffn_hidden": -(-8 * hidden // (3 * 64)) * 64 if self.gated else 4 * hidden,
            "tied_embeddings": self.tied,
            "qkv_bias": self.qkv_bias,
            "out_bias": self.out_bias,
            "mlp_bias": self.mlp_bias,
            "qk_norm": self.qk_norm,
            "attention_multiplier": 1 / sqrt(width if model.head_dim == "auto" else model.head_dim),
        }


def _in_layer(name: str) -> tuple[str, str]:
    """The number of a tensor's layer, empty outside of layers, and the rest of its name."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return ("", name) if layer is None else (layer[1], layer[2])
