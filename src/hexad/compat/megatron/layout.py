"""The layout of a launch line: degrees, stages, ZeRO, recomputation. No torch."""

import re
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from hexad.config import ConfigError

from .tables import flag_of

_CONTEXT = {"p2p": "ring", "a2a": "ulysses", "allgather": "all_gather", "a2a+p2p": "ulysses_ring"}
"""``--cp-comm-type`` -> ``parallel.context_method``."""
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""``--data-parallel-sharding-strategy``, by level of ZeRO."""
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_ZERO_BUBBLE = ("enable_zero_bubble", "enable_zbh1_pipeline")
_DIVISIONS = (
    ("pipeline_model_parallel_layout",),
    ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    ("pp_partition_method",),
    ("num_layer_list",),
)
"""Attributes of flags that divide layers among pipeline ranks, of which one way is given."""


def layout_settings(arguments: Namespace) -> dict[str, dict[str, Any]]:
    """The groups ``parallel`` and ``memory``.

    Raises:
        ConfigError: flags that exclude each other, do not fit, or that Hexad cannot honour.
    """
    parallel: dict[str, Any] = {
        "tensor": arguments.tensor_model_parallel_size,
        "sequence": arguments.sequence_parallel,
        "context": arguments.context_parallel_size,
        "pipeline": arguments.pipeline_model_parallel_size,
        "zero": _zero(arguments),
    }
    if arguments.context_parallel_size > 1:
        parallel |= _context(arguments)
    if arguments.pipeline_model_parallel_size > 1:
        parallel |= _stages(arguments)
    else:
        for name in (*_VIRTUAL, *_DIVISIONS[0], *_DIVISIONS[1]):
            value = getattr(arguments, name)
            if value is not None:
                problem = f"found {value} with --pipeline-model-parallel-size 1; leave it out"
                raise ConfigError(flag_of(name), problem)
    if arguments.num_distributed_optimizer_instances > 1:
        parallel["replicas"] = arguments.num_distributed_optimizer_instances
    if arguments.use_tp_pp_dp_mapping:
        parallel["order"] = "tensor-context-expert-pipeline-data"
    if arguments.ddp_bucket_size:
        parallel["bucket_mb"] = arguments.ddp_bucket_size * 4 / 2**20
    return {"parallel": parallel, "memory": _memory(arguments)}


def _zero(arguments: Namespace) -> int:
    """``parallel.zero``; several flags that determine it need to agree."""
    stage, strategy = arguments.zero_stage, arguments.data_parallel_sharding_strategy
    if stage is not None and not 0 <= stage <= 3:
        raise ConfigError("--zero-stage", f"found {stage}, expected 0, 1, 2 or 3")
    levels: dict[str, int] = {}
    if arguments.use_torch_fsdp2:
        levels["--use-torch-fsdp2"] = 3
    if arguments.use_megatron_fsdp and strategy != _STRATEGIES[0]:
        levels[f"--data-parallel-sharding-strategy {strategy}"] = _STRATEGIES.index(strategy)
    elif arguments.use_distributed_optimizer:  # which Megatron-FSDP needs at every level
        levels["--use-distributed-optimizer"] = 1
    if stage is not None:
        levels[f"--zero-stage {stage}"] = int(stage)
    for one, level in levels.items():
        other = next((name for name in levels if levels[name] != level), None)
        if other is not None:
            raise ConfigError(
                other.split(" ")[0],
                f"sets ZeRO level {levels[other]}, but {one} sets level {level}; leave one out",
            )
    return next(iter(levels.values()), 0)


def _context(arguments: Namespace) -> dict[str, Any]:
    kinds, sizes = set(arguments.cp_comm_type), arguments.hierarchical_context_parallel_sizes
    kind = kinds.pop()
    if kinds or kind not in _CONTEXT:
        raise ConfigError(
            "--cp-comm-type",
            f"found {' '.join(arguments.cp_comm_type)}, expected one of {', '.join(_CONTEXT)} for all layers",
        )
    settings: dict[str, Any] = {"context_method": _CONTEXT[kind]}
    if kind != "a2a+p2p" and sizes is not None:
        raise ConfigError(
            "--hierarchical-context-parallel-sizes", f"found with --cp-comm-type {kind}; use a2a+p2p"
        )
    if kind == "a2a+p2p":
        if sizes is None or len(sizes) != 2 or sizes[0] * sizes[1] != arguments.context_parallel_size:
            raise ConfigError(
                "--hierarchical-context-parallel-sizes",
                f"found {sizes}, expected two numbers whose product is --context-parallel-size "
                f"{arguments.context_parallel_size}",
            )
        settings["context_ulysses"] = sizes[0]
    return settings


def _stages(arguments: Namespace) -> dict[str, Any]:
    """``virtual_stages``, ``schedule`` and ``split``."""
    _one_way(arguments, *_DIVISIONS)
    _one_way(arguments, _DIVISIONS[0], *((name,) for name in _VIRTUAL))
    pipeline = arguments.pipeline_model_parallel_size
    if arguments.pipeline_model_parallel_layout is not None:
        sizes = _from_text(arguments.pipeline_model_parallel_layout, arguments.num_layers, pipeline)
        split: str | list[int] = sizes
        virtual = len(sizes) // pipeline
    else:
        virtual = _virtual(arguments, pipeline)
        split = _split(arguments, pipeline, virtual)
    arguments.virtual_pipeline_model_parallel_size = virtual if virtual > 1 else None
    settings = {"schedule": _schedule(arguments, virtual), "virtual_stages": virtual}
    group = arguments.microbatch_group_size_per_vp_stage
    if group is not None and virtual > 1:
        settings["schedule_group"] = group
    return {**settings, "split": split}


def _schedule(arguments: Namespace, virtual: int) -> str:
    """``parallel.schedule``."""
    if arguments.zero_bubble_v_schedule:
        return "zb_v"
    flags = [flag_of(name) for name in _ZERO_BUBBLE if getattr(arguments, name)]
    if not flags:
        return "interleaved" if virtual > 1 else "1f1b"
    if virtual > 1:
        problem = f"found with {virtual} stages per pipeline rank; add --zero-bubble-v-schedule, or use one"
        raise ConfigError(flags[0], problem)
    return "zb_h1"


def _one_way(arguments: Namespace, *ways: Sequence[str]) -> None:
    """Refuse flags of two ways."""
    chosen = [name for names in ways for name in [n for n in names if getattr(arguments, n)][:1]]
    if len(chosen) > 1:
        raise ConfigError(flag_of(chosen[1]), f"found beside {flag_of(chosen[0])}; give one of them")


def _virtual(arguments: Namespace, pipeline: int) -> int:
    """``parallel.virtual_stages``: the number of stages per pipeline rank."""
    size = arguments.num_layers_per_virtual_pipeline_stage
    number = arguments.num_virtual_stages_per_pipeline_rank
    if arguments.zero_bubble_v_schedule:
        return 2
    if number is not None or size is None:
        return number or 1
    layers = arguments.num_layers + sum(_extra(arguments))
    if layers % (pipeline * size):
        raise ConfigError(
            "--num-layers-per-virtual-pipeline-stage",
            f"found {size}, which with pipeline {pipeline} does not divide {layers} layers; use a divisor of "
            f"{layers / pipeline:g}",
        )
    return int(layers // pipeline // size)


def _extra(arguments: Namespace) -> tuple[int, int]:
    """The numbers of layers that embedding and loss count as."""
    return (
        int(arguments.account_for_embedding_in_pipeline_split),
        int(arguments.account_for_loss_in_pipeline_split),
    )


def _split(arguments: Namespace, pipeline: int, virtual: int) -> str | list[int]:
    """``parallel.split``: the number of layers per stage."""
    layers = arguments.num_layers
    first, last = arguments.decoder_first_pipeline_num_layers, arguments.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        end = "first" if first is not None else "last"
        ends = [count for count in (first, last) if count is not None]
        others, left = pipeline - len(ends), layers - sum(ends)
        sizes = [*ends[: first is not None], *[left // max(others, 1)] * others, *ends[first is not None :]]
        if sum(sizes) != layers or any(size % virtual for size in sizes):
            raise ConfigError(
                f"--decoder-{end}-pipeline-num-layers",
                f"found {' and '.join(map(str, ends))}, which leaves {left} of {layers} layers for {others} "
                f"pipeline ranks of {virtual} stages; change it",
            )
        return [size // virtual for size in sizes] * virtual
    if arguments.num_layer_list is not None:
        return _listed(arguments.num_layer_list, layers, pipeline, virtual)
    embedding, loss = _extra(arguments)
    method = arguments.pp_partition_method
    if method is not None and method != "uniform":
        kinds = set(method.removeprefix("type:").split("|"))
        if not method.startswith("type:") or not {"transformer"} <= kinds <= {"transformer", "embedding"}:
            raise ConfigError(
                "--pp-partition-method",
                f"found {method!r}; use uniform, type:transformer or type:transformer|embedding",
            )
        if "embedding" in kinds:  # the tied head counts as one too
            embedding = loss = 1
    if not embedding + loss:
        return "even"
    stages = pipeline * virtual
    if (layers + embedding + loss) % stages:
        raise ConfigError(
            "--num-layers",
            f"found {layers}, with embedding and loss {layers + embedding + loss}, which do not divide by "
            f"{stages} stages; change one of them",
        )
    size = (layers + embedding + loss) // stages
    return [size - embedding * (n == 0) - loss * (n == stages - 1) for n in range(stages)]


def _listed(text: str, layers: int, pipeline: int, virtual: int) -> list[int]:
    """``--num-layer-list``: the number of layers of each pipeline rank."""
    sizes = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if len(sizes) != text.count(",") + 1 or len(sizes) != pipeline or sum(sizes) != layers or virtual > 1:
        raise ConfigError(
            "--num-layer-list",
            f"found {text!r}, expected {pipeline} numbers whose sum is {layers}, with one stage per "
            "pipeline rank",
        )
    return sizes


def _from_text(text: str, layers: int, pipeline: int) -> list[int]:
    """``--pipeline-model-parallel-layout``: stages of ``E`` (embedding), ``t`` (layers) and ``L`` (loss),
    separated by ``|``; ``x*3`` and ``(...)*3`` repeat."""
    plain = re.sub(r"[\s,]", "", text)
    while (shorter := re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), plain)) != plain:
        plain = shorter
    plain = re.sub(r"([EtL|])\*(\d+)", lambda m: m[1] * int(m[2]), plain)
    stages = plain.split("|")
    counts = [stage.count("t") for stage in stages]
    well_formed = re.fullmatch(r"E[t|]*L", plain) is not None
    if not well_formed or sum(counts) != layers or len(stages) % pipeline:
        raise ConfigError(
            "--pipeline-model-parallel-layout",
            f"found {text!r}: {len(stages)} stages of {sum(counts)} layers; expected E, t and L of {layers} "
            f"layers, and a multiple of {pipeline} stages",
        )
    return counts


def _memory(arguments: Namespace) -> dict[str, Any]:
    memory: dict[str, Any] = {"offload": "optimizer"} if arguments.optimizer_cpu_offload else {}
    kind, flag = _recompute(arguments)
    method, layers = arguments.recompute_method, arguments.recompute_num_layers
    if flag == "--checkpoint-activations":
        return {"recompute": kind, **memory}
    if kind == "selective" and method is not None:
        raise ConfigError("--recompute-method", f"found {method} with {flag}; leave it out")
    if kind == "selective":
        return {**_selective(arguments.recompute_modules or ["core_attn"]), **memory}
    if kind == "full" and method is None:
        raise ConfigError("--recompute-granularity", "found full without --recompute-method; add uniform")
    if kind == "full" and layers is not None and layers < (method == "uniform"):
        at_least = f"expected at least {int(method == 'uniform')} with {method}; raise it"
        raise ConfigError("--recompute-num-layers", f"found {layers}, {at_least}")
    if kind == "full" and method == "block":
        if layers == 0:
            return {"recompute": "none", **memory}
        if layers is None:
            raise ConfigError("--recompute-method", "found block without --recompute-num-layers; give it")
        if layers > arguments.num_layers:
            raise ConfigError(
                "--recompute-num-layers",
                f"found {layers}, expected at most --num-layers {arguments.num_layers}; lower it",
            )
        memory["recompute_layers"] = layers
    return {"recompute": kind, **memory}


_PARTS = {"layernorm": "norms", "moe_act": "moe_act", "mla_up_proj": "mla_up"}
"""Modules that are recomputed there -> parts of a layer."""


def _selective(modules: list[str]) -> dict[str, Any]:
    """What is recomputed of layers. Attention never keeps its scores, which is what ``core_attn`` is about;
    it stands for all that ``selective`` recomputes."""
    parts = [_PARTS[module] for module in dict.fromkeys(modules) if module in _PARTS]
    kind = "selective" if "core_attn" in modules else "none"
    return {"recompute": kind, **({"recompute_parts": parts} if parts else {})}


def _recompute(arguments: Namespace) -> tuple[str, str]:
    """``memory.recompute``, and the flag that determines it; several need to agree."""
    kind = arguments.recompute_granularity
    kinds = {f"--recompute-granularity {kind}": kind} if kind is not None else {}
    if arguments.checkpoint_activations:
        kinds["--checkpoint-activations"] = "full"
    if arguments.recompute_activations:
        kinds["--recompute-activations"] = "selective"
    if len(set(kinds.values())) > 1:
        one, *_, other = kinds
        raise ConfigError(other, f"found with {one}; leave one out")
    flag = next(iter(kinds), "")
    return kinds.get(flag, "none"), flag
