"""Megatron-LM's configurations, layer specifications and enumerations, as far as scripts pass them on: the
model is the one that the flags describe, and what a script passes has to agree with it."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
from torch.nn import functional

from hexad.config import HexadError

from ..facade.absent import MissingAttribute
from .enums import (  # noqa: F401
    AttnBackend,
    AttnMaskType,
    AttnType,
    CudaGraphScope,
    LayerType,
    ModelType,
)
from .initialize import get_args
from .tables import FLAGS, SETTINGS

_COMPUTED: dict[str, Callable[[Any], Any]] = {
    "ffn_hidden_size": lambda config: 4 * config.hidden_size,
    "kv_channels": lambda config: config.hidden_size // config.num_attention_heads,
    "num_query_groups": lambda config: config.num_attention_heads,
}
"""Settings that follow from others, unless they are given."""
_DEFAULTS = {name: setting.default for name, setting in SETTINGS.items()} | {
    "activation_func": functional.gelu,
    "params_dtype": torch.float32,
}
_Settings: Any = make_dataclass(
    "_Settings",
    [(name, Any, field(default=value)) for name, value in _DEFAULTS.items()],
    init=False,
    eq=False,
)


class TransformerConfig(_Settings):
    """Any settings of a transformer under Megatron-LM's names. They have to agree with the flags; without
    flags the model is theirs. Those that are not given have Megatron-Core's defaults. Scripts derive
    dataclasses with further settings from it."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Compute the settings that follow from others."""
        if self.hidden_size and self.num_attention_heads:
            for name, compute in _COMPUTED.items():
                if getattr(self, name) is None:
                    setattr(self, name, compute(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingAttribute(
            f"{type(self).__name__!r} object has no attribute {name!r}: Megatron-Core has no such setting; "
            "remove it from the script, or give it to the configuration"
        )


_COMPARED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "layernorm_epsilon",
    "hidden_dropout",
    "attention_dropout",
    "num_moe_experts",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
)
"""Settings of which a model has one value only."""


def _attribute(setting: str) -> str:
    """The attribute of ``get_args()`` that a setting is determined by."""
    flag = FLAGS.get(SETTINGS[setting].target)
    return setting if flag is None else flag.attribute


def core_transformer_config_from_args(args: Namespace, config_class: Any = None) -> Any:
    """The settings of ``get_args()`` as a :class:`TransformerConfig`."""
    settings = dict(vars(args))
    settings |= {name: getattr(args, _attribute(name)) for name in ("layernorm_epsilon", "num_moe_experts")}
    settings |= {
        "gated_linear_unit": args.swiglu,
        "pipeline_dtype": args.params_dtype,
        "mtp_num_layers": None,
        "init_method": None,
        "output_layer_init_method": None,
    }
    return TransformerConfig(**settings)


def core_transformer_config_from_yaml(args: Namespace, transfomer_key: str = "language_model") -> Any:
    """Settings of ``--yaml-cfg``, which is refused.

    Raises:
        HexadError: always.
    """
    raise HexadError("core_transformer_config_from_yaml: settings are those of the flags: use get_args()")


def check_agrees(what: str, values: dict[str, Any], known: dict[str, Any]) -> None:
    """Refuse values that a script passes and that are not those of the flags.

    Raises:
        HexadError: naming the first one.
    """
    for name, value in values.items():
        if value is not None and name in known and value != known[name]:
            raise HexadError(
                f"{what}: found {name} {value!r}, but the flags say {known[name]!r}; make them equal: the "
                "model is that of the flags"
            )


def check_config(config: Any) -> None:
    """Refuse a configuration of another model than that of the flags.

    Raises:
        HexadError: naming the first setting.
    """
    args = get_args()
    known = {name: getattr(args, _attribute(name)) for name in _COMPARED}
    check_agrees("config", {name: getattr(config, name, None) for name in _COMPARED}, known)


@dataclass(eq=False)
class ModuleSpec:
    """Which modules a layer is made of: ``GPTModel`` accepts what a function of this module returns; user-
    defined layers are built by ``build_module``."""

    module: Any = None
    params: Any = None
    submodules: Any = None


@dataclass(eq=False)
class LayerSpec(ModuleSpec):
    """The layers of the flags; without flags, those of a ``TransformerConfig`` with these options.

    Attributes:
        options: ``num_experts`` and ``qk_layernorm``.
    """

    options: Mapping[str, Any] = field(default_factory=dict)


_OF_FLAGS = LayerSpec("the layer of the flags")


def layer_spec(*_: Any, **__: Any) -> ModuleSpec:
    """The specification of the flags' layers; the arguments, kernels and options of those, have no effect."""
    return _OF_FLAGS


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    *_: Any,
    **__: Any,
) -> ModuleSpec:
    """The specification of layers; other arguments, options of kernels, have no effect. With flags these
    decide."""
    return LayerSpec(_OF_FLAGS.module, options={"num_experts": num_experts, "qk_layernorm": qk_layernorm})


get_gpt_layer_with_transformer_engine_spec = get_gpt_layer_local_spec
get_gpt_decoder_block_spec = layer_spec
get_gpt_layer_with_inference_spec = layer_spec
get_gpt_heterogeneous_layer_spec = layer_spec


def get_gpt_decoder_layer_specs(config: Any, *_: Any, **__: Any) -> list[ModuleSpec]:
    """The specification of the flags' layers, for every layer."""
    return [_OF_FLAGS] * int(config.num_layers)


def get_gpt_mtp_block_spec(*_: Any, **__: Any) -> None:
    """None: only the next token is predicted."""


def import_module(module_path: Any) -> Any:
    """``--spec`` is refused.

    Raises:
        HexadError: always.
    """
    raise HexadError(f"import_module: found {module_path}; layers are those of the flags: leave out --spec")


def check_spec(spec: Any) -> None:
    """Refuse layers that are not those of the flags.

    Raises:
        HexadError: for any other specification.
    """
    if spec is not None and not isinstance(spec, LayerSpec):
        raise HexadError(
            f"transformer_layer_spec: found a {type(spec).__name__} of other modules; pass what "
            "get_gpt_layer_local_spec() returns: layers are those of the flags"
        )
