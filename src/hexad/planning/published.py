"""Published measurements as jobs: rows of the calibration format. No torch.

A row is a JSON object: a model's shape, the GPUs, a layout and what was measured. What a row leaves out, or
the planner cannot express, is the reason why it is not covered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from hexad.config import HexadError
from hexad.config.model import LoraSettings, MlaSettings, ModelSettings, MoeSettings
from hexad.model.configuration import complete_model
from hexad.model.inventory import ModelInventory
from hexad.model.recompute_inventory import Part, Recompute
from hexad.parallel.inventory import Execution
from hexad.parallel.pipeline.partition import LayerCosts, partition
from hexad.parallel.pipeline.schedules import build_schedule, stages_per_rank
from hexad.topology.hardware import load_hardware
from hexad.topology.hardware.constants import Format
from hexad.topology.layout import Layout

from .implementation import Implementation, implementation
from .job import Job, stages_of
from .links import Cluster


class Uncovered(HexadError):
    """A row that cannot be expressed, and why."""


@dataclass(frozen=True)
class Published:
    """A measurement.

    Attributes:
        name: ``id`` of the row.
        source: of the row.
        job, cluster, system: what was measured, where, by which implementation.
        seconds: of a step; None if not measured.
        memory: peak bytes of a rank; None if not measured.
        out_of_memory: it did not fit.
    """

    name: str
    source: str
    job: Job
    cluster: Cluster
    system: Implementation
    seconds: float | None
    memory: float | None
    out_of_memory: bool


_SYSTEMS = (
    (r"vtrain", "vtrain"),
    (r"korthikanti|sc21|zero bubble", "megatron-2022"),
    (r"bloom|megatron-deepspeed", "megatron-deepspeed"),
    (r"torchtitan", "torchtitan"),
    (r"llm-foundry|mosaic", "llm-foundry"),
    (r"nanotron", "nanotron"),
    (r"automodel", "automodel"),
    (r"hexad", "hexad"),
)
"""Patterns of sources and the implementation that they measured; of others ``megatron-core``."""


def system_of(source: str) -> str:
    """The name of the implementation that a source measured."""
    for pattern, name in _SYSTEMS:
        if re.search(pattern, source.lower()):
            return name
    return "megatron-core"


def published(row: Mapping[str, Any]) -> Published:
    """A row of the calibration format.

    Raises:
        Uncovered: naming what it lacks, or what the planner cannot express.
    """
    try:
        return _published(row)
    except Uncovered:
        raise
    except HexadError as error:
        raise Uncovered(str(error)) from error


def _published(row: Mapping[str, Any]) -> Published:
    shape, measured = row.get("model") or {}, row.get("measured") or {}
    system = implementation(row.get("system") or system_of(str(row.get("source", ""))))
    model, sequence = _model(shape, row), _number(shape, "seq", "model.seq")
    layout, microbatches = _layout(row), _microbatches(row)
    run = _execution(row, layout, sequence, system)
    inventory = ModelInventory(model, run.sequence, layout.tensor)
    _check_divisible(model, layout)
    schedule_name, virtual = _schedule(row, layout)
    stages = layout.pipeline * stages_per_rank(schedule_name, virtual)
    layers = partition("even", model.layers, stages, LayerCosts(0.0, (1.0,) * model.layers, 0.0))
    schedule = build_schedule(schedule_name, layout.pipeline, microbatches, virtual)
    recompute, again = _recompute(row, model)
    zero, replicas = _sharding(row, layout)
    job = Job(
        inventory,
        layout,
        run,
        recompute,
        schedule,
        *stages_of(inventory, layout, layers, schedule),
        zero,
        replicas,
        bucket=system.bucket_mb * 2**20,
        update=system.update,
        attention_again=again,
        eight=_eight(row),
    )
    return Published(
        name=str(row.get("id")),
        source=str(row.get("source")),
        job=job,
        cluster=_cluster(row),
        system=system,
        seconds=_seconds(measured, job, layout),
        memory=_memory(measured),
        out_of_memory=bool(measured.get("oom")),
    )


def _number(tree: Mapping[str, Any], key: str, name: str | None = None) -> int:
    value = tree.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 1:
        raise Uncovered(f"{name or key} is not stated")
    return int(value)


def _model(shape: Mapping[str, Any], row: Mapping[str, Any]) -> ModelSettings:
    if "hybrid" in shape:
        raise Uncovered("Mamba layers are not modelled")
    moe, mla = shape.get("moe"), shape.get("mla")
    if moe and moe.get("latent"):
        raise Uncovered("experts in a latent space are not modelled")
    sizes = {name: _number(shape, name, f"model.{name}") for name in ("layers", "hidden", "heads")}
    gated, bias = bool(shape.get("gated")), bool(shape.get("bias"))
    settings: dict[str, Any] = {
        **sizes,
        "family": "llama" if gated else "gpt2",
        "kv_heads": int(shape.get("kv_heads") or sizes["heads"]),
        "ffn_hidden": _number(shape, "ffn", "model.ffn"),
        "vocab": int(shape.get("vocab") or 51200),
        "tied_embeddings": bool(shape.get("tied")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
    }
    if shape.get("head_dim") or sizes["hidden"] % sizes["heads"]:
        settings["head_dim"] = int(shape.get("head_dim") or round(sizes["hidden"] / sizes["heads"]))
    if "lora" in str(row.get("task", "")).lower():
        settings["lora"] = LoraSettings(rank=16)
    model = complete_model(ModelSettings(**settings), int(shape.get("seq") or 1))
    update: dict[str, Any] = {}
    if isinstance(shape.get("sliding_window"), int):
        update["sliding_window"] = shape["sliding_window"]
    if shape.get("mtp"):
        # Each step of multi-token prediction has a layer of its own; its product with the output matrix is
        # not counted.
        update["layers"] = model.layers + int(shape["mtp"])
    if moe:
        update["moe"] = _experts(shape, moe)
    if mla:
        widths = {"kv_rank": "kv_lora", "nope_dim": "qk_nope", "rope_dim": "qk_rope", "value_dim": "v"}
        ranks = {ours: int(mla[theirs]) for ours, theirs in widths.items()}
        update["mla"] = MlaSettings(q_rank=mla.get("q_lora") or None, **ranks)
    return model.model_copy(update=update)


def _experts(shape: Mapping[str, Any], moe: Mapping[str, Any]) -> MoeSettings:
    width = int(moe.get("moe_ffn") or shape["ffn"])
    shared = int(moe.get("shared") or 0)
    if moe.get("shared_ffn"):
        shared = max(1, round(int(moe["shared_ffn"]) / width))
    return MoeSettings(
        experts=int(moe["experts"]),
        top_k=int(moe["topk"]),
        ffn_hidden=width,
        shared_experts=shared,
        every=int(moe.get("every") or 1),
        first_dense=int(moe.get("first_dense") or shape.get("first_dense") or 0),
        forced=True,
        allowance=1.0,
        dispatcher="alltoall",
    )


def _layout(row: Mapping[str, Any]) -> Layout:
    tensor, context, pipeline, expert = (int(row.get(name) or 1) for name in ("tp", "cp", "pp", "ep"))
    return Layout(
        world=_number(row, "n_gpus"),
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=int(row.get("etp") or 1) if expert > 1 else 1,
    )


def _microbatches(row: Mapping[str, Any]) -> int:
    if row.get("n_microbatches"):
        return int(row["n_microbatches"])
    layout = _layout(row)
    whole, micro = _number(row, "global_batch"), _number(row, "micro_batch")
    return max(1, round(whole / (micro * int(layout.data))))


def _execution(row: Mapping[str, Any], layout: Layout, sequence: int, system: Implementation) -> Execution:
    precision = str(row.get("precision") or "bf16").lower()
    narrow = any(word in precision for word in ("fp8", "float8", "nvfp4", "mxfp"))
    return Execution(
        _number(row, "micro_batch"),
        sequence,
        layout.tensor,
        bool(row.get("sp")) and layout.tensor > 1,
        byte=2,
        gradient=4,
        reduced=system.reduced,
        fp8=narrow,
        fp8_weight_gradients=narrow,
        cpu=False,
        compiled=True,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        chunks=system.chunks if layout.tensor > 1 else 1,
        keeps_gradients=True,
    )


def _eight(row: Mapping[str, Any]) -> Format:
    precision = str(row.get("precision") or "").lower()
    return "nvfp4" if "nvfp4" in precision else "fp8"


def _check_divisible(model: ModelSettings, layout: Layout) -> None:
    if model.heads % layout.tensor:
        raise Uncovered("heads do not divide by the tensor degree")
    if model.moe is not None and model.moe.experts % layout.expert:
        raise Uncovered("experts do not divide by the expert degree")


_SCHEDULES = (
    ("zb-v", "zb_v"),
    ("zb-h2", "zb_h2"),
    ("zb-2p", "zb_h2"),
    ("zb-h1", "zb_h1"),
    ("zb-1p", "zb_h1"),
)


def _schedule(row: Mapping[str, Any], layout: Layout) -> tuple[str, int]:
    """Name and stages per rank of the pipeline's schedule."""
    name, virtual = str(row.get("schedule") or "").lower(), int(row.get("vp") or 1)
    if layout.pipeline == 1:
        return "1f1b", 1
    for pattern, ours in _SCHEDULES:
        if pattern in name:
            return ours, 1
    if virtual > 1:
        return "interleaved", virtual
    return "1f1b", 1


_PARTS: dict[str, Part] = {
    "layernorm": "norms",
    "mla_up_proj": "mla_up",
    "moe_act": "moe_act",
    "mlp": "activations",
}


def _recompute(row: Mapping[str, Any], model: ModelSettings) -> tuple[Recompute, bool]:
    """What is recomputed, and whether attention's core is."""
    text = str(row.get("recompute") or "none").lower()
    if text.startswith(("none", "see perf_recipes")):
        return Recompute(), False
    if text.startswith("full"):
        some = re.search(r"(\d+) of (\d+) layers", text)
        return Recompute("full", int(some[1]) if some else None), False
    parts = frozenset(part for word, part in _PARTS.items() if re.search(rf"\b{word}\b", text))
    core = text == "selective" or "core_attn" in text or "save_qkv_proj" in text or "all but" in text
    return Recompute("none", None, parts), core


def _sharding(row: Mapping[str, Any], layout: Layout) -> tuple[int, int]:
    """ZeRO level, and replicas of the sharded state."""
    text = str(row.get("zero_fsdp") or "none").lower()
    ranks = layout.gradient_ranks
    if "fsdp" in text or "full_shard" in text or "zero-3" in text:
        size = re.search(r"fsdp2?\s+(\d+)", text)
        shards = int(size[1]) if size else ranks
        return 3, max(1, ranks // max(1, shards))
    if "zero-2" in text:
        return 2, 1
    return (1 if "zero-1" in text or "distributed" in text else 0), 1


def _cluster(row: Mapping[str, Any]) -> Cluster:
    name = str(row.get("gpu"))
    text = f"{name} {row.get('note') or ''}"
    network = None
    if rate := re.search(r"=\s*(\d+)\s*Gb/s", name):  # of a node of eight
        network = int(rate[1]) / 8 / 8 * 1e9
    elif rate := re.search(r"(\d)x\s*OmniPath\s*(\d+)G", text):
        network = int(rate[1]) * int(rate[2]) / 8 / 8 * 1e9
    return Cluster(load_hardware(name), _number(row, "n_gpus"), network)


def _seconds(measured: Mapping[str, Any], job: Job, layout: Layout) -> float | None:
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    rate = measured.get("tokens_per_s_per_gpu")
    if rate and isfinite(rate):
        return job.tokens / layout.world / float(rate)
    return None


def _memory(measured: Mapping[str, Any]) -> float | None:
    if measured.get("peak_mem_gib"):
        return float(measured["peak_mem_gib"]) * 2**30
    return float(measured["peak_mem_gb"]) * 1e9 if measured.get("peak_mem_gb") else None
