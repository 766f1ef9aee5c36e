"""Published measurements as jobs: rows of the calibration format. No torch.

A row is a JSON object: a model's shape, the GPUs, a layout and what was measured. What a row leaves out, or
the planner cannot express, is the reason why it is not covered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hexad.config import HexadError
from hexad.config.model import LoraSettings, MlaSettings, ModelSettings, MoeSettings
from hexad.model.configuration import complete_model
from hexad.model.families import family
from hexad.model.inventory import ModelInventory
from hexad.model.recompute_inventory import Recompute, RecomputedPart, RecomputedParts
from hexad.parallel.inventory import Execution
from hexad.parallel.pipeline.partition import LayerCosts, partition
from hexad.parallel.pipeline.schedules import build_schedule, stages_per_rank
from hexad.topology.hardware import load_hardware
from hexad.topology.hardware.constants import Format
from hexad.topology.layout import Layout

from .implementation import Implementation, implementation
from .job import Job, stages_of
from .links import Cluster
from .published_notes import Notes
from .published_times import Unstated, positive, step_seconds


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
        notes: what the row says besides.
        gigabytes: of memory that a GPU is sold with; None where not stated.
        last_rank: ``memory`` is that of the last pipeline rank, else of the fullest.
        analytic: ``memory`` is that of parameters, optimizer and kept activations of the first pipeline rank.
        unmeasured: why there is no time; None where there is one.
    """

    name: str
    source: str
    job: Job
    cluster: Cluster
    system: Implementation
    seconds: float | None
    memory: float | None
    out_of_memory: bool
    notes: Notes
    gigabytes: int | None
    last_rank: bool
    unmeasured: str | None
    analytic: bool = False

    @property
    def balanced(self) -> bool:
        """Whether routing is forced to be even, as in benchmarks of speed."""
        return "functional tests" not in self.source

    @property
    def gated(self) -> bool:
        """Whether feed-forward layers have a gate."""
        return family(self.job.model.settings.family).gated

    @property
    def dropout(self) -> bool:
        """Whether the residual stream has dropout."""
        stated = self.notes.dropout
        return self.system.dropout and not self.gated if stated is None else stated > 0

    @property
    def attention_dropout(self) -> bool:
        """Whether attention scores have dropout."""
        stated = self.notes.attention_dropout
        return self.system.dropout and not self.gated if stated is None else stated > 0


_GPT_VOCABULARY = 51200
"""GPT-2's, padded: of rows that leave the vocabulary out."""
_LARGEST = 10**12
"""The largest size or number that a row may state."""
_VOCABULARY = 128
"""Rows of the vocabulary on a rank are padded to a multiple of this, as Megatron-LM does."""
_SYSTEMS = (
    (r"vtrain", "vtrain"),
    (r"korthikanti|sc21|zero bubble", "megatron-2022"),
    (r"bloom|megatron-deepspeed", "megatron-deepspeed"),
    (r"simumax|functional tests", "megatron-lm"),
    (r"torchtitan", "torchtitan"),
    (r"llm-foundry|mosaic", "llm-foundry"),
    (r"nanotron", "nanotron"),
    (r"automodel", "automodel"),
    (r"maxtext", "maxtext"),
    (r"hexad", "hexad"),
)
"""Patterns of sources and the implementation that they measured; of others ``megatron-core``."""


def system_of(row: Mapping[str, Any]) -> str:
    """The name of the implementation that a row measured, by its source, or by its note."""
    for text in (str(row.get("source", "")), str(row.get("note", ""))):
        for pattern, name in _SYSTEMS:
            if re.search(pattern, text.lower()):
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
    except (HexadError, ValueError) as error:  # sizes that do not divide, or that no model may have
        raise Uncovered(" ".join(str(error).split())[:160]) from error


def _published(row: Mapping[str, Any]) -> Published:
    shape, measured = row.get("model") or {}, row.get("measured") or {}
    notes = Notes.of(row)
    system = _configured(implementation(row.get("system") or system_of(row)), notes)
    model, sequence = _model(shape, row), _number(shape, "seq", "model.seq")
    layout, microbatches = _layout(row), _microbatches(row)
    run = replace(_execution(row, layout, sequence, system), compiled=notes.compiled is not False)
    inventory = ModelInventory(model, run.sequence, layout.tensor, _VOCABULARY)
    _check_divisible(model, layout)
    schedule_name, virtual = _schedule(row, layout)
    stages = layout.pipeline * stages_per_rank(schedule_name, virtual)
    layers = _stage_layers(model, stages, notes)
    schedule = build_schedule(schedule_name, layout.pipeline, microbatches, virtual)
    recompute, again, repeated = _recompute(row, model)
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
        repeated=repeated,
        eight=_eight(row),
        eight_attention=notes.eight_attention,
    )
    try:
        seconds, unmeasured = step_seconds(row, job), None
    except Unstated as reason:
        seconds, unmeasured = None, str(reason)
    return Published(
        name=str(row.get("id")),
        source=str(row.get("source")),
        job=job,
        cluster=_cluster(row),
        system=system,
        seconds=seconds,
        memory=_memory(measured),
        out_of_memory=bool(measured.get("oom")),
        notes=notes,
        gigabytes=_gigabytes(row),
        last_rank=measured.get("memory_rank") == "last",
        unmeasured=unmeasured,
        analytic=positive(measured, "activation_gib") is not None,
    )


def _configured(system: Implementation, notes: Notes) -> Implementation:
    """A training system as a row configures it."""
    update: dict[str, Any] = {}
    if notes.graphs:
        update["graphs"] = True
    if notes.local_layers:
        update |= {"unfused": True, "transformer_engine": False}
    if notes.attention != "auto":
        update["unfused"] = notes.attention == "unfused"
    if notes.tensor_overlap is not None:
        update["tensor"] = "overlapped" if notes.tensor_overlap else "exposed"
    return system.model_copy(update=update)


def _stage_layers(model: ModelSettings, stages: int, notes: Notes) -> tuple[range, ...]:
    """The layers of every pipeline stage: as many each as possible, unless the row says those of the ends."""
    first, last = notes.first_layers, notes.last_layers
    if stages > 2 and (notes.shorter_ends or stages == model.layers + 2):
        first = last = max(0, (model.layers + 2) // stages - 1)
    if stages < 2 or (first is None and last is None):
        return partition("even", model.layers, stages, LayerCosts(0.0, (1.0,) * model.layers, 0.0))
    begin, end = first or 0, model.layers - (last or 0)
    inner = stages - (first is not None) - (last is not None)
    if inner < 1 or end - begin < inner:
        raise Uncovered("layers of the first and last stage leave none for the others")
    middle = partition("even", end - begin, inner, LayerCosts(0.0, (1.0,) * (end - begin), 0.0))
    ranges = [range(begin + part.start, begin + part.stop) for part in middle]
    ends = (
        ([range(begin)] if first is not None else []),
        ([range(end, model.layers)] if last is not None else []),
    )
    return (*ends[0], *ranges, *ends[1])


def _number(tree: Mapping[str, Any], key: str, name: str | None = None, default: int | None = None) -> int:
    """A positive whole number; None and 0 count as not stated."""
    value = tree.get(key) or default
    if value is None:
        raise Uncovered(f"{name or key} is not stated")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 1 <= value <= _LARGEST or value % 1:
        raise Uncovered(f"{name or key}: found {value!r:.40}, expected a positive whole number")
    return int(value)


def _model(shape: Mapping[str, Any], row: Mapping[str, Any]) -> ModelSettings:
    if "hybrid" in shape:
        raise Uncovered("Mamba layers are not modelled")
    moe, mla = (_part(shape, name) for name in ("moe", "mla"))
    if moe and moe.get("latent"):
        raise Uncovered("experts in a latent space are not modelled")
    sizes = {name: _number(shape, name, f"model.{name}") for name in ("layers", "hidden", "heads")}
    gated, bias = bool(shape.get("gated")), bool(shape.get("bias"))
    settings: dict[str, Any] = {
        **sizes,
        "family": "llama" if gated else "gpt2",
        "kv_heads": _number(shape, "kv_heads", "model.kv_heads", sizes["heads"]),
        "ffn_hidden": _number(shape, "ffn", "model.ffn"),
        "vocab": _number(shape, "vocab", "model.vocab", _GPT_VOCABULARY),
        "tied_embeddings": bool(shape.get("tied")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
    }
    if shape.get("head_dim") or sizes["hidden"] % sizes["heads"]:
        width = round(sizes["hidden"] / sizes["heads"])
        settings["head_dim"] = _number(shape, "head_dim", "model.head_dim", width)
    if "lora" in str(row.get("task", "")).lower():
        settings["lora"] = _adapters(str(row.get("note")))
    model = complete_model(ModelSettings(**settings), _number(shape, "seq", "model.seq"))
    update: dict[str, Any] = {}
    if isinstance(shape.get("sliding_window"), int):
        update["sliding_window"] = shape["sliding_window"]
    if shape.get("mtp"):
        # Each step of multi-token prediction has a layer of its own; its product with the output matrix is
        # not counted.
        update["layers"] = model.layers + _number(shape, "mtp", "model.mtp")
    if moe:
        update["moe"] = _experts(shape, moe)
    if mla:
        widths = {"kv_rank": "kv_lora", "nope_dim": "qk_nope", "rope_dim": "qk_rope", "value_dim": "v"}
        ranks = {ours: _number(mla, theirs, f"model.mla.{theirs}") for ours, theirs in widths.items()}
        queries = _number(mla, "q_lora", "model.mla.q_lora") if mla.get("q_lora") else None
        update["mla"] = MlaSettings(q_rank=queries, **ranks)
    return model.model_copy(update=update)


def _part(shape: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A part of a model that is an object of its own."""
    part = shape.get(name)
    if part is not None and not isinstance(part, Mapping):
        raise Uncovered(f"model.{name}: found {part!r:.40}, expected an object")
    return part


def _adapters(note: str) -> LoraSettings:
    """Adapters as a note states them; else of rank 16, in all linear layers."""
    rank = re.search(r"LoRA r(?:ank)?\s*=?\s*(\d+)", note)
    attention = re.search(r"LoRA[^,;]* on attention", note)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj") if attention else "all"
    return LoraSettings(rank=int(rank[1]) if rank else 16, targets=targets)


def _experts(shape: Mapping[str, Any], moe: Mapping[str, Any]) -> MoeSettings:
    def number(key: str, default: int | None = None) -> int:
        return _number(moe, key, f"model.moe.{key}", default)

    width = number("moe_ffn", _number(shape, "ffn", "model.ffn"))
    shared = number("shared") if moe.get("shared") else 0
    if moe.get("shared_ffn"):
        shared = max(1, round(number("shared_ffn") / width))
    first = moe.get("first_dense") or shape.get("first_dense")
    return MoeSettings(
        experts=number("experts"),
        top_k=number("topk"),
        ffn_hidden=width,
        shared_experts=shared,
        every=number("every", 1),
        first_dense=number("first_dense", first) if first else 0,
        forced=True,
        allowance=1.0,
        dispatcher="alltoall",
    )


def _layout(row: Mapping[str, Any]) -> Layout:
    tensor, context, pipeline, expert = (_number(row, name, default=1) for name in ("tp", "cp", "pp", "ep"))
    return Layout(
        world=_number(row, "n_gpus"),
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
        # As in Megatron-LM, experts are divided as the other weights are unless it is stated.
        expert_tensor=_number(row, "etp", default=tensor) if expert > 1 else 1,
    )


def _microbatches(row: Mapping[str, Any]) -> int:
    if row.get("n_microbatches"):
        return _number(row, "n_microbatches")
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
        fp8_experts=narrow and system.eight_experts,
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
    if "nvfp4" in precision:
        return "nvfp4"
    return "fp8_block" if re.search(r"row|block", precision) else "fp8"


def _check_divisible(model: ModelSettings, layout: Layout) -> None:
    copies, heads = layout.tensor, int(model.kv_heads)
    if model.heads % layout.tensor:
        raise Uncovered("heads do not divide by the tensor degree")
    if model.heads % heads or (heads % copies and copies % heads):
        raise Uncovered("key/value heads do not divide by the tensor degree")
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
    name, virtual = str(row.get("schedule") or "").lower(), _number(row, "vp", default=1)
    if layout.pipeline == 1:
        return "1f1b", 1
    for pattern, ours in _SCHEDULES:
        if pattern in name:
            return ours, 1
    if virtual > 1:
        return "interleaved", virtual
    return "1f1b", 1


_POINTWISE: RecomputedParts = frozenset({"norms", "rotated", "activations"})
"""Parts that cost no product."""
_PARTS: dict[str, RecomputedPart] = {
    "layernorm": "norms",
    "mla_up_proj": "mla_up",
    "moe_act": "moe_act",
    "mlp": "activations",
}


def _recompute(row: Mapping[str, Any], model: ModelSettings) -> tuple[Recompute, bool, float]:
    """The recompute of a row, whether attention's core is, and the part of the products that is repeated."""
    text = str(row.get("recompute") or "none").lower()
    if text.startswith(("none", "see perf_recipes")):
        return Recompute(), False, 0.0
    if text.startswith("full"):
        match = re.search(r"(\d+) of (\d+) layers", text)
        return Recompute("full", int(match[1]) if match else None), False, 0.0
    if "qkv" in text:  # MaxText's policies keep projections
        kept = r"save_qkv_proj|all but qkv"
        if re.search(kept, text):
            outputs = "output proj" in text
            return Recompute("none", None, _POINTWISE), True, _repeated(model, outputs)
    if "(op)" in text:  # every second product of a layer, and all that is pointwise
        return Recompute("none", None, _POINTWISE), False, 0.5
    parts = frozenset(part for word, part in _PARTS.items() if re.search(rf"\b{word}\b", text))
    core = text == "selective" or "core_attn" in text
    return Recompute("none", None, parts), core, 0.0


def _repeated(model: ModelSettings, outputs: bool) -> float:
    """Part of a dense layer's products that is repeated where the results of the projections before attention
    are kept, with ``outputs`` also of the one after it; results of the last product are not needed."""
    queries, keys = (int(count) * int(model.head_dim) for count in (model.heads, model.kv_heads))
    gates = 2 if family(model.family).gated else 1
    ffn = int(model.ffn_hidden)
    again = gates * ffn + (0 if outputs else queries)
    return again / ((gates + 1) * ffn + 2 * queries + 2 * keys)


def _sharding(row: Mapping[str, Any], layout: Layout) -> tuple[int, int]:
    """ZeRO level, and replicas of the sharded state."""
    level, ranks = zero_level(row), layout.gradient_ranks
    if level < 3:
        return level, 1
    size = re.search(r"fsdp2?\s+(\d+)", str(row["zero_fsdp"]).lower())
    shards = int(size[1]) if size else ranks
    return 3, max(1, ranks // max(1, shards))


def zero_level(row: Mapping[str, Any]) -> int:
    """The level of sharding that a row states, 0 for none."""
    text = str(row.get("zero_fsdp") or "none").lower()
    if "fsdp" in text or "full_shard" in text or "zero-3" in text:
        return 3
    if "zero-2" in text:
        return 2
    return 1 if "zero-1" in text or re.search(r"\bdist", text) else 0


def _cluster(row: Mapping[str, Any]) -> Cluster:
    name = str(row.get("gpu"))
    text = f"{name} {row.get('note') or ''}"
    network = None
    if rate := re.search(r"=\s*(\d+)\s*Gb/s", name):  # of a node of eight
        network = int(rate[1]) / 8 / 8 * 1e9
    elif rate := re.search(r"(\d)x\s*OmniPath\s*(\d+)G", text):
        network = int(rate[1]) * int(rate[2]) / 8 / 8 * 1e9
    return Cluster(load_hardware(name), _number(row, "n_gpus"), network)


def _memory(measured: Mapping[str, Any]) -> float | None:
    state, kept = positive(measured, "params_opt_gib"), positive(measured, "activation_gib")
    if state and kept:
        return (state + kept) * 2**30
    if peak := positive(measured, "peak_mem_gib"):
        return peak * 2**30
    peak = positive(measured, "peak_mem_gb")
    return peak * 1e9 if peak else None


def _gigabytes(row: Mapping[str, Any]) -> int | None:
    """Memory of a GPU as its name states it."""
    match = re.search(r"(\d+)\s*GB\b", str(row.get("gpu")))
    return int(match[1]) if match else None
