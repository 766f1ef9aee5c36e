"""Converts between the ``config.json`` of a Hugging Face model and our model settings. No torch.

Whatever in a ``config.json`` would change the numbers and is not supported is refused. Keys that are missing
mean what they mean to ``transformers``; the tests compare them with its classes.
"""

import json
import re
from collections.abc import Callable, Mapping
from math import log
from pathlib import Path
from typing import Any

from hexad.config import ConfigError, HexadError, one_line, shown
from hexad.config.files import read_json
from hexad.config.model import ModelSettings, RopeScaling

from .families import Family, families, family
from .families.family import ConfigFile

CONFIG_FILE = "config.json"

_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"),
    "hidden_act": ("silu", "swish"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
}
"""Keys whose other values would change the numbers -> the values supported; null always is."""

BIASES = ("qkv_bias", "out_bias", "mlp_bias")
"""Settings that a family has as it says, or as a key of its ``config.json`` does."""
OPTIONS = (
    "sliding_window",
    "rotary_fraction",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
"""Settings that are their defaults in families whose ``config.json`` has no key for them."""
_READERS: dict[str, Callable[[ConfigFile, str], Any]] = {
    **dict.fromkeys(("vocab", "layers", "hidden", "heads", "max_positions"), ConfigFile.count),
    "tied_embeddings": ConfigFile.switch,
    "sliding_window": lambda keys, key: None if keys.raw.get(key) is None else keys.count(key),
}
"""How settings are read that are no plain numbers from 0."""

_ROPE_KEYS = {
    "original_positions": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
"""Settings of ``model.rope_scaling`` whose keys in ``config.json`` have other names."""


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a model's directory.

    Raises:
        HexadError: no directory, no such file, or one that is not a JSON object.
    """
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise HexadError(f"{directory}: no such directory; expected a Hugging Face model with {CONFIG_FILE}")
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise HexadError(f"{directory}: not a Hugging Face model: {CONFIG_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise HexadError(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(raw, dict):
        raise HexadError(f"{path}: found a {type(raw).__name__}, expected an object of settings")
    return raw


def model_settings(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Model settings, as ``run.yaml`` would give them, of a ``config.json``; messages name its path.

    Raises:
        HexadError: an architecture or a feature that is not supported, or a malformed value.
    """
    kind = _family(raw, path)
    keys = ConfigFile(_renamed(raw, path, kind), path, kind.absent)
    _refuse_unsupported(keys, kind)
    settings: dict[str, Any] = {"family": kind.name, "qk_norm": kind.qk_norm, "moe": None}
    settings |= {name: getattr(kind, name) for name in BIASES}
    for key, names in kind.biases.items():
        settings |= dict.fromkeys(names, keys.switch(key))
    for name, key in kind.keys.items():
        if name not in ("kv_heads", "head_dim", "ffn_hidden"):
            settings[name] = _READERS.get(name, ConfigFile.number)(keys, key)
    if not settings.get("init_std", 1.0):
        del settings["init_std"]
    hidden, heads = settings["hidden"], settings["heads"]
    if not kind.latent and keys.raw.get(kind.keys.get("head_dim", "")) is None and hidden % heads:
        raise keys.problem(kind.keys["hidden"], f"not divisible by {kind.keys['heads']} {heads}")
    follow = {"kv_heads": heads, "head_dim": hidden // heads, "ffn_hidden": 4 * hidden}
    for name, absent in follow.items():
        settings[name] = keys.count(kind.keys[name], absent) if name in kind.keys else absent
    settings.update(_rope(keys, kind) if kind.rotary else {})
    return {**settings, **kind.read(keys)}


def _renamed(raw: Mapping[str, Any], path: Path, kind: Family) -> dict[str, Any]:
    """The keys under the names that the family reads; refuses two names with two values."""
    renamed: dict[str, Any] = {}
    for key, value in raw.items():
        name = kind.aliases.get(key, key)
        if name in renamed and renamed[name] != value:
            problem = f"but {name} is {shown(renamed[name])}; remove one of the two"
            raise ConfigFile(raw, path, {}).problem(key, problem)
        renamed[name] = value
    return renamed


def _family(raw: Mapping[str, Any], path: Path) -> Family:
    keys = ConfigFile(raw, path, {})
    classes, kind = raw.get("architectures"), raw.get("model_type")
    supported = ", ".join(family(name).classes[0] for name in families())
    name = next((name for name in families() if kind in (name, *family(name).types)), None)
    if name is None:
        shown = classes[0] if isinstance(classes, list) and classes else None
        named = f" ({shown})" if shown else ""
        raise keys.problem("model_type", f"not supported{named}; supported: {supported}")
    known = family(name)
    for name in classes if isinstance(classes, list) else []:
        if name not in known.classes:
            raise keys.problem("architectures", f"not supported; supported: {supported}", name)
    return known


def _refuse_unsupported(keys: ConfigFile, kind: Family) -> None:
    only = {key: values for key, values in _ONLY.items() if key not in kind.reads}
    for key, values in {**only, **kind.also}.items():
        value = keys.raw.get(key)
        if key not in (*kind.keys.values(), *kind.biases) and value is not None and value not in values:
            choices = ", ".join(map(json.dumps, values)) or "null"
            raise keys.problem(key, f"which is not supported; expected {choices}")
    kinds = keys.raw.get("layer_types")
    alike = isinstance(kinds, list) and any(kinds == [name] * len(kinds) for name in kind.layer_types)
    if kinds is not None and not alike:
        raise keys.problem("layer_types", f"but every layer must be {' or all '.join(kind.layer_types)}")


def _rope(keys: ConfigFile, family: Family) -> dict[str, Any]:
    """Base of the frequencies, what of a head is rotated, and the scaling for longer sequences, from the keys
    of transformers 5 or before."""
    raw, partial = keys.raw, "rotary_fraction" in family.keys  # may be less than all
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(name) or {}
    if not isinstance(rope, dict):
        raise keys.problem(name, "expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name at first
    if not isinstance(kind, str) or kind not in ("default", *RopeScaling.USED):
        choices = ", ".join(["default", *RopeScaling.USED])
        raise keys.problem(f"{name}.rope_type", f"which is not supported; supported: {choices}", kind)
    theta = keys.above_zero("rope_theta", rope.get("rope_theta", raw.get("rope_theta", family.theta)))
    settings: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": None}
    if partial:
        fraction = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        settings["rotary_fraction"] = 1.0 if fraction is None else fraction
    known = {"rope_type", "type", "rope_theta"}
    if kind != "default":
        settings["rope_scaling"] = _scaling(keys, name, kind, rope)
        known |= {_ROPE_KEYS.get(ours, ours) for ours in RopeScaling.USED[kind]}
        known |= {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
        known |= {"original_max_position_embeddings"} if kind == "linear" else set()
    for key, value in rope.items():
        if key not in known and not (key == "partial_rotary_factor" and (partial or value in (None, 1.0))):
            raise keys.problem(f"{name}.{key}", f"which is not supported with rope_type {kind}", value)
    return settings


def _scaling(keys: ConfigFile, name: str, kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``model.rope_scaling``, from the object that stands at ``name``."""
    positions = keys.raw["max_position_embeddings"]
    original = keys.raw.get("original_max_position_embeddings")  # which transformers prefers
    if kind == "dynamic":  # and here it knows no other
        original = positions
    elif original is None:
        original = rope.get("original_max_position_embeddings", positions)
    values = {key: value for key, value in rope.items() if value is not None}
    values["original_max_position_embeddings"] = original
    if kind in ("yarn", "longrope") and "factor" not in values:
        whole = keys.above_zero("max_position_embeddings", positions)
        values["factor"] = whole / keys.above_zero("original_max_position_embeddings", original)
    settings: dict[str, Any] = {"type": kind}
    for ours in RopeScaling.USED[kind][1:]:
        theirs = _ROPE_KEYS.get(ours, ours)
        value, here = values.get(theirs), f"{name}.{theirs}"
        if ours.endswith("_factors"):
            if not isinstance(value, list):
                raise keys.problem(here, "expected a list of numbers", value)
            settings[ours] = [keys.above_zero(f"{here}[{n}]", number) for n, number in enumerate(value)]
        elif ours == "truncate":
            settings[ours] = value is not False
        elif value is not None or kind == "llama3" or ours == "factor":
            settings[ours] = keys.above_zero(here, value)
    scales = values.get("mscale"), values.get("mscale_all_dim")
    if "attention_factor" not in settings and all(scales) and settings["factor"] > 1:
        numerator, denominator = (
            0.1 * keys.above_zero(f"{name}.mscale", s) * log(settings["factor"]) + 1 for s in scales
        )
        settings["attention_factor"] = numerator / denominator
    return settings


def left_out(raw: Mapping[str, Any], path: Path, model: ModelSettings) -> str:
    """Pattern of the published tensors, after :attr:`Family.base`, of layers that are left out: those that
    predict further tokens (multi-token prediction). Empty where there are none."""
    kind = family(model.family)
    keys = ConfigFile(_renamed(raw, path, kind), path, {})
    if not kind.prediction_layers or not keys.raw.get(kind.prediction_layers):
        return ""
    count = min(keys.count(kind.prediction_layers), model.layers)
    numbers = "|".join(str(number) for number in range(model.layers, model.layers + count))
    return re.escape(kind.layer).replace(r"\{\}", f"({numbers})") + ".+"


def architecture(model: ModelSettings) -> Family:
    """The family as which ``transformers`` computes what this model does: its own, or one that has the biases
    and norms which were switched on or off.

    Raises:
        ConfigError: there is none.
    """
    model_family = family(model.family)
    for kind in (model_family, *(family(name) for name in families() if name != model_family.name)):
        if _fits(model, model_family, kind):
            return kind
    heads = f"model.heads {model.heads}, kv_heads {model.kv_heads}, head_dim {model.head_dim}"
    classes = ", ".join(family(name).classes[0] for name in families())
    plain = ModelSettings()
    others = [
        f"{name} {getattr(model, name)}" for name in OPTIONS if getattr(model, name) != getattr(plain, name)
    ]
    biases = ", ".join(f"{name} {getattr(model, name)}" for name in BIASES)
    known = f"{biases}, qk_norm {model.qk_norm}"
    if model.moe is not None:
        others.append(f"moe {shown(model.moe.model_dump(exclude_defaults=True))}")
    description = ", ".join([f"hidden {model.hidden}", heads, *others])
    raise ConfigError(
        "model.family",
        f"found {model.family} with {known}, {description}: none of {classes} is so",
    )


def _fits(model: ModelSettings, model_family: Family, kind: Family) -> bool:
    same = all(
        getattr(kind, name) == getattr(model_family, name) for name in ("norm", "rotary", "gated", "latent")
    )
    if not same or model.qk_norm != kind.qk_norm or not _has_biases(model, kind) or not kind.mixture(model):
        return False
    if kind.whole_heads and model.hidden % model.heads:
        return False  # refused by its config class, though its layers could
    assumed: dict[str, Any] = {"kv_heads": model.heads, "head_dim": model.hidden / model.heads}
    assumed["attention_multiplier"] = kind.defaults(model)["attention_multiplier"]
    if kind.latent:  # both of which it writes
        assumed |= {name: getattr(model, name) for name in ("head_dim", "attention_multiplier")}
    plain = ModelSettings()
    assumed |= {name: getattr(plain, name) for name in OPTIONS}
    return all(getattr(model, name) == value for name, value in assumed.items() if name not in kind.keys)


def _has_biases(model: ModelSettings, kind: Family) -> bool:
    """Whether a family can have the model's biases."""
    switched = [name for names in kind.biases.values() for name in names]
    fixed = [name for name in BIASES if name not in switched]
    return all(getattr(model, name) == getattr(kind, name) for name in fixed) and all(
        len({getattr(model, name) for name in names}) == 1 for names in kind.biases.values()
    )


def config_json(model: ModelSettings, dtype: str, special: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a model, in keys that transformers 4 and 5 read.

    Args:
        model: resolved.
        dtype: of its weights, in torch's word.
        special: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.

    Raises:
        ConfigError: ``transformers`` has no such model.
    """
    kind = architecture(model)
    written = {key: getattr(model, name) for name, key in kind.keys.items()}
    if "head_dim" not in kind.absent and model.head_dim == model.hidden / model.heads:
        written.pop("head_dim", None)  # no key of the class, though it is read where it stands
    return {
        "architectures": [kind.classes[0]],
        "model_type": kind.name,
        **written,
        **(_rope_json(model, kind) if kind.rotary else {}),
        **{key: getattr(model, names[0]) for key, names in kind.biases.items()},
        **kind.fixed,
        **kind.write(model),
        **{key: special.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _rope_json(model: ModelSettings, kind: Family) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    if scaling.type not in kind.scalings:
        raise ConfigError(
            "model.rope_scaling.type",
            f"found {scaling.type}, but {kind.classes[0]} of transformers has "
            f"{', '.join(kind.scalings)} only",
        )
    values = {
        _ROPE_KEYS.get(ours, ours): getattr(scaling, ours) for ours in RopeScaling.USED[scaling.type][1:]
    }
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    if values.get("attention_factor") == "auto":
        del values["attention_factor"]
    if scaling.type == "dynamic":  # it takes the longest sequence for the original one
        if scaling.original_positions != model.max_positions:
            problem = f"found {scaling.original_positions}, but transformers takes max_positions for it"
            raise ConfigError(
                "model.rope_scaling.original_positions", f"{problem}, {model.max_positions}; set them alike"
            )
        del values["original_max_position_embeddings"]
    if scaling.type != "longrope":
        return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": scaling.type, **values}}
    # Versions of Phi3Config expect these three keys alone, and the original length outside.
    outside = {"original_max_position_embeddings": values.pop("original_max_position_embeddings")}
    if scaling.factor * scaling.original_positions == model.max_positions:
        del values["factor"]
    return {"rope_theta": model.rope_theta, "rope_scaling": {"type": scaling.type, **values}, **outside}
