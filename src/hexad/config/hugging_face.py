"""Between the ``config.json`` of a Hugging Face model and our model settings. No torch.

Whatever in a ``config.json`` would change the numbers and is not supported is refused. Keys that are missing
mean what they mean to ``transformers``; the tests compare :data:`DEFAULTS` with its classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import HexadError
from .schema import Family

CONFIG_FILE = "config.json"

CLASSES: dict[Family, tuple[str, str]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}
"""Classes of ``transformers`` by family (its ``model_type``): with the head, and without."""

_ROTARY = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "head_dim": None,
}
_QWEN = {
    **_ROTARY,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: dict[Family, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "llama": {
        **_ROTARY,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {
        **_ROTARY,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
}
"""What ``transformers`` takes for keys that a ``config.json`` lacks."""

_NAMES_GPT2 = {  # the general names, which gpt2 understands too
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

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


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a model's directory.

    Raises:
        HexadError: no directory, no such file, or one that is not a JSON object.
    """
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise HexadError(f"{directory}: no such directory; expected a Hugging Face model with {CONFIG_FILE}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HexadError(f"{directory}: not a Hugging Face model: {CONFIG_FILE} is missing") from None
    except (OSError, ValueError) as error:
        raise HexadError(f"{path}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise HexadError(f"{path}: found a {type(raw).__name__}, expected an object of settings")
    return raw


def model_settings(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Model settings, as ``run.yaml`` would give them, of a ``config.json``.

    Args:
        raw: its content.
        path: where it stands, for messages.

    Raises:
        HexadError: an architecture or a feature that is not supported, or a malformed value.
    """
    keys = _Keys(raw, path)
    settings = _gpt2(keys) if keys.family == "gpt2" else _rotary(keys)
    tied = keys.found("tie_word_embeddings")
    if not isinstance(tied, bool):
        raise keys.problem("tie_word_embeddings", tied, "expected true or false")
    if std := keys.number("initializer_range"):
        settings["init_std"] = std
    return {"family": keys.family, "vocab": keys.count("vocab_size"), "tied_embeddings": tied, **settings}


def positions(raw: Mapping[str, Any], path: Path) -> int:
    """The longest sequence that a ``config.json`` is made for, in tokens."""
    keys = _Keys(raw, path)
    return keys.count("n_positions" if keys.family == "gpt2" else "max_position_embeddings")


class _Keys:
    """A ``config.json`` with the defaults of its family, checked for what is not supported."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self.family = self._family(raw)
        names = _NAMES_GPT2 if self.family == "gpt2" else {}
        self.raw = {**DEFAULTS[self.family], **{names.get(key, key): value for key, value in raw.items()}}
        for key, supported in _ONLY.items():
            if self.family == "qwen2" and key == "attention_bias":
                continue  # qwen2 has its biases whatever the key says
            found = self.raw.get(key)
            if found is not None and found not in supported:
                choices = ", ".join(map(json.dumps, supported)) or "null"
                raise self.problem(key, found, f"which is not supported; expected {choices}")
        kinds = self.raw.get("layer_types")
        if kinds is not None and (kinds != ["full_attention"] * len(kinds)):
            raise self.problem("layer_types", kinds, "but every layer must be full_attention")

    def _family(self, raw: Mapping[str, Any]) -> Family:
        classes, kind = raw.get("architectures"), raw.get("model_type")
        supported = ", ".join(causal for causal, _ in CLASSES.values())
        if kind not in CLASSES:
            shown = classes[0] if isinstance(classes, list) and classes else None
            named = f" ({shown})" if shown else ""
            raise self.problem("model_type", kind, f"not supported{named}; supported: {supported}")
        family: Family = kind
        for name in classes if isinstance(classes, list) else []:
            if name not in CLASSES[family]:
                raise self.problem("architectures", name, f"not supported; supported: {supported}")
        return family

    def found(self, key: str) -> Any:
        """The value, or what its absence means."""
        return self.raw[key]

    def problem(self, key: str, found: Any, expected: str) -> HexadError:
        """An error that names the file, the key and the value found."""
        return HexadError(f"{self.path}: {key}: found {json.dumps(found)}, {expected}")

    def count(self, key: str, absent: int | None = None) -> int:
        """A number from 1; null where ``absent`` says what that means."""
        found = self.raw[key]
        if found is None and absent is not None:
            return absent
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise self.problem(key, found, "expected a whole number from 1")
        return found

    def number(self, key: str) -> float:
        """Any number from 0; null is 0."""
        found = self.raw[key]
        if isinstance(found, bool) or not isinstance(found, (int, float, type(None))) or (found or 0) < 0:
            raise self.problem(key, found, "expected a number from 0")
        return float(found or 0)


def _gpt2(keys: _Keys) -> dict[str, Any]:
    hidden, heads = keys.count("n_embd"), keys.count("n_head")
    if hidden % heads:
        raise keys.problem("n_embd", hidden, f"not divisible by n_head {heads}")
    if keys.number("resid_pdrop") != keys.number("embd_pdrop"):
        raise keys.problem(
            "embd_pdrop",
            keys.found("embd_pdrop"),
            f"expected that of resid_pdrop, {keys.number('resid_pdrop')}: model.dropout is for both",
        )
    return {
        "layers": keys.count("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_hidden": keys.count("n_inner", absent=4 * hidden),
        "max_positions": keys.count("n_positions"),
        "qkv_bias": True,
        "qk_norm": False,
        "norm_eps": keys.number("layer_norm_epsilon"),
        "dropout": keys.number("resid_pdrop"),
        "attention_dropout": keys.number("attn_pdrop"),
    }


def _rotary(keys: _Keys) -> dict[str, Any]:
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if keys.raw["head_dim"] is None and hidden % heads:
        raise keys.problem("hidden_size", hidden, f"not divisible by num_attention_heads {heads}")
    layers = keys.count("num_hidden_layers")
    _no_window(keys, layers)
    theta, scaling = _rope(keys)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys.count("num_key_value_heads", absent=heads),
        "head_dim": keys.count("head_dim", absent=hidden // heads),
        "ffn_hidden": keys.count("intermediate_size"),
        "qkv_bias": keys.family == "qwen2",
        "qk_norm": keys.family == "qwen3",
        "norm_eps": keys.number("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_dropout": keys.number("attention_dropout"),
    }


def _no_window(keys: _Keys, layers: int) -> None:
    """Refuse a sliding window that some layer would use."""
    if keys.family == "llama":
        return
    used = True
    if keys.family != "mistral":
        kinds = keys.raw.get("layer_types")  # where they are given, all of them are full_attention
        used = (
            kinds is None and keys.found("use_sliding_window") and keys.number("max_window_layers") < layers
        )
    window = keys.found("sliding_window")
    if used and window is not None:
        raise keys.problem(
            "sliding_window",
            window,
            "which is not supported; where no sequence is longer than the window, set it to null there",
        )


LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_positions",
}
"""Llama 3's scaling of rotary frequencies: their keys -> the settings of ``model.rope_scaling``."""


def _rope(keys: _Keys) -> tuple[float, dict[str, Any] | None]:
    """Base of the frequencies and Llama 3's scaling, from the keys of transformers 5 or before."""
    raw = keys.raw
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(name) or {}
    if not isinstance(rope, dict):
        raise keys.problem(name, rope, "expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise keys.problem(f"{name}.rope_type", kind, "which is not supported; supported: default, llama3")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or theta <= 0:
        raise keys.problem("rope_theta", theta, "expected a number above 0")
    known = {"rope_type", "type", "rope_theta", *(LLAMA3 if kind == "llama3" else ())}
    for key, value in rope.items():
        if key not in known and not (key == "partial_rotary_factor" and value in (None, 1.0)):
            raise keys.problem(f"{name}.{key}", value, f"which is not supported with rope_type {kind}")
    if kind == "default":
        return float(theta), None
    rope = {"original_max_position_embeddings": raw["max_position_embeddings"], **rope}
    if raw.get("original_max_position_embeddings") is not None:  # which transformers prefers
        rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    scaling = {}
    for theirs, ours in LLAMA3.items():
        found = rope.get(theirs)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or found <= 0:
            raise keys.problem(f"{name}.{theirs}", found, "expected a number above 0")
        scaling[ours] = found
    return float(theta), scaling
