"""The model of a script without flags: a ``TransformerConfig`` and the arguments of ``GPTModel``, translated
as the flags of a launch line are."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from hexad.comm import from_first
from hexad.config import ConfigError, HexadError, did_you_mean, wording
from hexad.model.configuration import load_config
from hexad.planning import Resolved, resolve
from hexad.topology.mesh import Mesh

from ..facade.random_states import model_seed
from . import parallel_state
from .arguments import Line, defaults, derive, shown
from .initialize import divide_heads
from .tables import FLAGS, SETTINGS, meaning_of
from .translate import translated

_DEGREES = {
    row.name: row.target.removeprefix("parallel.")
    for row in SETTINGS.values()
    if row.target in ("parallel.tensor", "parallel.pipeline", "parallel.context")
}
"""Settings that the mesh decides -> axes; 1, Megatron-Core's default: any."""
_SCALE = "model.attention_multiplier"
"""Hexad's setting for ``softmax_scale``, for which there is no flag."""
_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "GELU": functional.gelu,
    "SiLU": functional.silu,
}
"""By name."""
_POSITIONS = {
    "position_embedding_type": "position_embedding_type",
    "rotary_percent": "rotary_percent",
    "rotary_base": "rotary_base",
    "rope_scaling": "use_rope_scaling",
    "rope_scaling_factor": "rope_scaling_factor",
}
"""Argument of ``GPTModel`` -> attribute of a flag."""


def resolved_core_model(config: Any, spec: Any, arguments: Mapping[str, Any]) -> Resolved:
    """The model that a ``TransformerConfig`` describes, on the mesh of ``parallel_state``.

    Args:
        config: any object with its settings.
        spec: what a function as ``get_gpt_layer_local_spec`` has returned, or None.
        arguments: of ``GPTModel``: ``vocab_size``, ``max_sequence_length``, and those that are not None of
            ``share_embeddings_and_output_weights``, ``position_embedding_type``, ``rotary_percent``,
            ``rotary_base``, ``rope_scaling`` and ``rope_scaling_factor``.

    Raises:
        HexadError: settings that Hexad cannot honour, naming them.
    """
    if config is None:
        raise HexadError(
            "GPTModel: found config None and no flags; pass a TransformerConfig, or call initialize_megatron"
        )
    mesh = parallel_state.get_mesh()
    with wording(_word):
        namespace = _namespace(config, spec, arguments, mesh)
        line = Line(namespace, (), frozenset(), ())
        tree = translated(line, script=True).tree
        tree["model"]["vocab"] = _vocab(arguments["vocab_size"], mesh)
        overrides = _overrides(config)
        resolved = resolve(load_config(tree, overrides), mesh.layout)
        divide_heads(resolved.config)
    return resolved


def _namespace(config: Any, spec: Any, arguments: Mapping[str, Any], mesh: Mesh) -> Namespace:
    """The attributes of the flags that describe the same model, complete."""
    namespace = defaults()
    _check_names(config)
    for setting in SETTINGS.values():
        value = getattr(config, setting.name, setting.default)
        if value is None:
            continue
        if (meaning := meaning_of(setting)).effect == "refused" and value != setting.default:
            raise ConfigError(f"TransformerConfig.{setting.name}", meaning.problem(_text(value)))
        if meaning.effect == "becomes" and setting.target in FLAGS:
            setattr(namespace, FLAGS[setting.target].attribute, value)
    _architecture(namespace, config, spec, arguments)
    _layout(namespace, config, mesh)
    length = arguments["max_sequence_length"]
    if not isinstance(length, int) or length < 1:
        raise HexadError(f"GPTModel: found max_sequence_length {length}; pass a number of tokens")
    namespace.max_position_embeddings = namespace.seq_length = length
    # Of a run: the model does not depend on them.
    namespace.micro_batch_size, namespace.train_iters, namespace.lr = 1, 1, 1e-4
    seed = model_seed()
    # The first rank's: scripts seed ranks differently, or only some of them.
    namespace.seed = from_first(lambda: torch.initial_seed() if seed is None else seed, mesh.world) % 2**63
    derive(namespace, mesh.layout.world)
    return namespace


def _check_names(config: Any) -> None:
    """Refuse settings that Megatron-Core does not have and no class of the script's own adds."""
    fields = getattr(type(config), "__dataclass_fields__", {})
    for name in vars(config):
        if name not in SETTINGS and name not in fields and not hasattr(type(config), name):
            raise HexadError(
                f"TransformerConfig: found {name}, which Megatron-Core does not have"
                f"{did_you_mean(name, SETTINGS)}; leave it out"
            )


def _text(value: Any) -> str:
    plain = isinstance(value, bool | int | float | str | list | tuple)
    return shown(value) if plain else type(value).__name__


def _architecture(namespace: Namespace, config: Any, spec: Any, arguments: Mapping[str, Any]) -> None:
    """Set what several settings, the layer's specification and the arguments of the model decide together."""
    options = getattr(spec, "options", {})
    if options.get("num_experts"):
        raise ConfigError(
            "transformer_layer_spec",
            f"found num_experts {options['num_experts']}; "
            "experts are not supported yet outside a run.yaml (model.moe)",
        )
    namespace.qk_layernorm = bool(namespace.qk_layernorm or options.get("qk_layernorm"))
    namespace.group_query_attention = getattr(config, "num_query_groups", None) is not None
    activation = getattr(config, "activation_func", None) or functional.gelu
    kind = _kind_of(activation)
    if kind != ("SiLU" if namespace.swiglu else "GELU"):
        gated = "with" if namespace.swiglu else "without"
        raise ConfigError(
            "TransformerConfig.activation_func",
            f"found {getattr(activation, '__name__', activation)} {gated} gated_linear_unit; use GELU "
            "without, or SiLU with it",
        )
    if kind == "GELU" and not _same(activation, lambda x: functional.gelu(x, approximate="tanh"), 1e-9):
        _note("TransformerConfig.activation_func: GELU is computed by its tanh approximation")
    namespace.untie_embeddings_and_output_weights = not arguments["share_embeddings_and_output_weights"]
    window = getattr(config, "window_size", None)
    if not (window is None or isinstance(window, tuple | list)):
        raise ConfigError("TransformerConfig.window_size", f"found {_text(window)}, expected (LEFT, 0)")
    namespace.window_size = None if window is None else ",".join(map(str, window))
    for name, attribute in _POSITIONS.items():
        if arguments[name] is not None:
            setattr(namespace, attribute, arguments[name])


def _kind_of(activation: Any) -> str | None:
    """The name of an activation function, told by its values."""
    return next((name for name, known in _ACTIVATIONS.items() if _same(activation, known, 2e-3)), None)


def _same(activation: Any, known: Callable[[torch.Tensor], torch.Tensor], tolerance: float) -> bool:
    """Whether two functions agree; False where one does not take numbers."""
    points = torch.linspace(-4, 4, 33, dtype=torch.float64)
    try:
        values = activation(points)
        return bool(torch.allclose(values, known(points), rtol=0, atol=tolerance))
    except Exception:  # of any kind: it is the script's
        return False


def _note(text: str) -> None:
    if parallel_state.get_mesh().rank == 0:
        print(f"hexad: {text}", file=sys.stderr)


def _layout(namespace: Namespace, config: Any, mesh: Mesh) -> None:
    """Set the degrees: those of the mesh, which the settings must not contradict."""
    layout = mesh.layout
    for name, axis in _DEGREES.items():
        degree, value = getattr(layout, axis), getattr(config, name, None)
        if value not in (None, 1, degree):
            raise ConfigError(
                f"TransformerConfig.{name}",
                f"found {value}, but parallel_state has {degree}; make them equal, or leave it out",
            )
        setattr(namespace, name, degree)
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if namespace.num_virtual_stages_per_pipeline_rank not in (None, virtual):
        raise ConfigError(
            "TransformerConfig.virtual_pipeline_model_parallel_size",
            f"found {namespace.num_virtual_stages_per_pipeline_rank}, but parallel_state has {virtual}; "
            "pass it to initialize_model_parallel",
        )
    namespace.num_virtual_stages_per_pipeline_rank = virtual
    order = layout.order.split("-")
    namespace.use_tp_pp_dp_mapping = order.index("pipeline") < order.index("data")


def _overrides(config: Any) -> list[str]:
    """Settings that no flag determines."""
    dtype = getattr(config, "params_dtype", None) or torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(
            "TransformerConfig.params_dtype", f"found {dtype}; use {', '.join(map(str, _DTYPES))}"
        )
    for name, half in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(config, name, False) and dtype != half:
            raise ConfigError(
                "TransformerConfig.params_dtype",
                f"found {dtype} with {name}; use {half}, or leave out {name}",
            )
    overrides = [f"precision.dtype={_DTYPES[dtype]}"]
    scale = getattr(config, "softmax_scale", None)
    return overrides if scale is None else [*overrides, f"{_SCALE}={scale}"]


def _vocab(size: Any, mesh: Mesh) -> int:
    """The vocabulary, which tensor ranks share evenly, as in Megatron-Core."""
    ranks = mesh.tensor.size
    if not isinstance(size, int) or size < 1 or size % ranks:
        raise HexadError(
            f"GPTModel: found vocab_size {size}, expected a multiple of the {ranks} tensor ranks; pad it"
        )
    return size


def _word(name: str) -> str:
    """The setting of a ``TransformerConfig``, or the argument of ``GPTModel``, that determines a flag or a
    setting of Hexad."""
    if name == _SCALE:
        return "TransformerConfig.softmax_scale"
    flags = [FLAGS[name]] if name in FLAGS else [flag for flag in FLAGS.values() if flag.target == name]
    names = {row.target: row.name for row in SETTINGS.values()}
    for flag in flags:
        setting = names.get(flag.name, flag.attribute)
        if setting in SETTINGS:
            return f"TransformerConfig.{setting}"
    return f"GPTModel.{flags[0].attribute}" if flags else name
