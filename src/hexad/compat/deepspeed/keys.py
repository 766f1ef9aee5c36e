"""Every key of DeepSpeed's JSON: its type, its default, and what it does here. No torch.

Names, defaults and meanings are those of https://www.deepspeed.ai/docs/config-json/.
``docs/deepspeed-keys.md`` is generated from these classes.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hexad.config.model import Integer, Number

from ..facade.foreign_names import Meaning


def becomes(target: str) -> Meaning:
    """Marks a key with an effect, by what it is here."""
    return Meaning(target=target)


def no_effect(note: str) -> Meaning:
    """Marks a key that is accepted without effect, and says why."""
    return Meaning(effect="none", note=note)


def refused(fix: str) -> Meaning:
    """Marks a key of which only the default is accepted (of a section: only ``enabled: false``), and says
    what to do instead."""
    return Meaning(effect="refused", fix=fix)


OWN = no_effect("Hexad sizes its own buffers")
ALWAYS = no_effect("always on")
KERNELS = no_effect("an implementation detail of DeepSpeed's kernels")


At0 = Annotated[Integer, Field(ge=0)]
At1 = Annotated[Integer, Field(ge=1)]
Tree = dict[str, Any]


class Section(BaseModel):
    """A section of the file: a group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    older: ClassVar[tuple[str, ...]] = ()
    """Older spellings of keys, which the class replaces."""


class Fp16(Section):
    """``fp16``; with ``type: bfloat16``, DeeperSpeed's, ``bf16``."""

    older = ("type",)

    enabled: Annotated[bool, becomes("`precision.dtype: fp16`")] = False
    loss_scale: Annotated[Number, Field(ge=0), becomes("`precision.loss_scale`; 0 is dynamic")] = 0.0
    initial_scale_power: Annotated[
        At0, Field(le=127), becomes("`precision.loss_scale_initial`, 2 to this")
    ] = 16
    loss_scale_window: Annotated[At1, becomes("`precision.loss_scale_window`")] = 1000
    hysteresis: Annotated[At1, becomes("`precision.loss_scale_hysteresis`")] = 2
    consecutive_hysteresis: Annotated[bool, becomes("`precision.loss_scale_consecutive`")] = False
    min_loss_scale: Annotated[Number, Field(gt=0), becomes("`precision.loss_scale_min`")] = 1.0
    auto_cast: Annotated[bool, becomes("floating-point inputs are cast to fp16")] = False
    fp16_master_weights_and_grads: Annotated[bool, refused("master weights are fp32; remove it")] = False
    fp16_opt_level: Annotated[str | None, no_effect("of Apex")] = None


class Bf16(Section):
    """``bf16``, or ``bfloat16``."""

    enabled: Annotated[bool, becomes("`precision.dtype: bf16`")] = False
    immediate_grad_update: Annotated[bool, ALWAYS] = True
    check_grad_overflow: Annotated[bool, no_effect("steps without a finite norm are always skipped")] = True
    bf16_master_weights_and_grads: Annotated[bool, no_effect("master weights and gradients are fp32")] = False
    bf16_optimizer_states: Annotated[bool, no_effect("optimizer state is fp32")] = False


class Autocast(Section):
    """``torch_autocast``."""

    enabled: Annotated[bool, becomes("the forward pass runs under `torch.autocast`")] = False
    dtype: Annotated[Literal["bfloat16", "float16"], becomes("of `torch.autocast`")] = "bfloat16"
    lower_precision_safe_modules: Annotated[list[str] | None, no_effect("gradients are sent in fp32")] = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        short = {"bf16": "bfloat16", "fp16": "float16"}
        names = {**short, **{f"torch.{name}": name for name in short.values()}}
        if isinstance(value, dict) and value.get("dtype") in list(names):
            return {**value, "dtype": names[value["dtype"]]}
        return value


Dtype = Literal["fp32", "fp16", "bf16"]


class DataTypes(Section):
    """``data_types``."""

    grad_accum_dtype: Annotated[
        Dtype | None, becomes("`precision.accumulate: bf16` with `communication_data_type: bf16`; else fp32")
    ] = None
    param_dtype: Annotated[Dtype | None, refused("parameters have the format of fp16 or bf16")] = None
    buffer_dtype: Annotated[Dtype | None, becomes("format of the module's buffers")] = None
    keep_in_fp32_modules: Annotated[
        Literal["auto"] | list[str], no_effect("all floating-point buffers are cast to `buffer_dtype`")
    ] = "auto"


class Offload(Section):
    """``offload_optimizer`` and ``offload_param``."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: Annotated[str | None, OWN] = None
    pin_memory: Annotated[bool, no_effect("always pinned on a GPU")] = True
    ratio: Annotated[float, Field(ge=0, le=1), refused("all of the optimizer is offloaded; use 1")] = 1.0
    buffer_count: Annotated[int, OWN] = 5
    buffer_size: Annotated[int, OWN] = 100_000_000
    max_in_cpu: Annotated[int, OWN] = 1_000_000_000
    pipeline_read: Annotated[bool, OWN] = False
    pipeline_write: Annotated[bool, OWN] = False
    pipeline: Annotated[bool, OWN] = False
    fast_init: Annotated[bool, OWN] = False
    super_offload: Annotated[bool, OWN] = False
    cpuadam_cores_perc: Annotated[float, OWN] = 0.8


class Zero(Section):
    """``zero_optimization``; ``true`` is stage 1."""

    model_config = ConfigDict(populate_by_name=True)
    older = (
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "stage3_gather_fp16_weights_on_model_save",
    )

    stage: Annotated[int, Field(ge=0, le=3), becomes("`parallel.zero`")] = 0
    offload_optimizer: Annotated[
        Offload | None, becomes("device cpu: `memory.offload: optimizer`; nvme is refused")
    ] = None
    offload_param: Annotated[
        Offload | None, becomes("without effect on a CPU; refused on a GPU, where parameters stay")
    ] = None
    zero_hpz_partition_size: Annotated[At0, no_effect("weights are gathered over all ranks")] = 1
    ignore_unused_parameters: Annotated[bool, ALWAYS] = True
    gather_16bit_weights_on_model_save: Annotated[
        bool,
        Field(alias="stage3_gather_16bit_weights_on_model_save"),
        no_effect("`save_16bit_model` always gathers"),
    ] = False
    overlap_comm: Annotated[bool | None, ALWAYS] = None
    contiguous_gradients: Annotated[bool, ALWAYS] = True
    reduce_scatter: Annotated[bool, ALWAYS] = True
    allgather_partitions: Annotated[bool, ALWAYS] = True
    reduce_bucket_size: Annotated[At0, OWN] = 500_000_000
    allgather_bucket_size: Annotated[At0, OWN] = 500_000_000
    sub_group_size: Annotated[At0, OWN] = 1_000_000_000
    prefetch_bucket_size: Annotated[At0, Field(alias="stage3_prefetch_bucket_size"), OWN] = 50_000_000
    param_persistence_threshold: Annotated[
        int,
        Field(alias="stage3_param_persistence_threshold"),
        Field(ge=0),
        no_effect("vectors stay on every rank, matrices are sharded"),
    ] = 100_000
    model_persistence_threshold: Annotated[At0, Field(alias="stage3_model_persistence_threshold"), OWN] = (
        2**63 - 1
    )
    max_live_parameters: Annotated[At0, Field(alias="stage3_max_live_parameters"), OWN] = 10**9
    max_reuse_distance: Annotated[At0, Field(alias="stage3_max_reuse_distance"), OWN] = 10**9
    module_granularity_threshold: Annotated[int, Field(alias="stage3_module_granularity_threshold"), OWN] = 0
    use_all_reduce_for_fetch_params: Annotated[
        bool, Field(alias="stage3_use_all_reduce_for_fetch_params"), OWN
    ] = False
    allgather_sequential: Annotated[bool, Field(alias="stage3_allgather_sequential"), OWN] = False
    use_multi_rank_bucket_allreduce: Annotated[bool, OWN] = True
    round_robin_gradients: Annotated[bool, OWN] = False
    parameter_alignment: Annotated[bool, OWN] = False
    zero_quantized_weights: Annotated[bool, no_effect("weights are sent as they are")] = False
    zero_quantized_nontrainable_weights: Annotated[bool, no_effect("weights are kept as they are")] = False
    zero_quantized_gradients: Annotated[bool, no_effect("gradients are sent as they are")] = False
    compute_grad_norm: Annotated[bool, ALWAYS] = True
    load_from_fp32_weights: Annotated[bool, ALWAYS] = True
    elastic_checkpoint: Annotated[bool, no_effect("checkpoints have no layout")] = False
    memory_efficient_linear: Annotated[bool, KERNELS] = True
    override_module_apply: Annotated[bool, KERNELS] = True
    pipeline_loading_checkpoint: Annotated[bool, KERNELS] = False
    log_trace_cache_warnings: Annotated[bool, KERNELS] = False
    enable_sanity_checks: Annotated[bool, KERNELS] = False
    legacy_stage1: Annotated[bool, KERNELS] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, KERNELS] = False
    leaf_module: Annotated[Tree | None, no_effect("modules are gathered as they are called")] = None
    zenflow: Annotated[Tree | None, refused("remove it")] = None

    @model_validator(mode="before")
    @classmethod
    def _older(cls, value: Any) -> Any:
        """``true``, deprecated spellings, and a section that is enabled by being there."""
        if isinstance(value, bool):
            return {"stage": int(value)}
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if isinstance(value.get("zenflow"), dict):
            value["zenflow"] = {"enabled": True, **value["zenflow"]}
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if value.pop(old, False):
                value.setdefault(new, {"device": "cpu"})
        value.pop("cpu_offload_use_pin_memory", None)
        old = value.pop("stage3_gather_fp16_weights_on_model_save", None)
        if old is not None:
            value.setdefault("stage3_gather_16bit_weights_on_model_save", old)
        return value


class Optimizer(Section):
    """``optimizer``."""

    type: Annotated[
        str, becomes("Adam (AdamW unless `adam_w_mode` is false), AdamW, or any name in `torch.optim`")
    ]
    params: Annotated[Tree, becomes("of the optimizer; `max_grad_norm` is `gradient_clipping`")] = {}
    legacy_fusion: Annotated[bool, KERNELS] = False


class Scheduler(Section):
    """``scheduler``."""

    type: Annotated[
        str, becomes("WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a name in torch")
    ]
    params: Annotated[Tree, becomes("of the scheduler")] = {}


class ActivationCheckpointing(Section):
    """``activation_checkpointing``: of ``deepspeed.checkpointing.checkpoint``, which a model calls."""

    partition_activations: Annotated[bool, no_effect("inputs of checkpoints stay where they are")] = False
    cpu_checkpointing: Annotated[bool, becomes("inputs of checkpoints are kept in the host's memory")] = False
    contiguous_memory_optimization: Annotated[bool, OWN] = False
    number_checkpoints: Annotated[int | None, OWN] = None
    synchronize_checkpoint_boundary: Annotated[bool, KERNELS] = False
    profile: Annotated[bool, KERNELS] = False


class Pipeline(Section):
    """``pipeline``: of a ``PipelineModule``."""

    stages: Annotated[int | str, no_effect("`PipelineModule(num_stages=)` determines it")] = "auto"
    partition: Annotated[str, no_effect("`PipelineModule(partition_method=)` determines it")] = "best"
    seed_layers: Annotated[bool, no_effect("`PipelineModule(seed_layers=)` determines it")] = False
    activation_checkpoint_interval: Annotated[
        At0, becomes("in place of `PipelineModule(activation_checkpoint_interval=)`, unless 0")
    ] = 0
    pipe_partitioned: Annotated[bool, KERNELS] = True
    grad_partitioned: Annotated[bool, KERNELS] = True
    use_reentrant: Annotated[bool, KERNELS] = True


class TensorParallel(Section):
    """``tensor_parallel``."""

    autotp_size: Annotated[At0, becomes("`parallel.tensor`; modules that carry a plan are divided by it")] = 0
    tensor_parallel: Annotated[Tree | None, KERNELS] = None
    tp_overlap_comm: Annotated[bool, ALWAYS] = False


class CheckpointKeys(Section):
    """``checkpoint``."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], becomes("whether tags are compared")] = (
        "Warn"
    )
    load_universal: Annotated[bool, no_effect("any layout loads any checkpoint")] = False
    use_node_local_storage: Annotated[bool, refused("checkpoints need a shared file system")] = False
    parallel_write: Annotated[Tree | None, ALWAYS] = None
    writer: Annotated[Tree | None, OWN] = None

    @model_validator(mode="before")
    @classmethod
    def _capitals(cls, value: Any) -> Any:
        tag = value.get("tag_validation") if isinstance(value, dict) else None
        if isinstance(tag, str) and tag.lower() in ("ignore", "warn", "fail"):
            return {**value, "tag_validation": tag.capitalize()}
        return value


Inert = Annotated[Tree | bool | None, no_effect("no counterpart")]
REPORTS = no_effect("measure with `hexad train` and its `log` settings, or torch's profiler")
CHANGES = refused("it changes the training; remove the section")


def _selects_data(section: Tree) -> bool:
    """Whether ``data_efficiency`` changes which samples or tokens are trained on: by a part that is enabled
    in enabled sections."""

    def enabled(tree: Any, *path: str) -> bool:
        if not isinstance(tree, dict) or not tree.get("enabled"):
            return False
        return not path or enabled(tree.get(path[0]), *path[1:])

    parts = ("data_sampling", "curriculum_learning"), ("data_sampling", "dynamic_batching")
    return any(enabled(section, *part) for part in (*parts, ("data_routing", "random_ltd")))


def _with_type(tree: Tree) -> Tree:
    """The keys with ``fp16.type`` of DeeperSpeed (GPT-NeoX) as the section that it means."""
    fp16 = dict(tree["fp16"])
    if fp16.pop("type") not in ("bfloat16", "bf16") or fp16.get("enabled") is not True:
        return {**tree, "fp16": fp16}
    return {"bf16": {"enabled": True}, **tree, "fp16": {**fp16, "enabled": False}}


class Keys(Section):
    """All keys of a configuration file."""

    model_config = ConfigDict(populate_by_name=True)
    older = ("bfloat16",)

    train_batch_size: Annotated[At1 | None, becomes("`batch.global`")] = None
    train_micro_batch_size_per_gpu: Annotated[At1 | None, becomes("`batch.micro`")] = None
    gradient_accumulation_steps: Annotated[At1 | None, becomes("backward passes per step")] = None
    managed_gradient_accumulation: Annotated[
        bool, becomes("false: every `step()` updates, after any number of backward passes")
    ] = True
    gradient_clipping: Annotated[
        Number, Field(ge=0), becomes("`optimizer.clip`; 1.0 by default, as in DeepSpeed since 0.19")
    ] = 1.0
    prescale_gradients: Annotated[bool, no_effect("the same mean, but for rounding")] = False
    gradient_predivide_factor: Annotated[float, no_effect("the same mean, but for rounding")] = 1.0
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], becomes("how ranks' gradients are added")] = (
        "mean"
    )
    communication_data_type: Annotated[
        Dtype | None, becomes("`precision.reduce`; fp32 by default, and where it is fp16")
    ] = None
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    torch_autocast: Autocast = Autocast()
    data_types: DataTypes = DataTypes()
    zero_optimization: Zero = Zero()
    zero_allow_untested_optimizer: Annotated[
        bool, becomes("optimizers that are not elementwise may be given flat shards")
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[bool, KERNELS] = True
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    pipeline: Pipeline = Pipeline()
    tensor_parallel: TensorParallel = TensorParallel()
    sequence_parallel_size: Annotated[
        At1, becomes("`parallel.context` with `ulysses`; refused for user-defined modules")
    ] = 1
    data_parallel_size: Annotated[At1 | None, becomes("`parallel.data`")] = None
    checkpoint: CheckpointKeys = CheckpointKeys()
    steps_per_print: Annotated[At1 | None, becomes("steps between lines of the log")] = None
    dataloader_drop_last: Annotated[bool, becomes("of the loader of `training_data`")] = False
    disable_python_gc: Annotated[bool, KERNELS] = False
    log_level: Annotated[str | None, KERNELS] = None
    wall_clock_breakdown: Annotated[bool, REPORTS] = False
    memory_breakdown: Annotated[bool, REPORTS] = False
    dump_state: Annotated[bool, REPORTS] = False
    tensorboard: Annotated[Tree | None, REPORTS] = None
    wandb: Annotated[Tree | None, REPORTS] = None
    csv_monitor: Annotated[Tree | None, REPORTS] = None
    comet: Annotated[Tree | None, REPORTS] = None
    flops_profiler: Annotated[Tree | None, REPORTS] = None
    comms_logger: Annotated[Tree | None, REPORTS] = None
    timers: Annotated[Tree | None, REPORTS] = None
    seq_parallel_communication_data_type: Annotated[str | None, KERNELS] = None
    sparse_gradients: Annotated[bool, no_effect("gradients are dense")] = False
    disable_allgather: Annotated[bool, OWN] = False
    allgather_size: Annotated[int | None, OWN] = None
    vocabulary_size: Annotated[int | None, KERNELS] = None
    cuda_visible_devices: Annotated[int | str | list[int] | None, no_effect("set it for the launcher")] = None
    comms_config: Annotated[Tree | None, REPORTS] = None
    pipe_parallel_size: Annotated[
        int | None, Field(alias="pipe-parallel-size"), no_effect("the script determines it")
    ] = None
    model_parallel_size: Annotated[
        int | None, Field(alias="model-parallel-size"), no_effect("the script determines it")
    ] = None
    use_data_before_expert_parallelism: Annotated[bool, KERNELS] = False
    aio: Inert = None
    autotuning: Inert = None
    elasticity: Inert = None
    nebula: Inert = None
    sparse_attention: Inert = None
    datastates: Inert = None
    compile: Inert = None
    amp: Annotated[Tree | None, refused("use fp16 or bf16")] = None
    compression_training: Annotated[Tree | None, CHANGES] = None
    eigenvalue: Annotated[Tree | None, CHANGES] = None
    quantize_training: Annotated[Tree | None, CHANGES] = None
    weight_quantization: Annotated[Tree | None, CHANGES] = None
    progressive_layer_drop: Annotated[Tree | None, CHANGES] = None
    curriculum_learning: Annotated[Tree | None, CHANGES] = None
    data_efficiency: Annotated[Tree | None, CHANGES] = None
    hybrid_engine: Annotated[Tree | None, CHANGES] = None
    expert_parallel: Annotated[Tree | None, CHANGES] = None

    @model_validator(mode="before")
    @classmethod
    def _older(cls, value: Any) -> Any:
        """Aliases, and limits that were off."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if isinstance(value.get("gradient_allreduce_op"), str):
            value["gradient_allreduce_op"] = value["gradient_allreduce_op"].lower()
        if isinstance(value.get("data_efficiency"), dict) and not _selects_data(value["data_efficiency"]):
            value["data_efficiency"] = None
        if isinstance(value.get("fp16"), dict) and "type" in value["fp16"]:
            value = _with_type(value)
        if "bfloat16" in value:
            value.setdefault("bf16", value.pop("bfloat16"))
        for name in ("gradient_clipping", "steps_per_print", "gradient_accumulation_steps"):
            if value.get(name, 1) is None:
                del value[name]
        if isinstance(value.get("steps_per_print"), float | int) and value["steps_per_print"] >= 2**53:
            value["steps_per_print"] = None  # the Trainer's infinity
        return value
