"""DeepSpeed's keys as Hexad's settings: of an engine around modules, or of a ``run.yaml``; a ``ConfigError``
names a key that has no counterpart. No torch."""

from collections.abc import Mapping
from inspect import signature
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from hexad.config import Config, ConfigError
from hexad.model.configuration import load_config

from ..facade.foreign_names import notes_without_effect
from .config import CheckedConfig, checked, given, unknown_keys, without_effect
from .keys import Keys, Offload, Section, no_effect
from .lr_schedules import LRSchedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

Finite = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[Finite, Field(ge=0)]
Beta = Annotated[Finite, Field(ge=0, lt=1)]
_ONE_ADAM = no_effect("a run.yaml has one AdamW")


def _required(wanted: Any, why: str) -> BeforeValidator:
    """A check that refuses every value but one."""

    def check(value: Any) -> Any:
        if value != wanted:
            raise ValueError(f"{wanted!r}".lower() + f": {why}")
        return value

    return BeforeValidator(check)


class AdamParams(Section):
    """The parameters of Adam and AdamW, from DeepSpeed or torch."""

    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    adam_w_mode: bool = True
    bias_correction: Annotated[bool, _required(True, "AdamW always corrects")] = True
    amsgrad: Annotated[bool, _required(False, "a run.yaml has AdamW without it")] = False
    maximize: Annotated[bool, _required(False, "a run.yaml minimizes the loss")] = False
    max_grad_norm: Rate | None = None
    torch_adam: Annotated[bool, _ONE_ADAM] = False
    fused: Annotated[bool | None, _ONE_ADAM] = None
    foreach: Annotated[bool | None, _ONE_ADAM] = None
    capturable: Annotated[bool, _ONE_ADAM] = False
    differentiable: Annotated[bool, _ONE_ADAM] = False
    set_grad_none: Annotated[bool, _ONE_ADAM] = True
    fp32_optimizer_states: Annotated[bool, _ONE_ADAM] = True


_TYPES: dict[str, Any] = {
    "warmup_max_lr": Rate | None,
    "warmup_num_steps": Annotated[int, Field(ge=1)],
    "total_num_steps": Annotated[int, Field(ge=1)],
    "warmup_type": Literal["log", "linear"],
    "last_batch_iteration": Annotated[int, _required(-1, "a run.yaml begins with the first step; remove it")],
}
"""Types of the schedules' parameters that are not plain rates."""


def _parameters(schedule: type[LRSchedule]) -> type[Section]:
    """The parameters of a schedule, with the names and defaults of its constructor."""
    fields: dict[str, Any] = {
        name: (_TYPES.get(name, Rate), ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in list(signature(schedule).parameters.items())[1:]
    }
    return create_model(schedule.__name__, __base__=Section, **fields)


def engine_config(config: CheckedConfig, gpu: bool, pipeline: int = 1) -> Config:
    """The settings of an engine around modules; learning rates and decay are the optimizer's own."""
    _check_offload(config.keys, gpu)
    tree = shared_settings(config)
    tree["run"] = {"timeout": 1800.0}
    tree["parallel"] |= {"tensor": 1, "pipeline": pipeline}
    tree["checkpoint"] = {"asynchronous": False}
    return load_config(tree)


def run_settings(config: CheckedConfig, strict: bool = True) -> tuple[dict[str, Any], list[str]]:
    """The ``run.yaml`` for one of Hexad's models that is equivalent to the file: settings that differ from
    Hexad's defaults or that the file names, and a line for every difference.

    Args:
        strict: refuse unknown parameters of the optimizer and the schedule; otherwise they have no effect.

    Raises:
        ConfigError: keys that have no counterpart there.
    """
    keys, notes = config.keys, list[str]()
    tree = settings_beside_optimizer(config, notes)
    tree["optimizer"] |= _adamw(config, notes, strict)
    if keys.scheduler is not None:
        tree["lr_schedule"] = _schedule(config, tree["optimizer"], notes, strict)
    else:
        tree["lr_schedule"] = {"kind": "constant", "warmup": 0}
    if keys.steps_per_print is not None:
        tree["log"] = {"every": keys.steps_per_print}
    notes += without_effect(keys)
    notes += _unknown(config.tree, Keys)
    return {name: group for name, group in tree.items() if group}, notes


def _unknown(tree: Mapping[str, Any], section: type[Section], prefix: str = "") -> list[str]:
    """A note for each unknown key."""
    return [f"{key}: unknown key; no effect" for key in unknown_keys(tree, section, prefix)]


def settings_beside_optimizer(config: CheckedConfig, notes: list[str]) -> dict[str, Any]:
    """The settings of a ``run.yaml`` except the optimizer's and the learning rate's; ``notes`` receives a
    line for every difference.
    """
    keys = config.keys
    _check_offload(keys, gpu=False)
    if keys.gradient_allreduce_op == "sum":
        raise ConfigError("gradient_allreduce_op", "found sum, but a run.yaml has the mean; use mean")
    if keys.torch_autocast.enabled or (keys.fp16.enabled and keys.fp16.auto_cast):
        notes.append("torch_autocast, fp16.auto_cast: precision.dtype is the format of everything here")
    if _offloads(keys.zero_optimization.offload_param):
        notes.append("zero_optimization.offload_param: parameters stay on the device")
    notes += _of_modules(keys) + _formats(config)
    return shared_settings(config)


_OF_MODULES = {
    "managed_gradient_accumulation": "every step here has batch.global samples",
    "data_parallel_size": "the ranks that the other degrees leave are data ranks",
    "data_types.buffer_dtype": "Hexad's models determine the formats of their buffers",
    "activation_checkpointing.cpu_checkpointing": "activations stay on the device; see memory.recompute",
    "pipeline.activation_checkpoint_interval": "use memory.recompute",
    "checkpoint.tag_validation": "a checkpoint has the name of its step",
    "dataloader_drop_last": "every batch here is complete",
    "zero_allow_untested_optimizer": "AdamW can always be sharded",
}
"""Keys with an effect on an engine around modules, and none on one of Hexad's models, with the reason."""


def _of_modules(keys: Keys) -> list[str]:
    """A note for each of these keys that the file has with another value than the default."""
    default = Keys()
    return [
        f"{key}: no effect: {why}"
        for key, why in _OF_MODULES.items()
        if given(keys, key) not in (None, attrgetter(key)(default))
    ]


def _formats(config: CheckedConfig) -> list[str]:
    """A note for each format of gradients that is not honoured."""
    reduce, accumulate = config.keys.communication_data_type, config.keys.data_types.grad_accum_dtype
    reduced, notes = reduce == config.dtype == "bf16", list[str]()
    if reduce not in (None, "fp32") and not reduced:
        why = "bf16 needs bf16.enabled" if reduce == "bf16" else "fp16 is not supported"
        notes.append(f"communication_data_type: no effect: {why}; gradients are sent in fp32")
    if accumulate not in (None, "fp32") and not (reduced and accumulate == "bf16"):
        why = "bf16 needs communication_data_type: bf16" if accumulate == "bf16" else "fp16 is not supported"
        notes.append(f"data_types.grad_accum_dtype: no effect: {why}; gradients are added in fp32")
    return notes


def shared_settings(config: CheckedConfig) -> dict[str, Any]:
    """The settings that scripts and ``run.yaml`` files share: batch, parallel, precision, memory, clip."""
    keys, batch = config.keys, config.batch
    precision: dict[str, Any] = {"dtype": config.dtype}
    if keys.communication_data_type == "bf16" and config.dtype == "bf16":
        precision["reduce"] = "bf16"
        if keys.data_types.grad_accum_dtype == "bf16":
            precision["accumulate"] = "bf16"
    if keys.fp16.enabled:
        scaler = keys.fp16
        precision |= {
            "loss_scale": scaler.loss_scale or "dynamic",
            "loss_scale_initial": 2.0**scaler.initial_scale_power,
            "loss_scale_window": scaler.loss_scale_window,
            # Stage 0 of DeepSpeed has no hysteresis.
            "loss_scale_hysteresis": scaler.hysteresis if keys.zero_optimization.stage else 1,
            "loss_scale_consecutive": scaler.consecutive_hysteresis,
            "loss_scale_min": scaler.min_loss_scale,
        }
    parallel: dict[str, Any] = {"zero": keys.zero_optimization.stage}
    if keys.tensor_parallel.autotp_size > 1:
        parallel["tensor"] = keys.tensor_parallel.autotp_size
    if keys.sequence_parallel_size > 1:
        parallel |= {"context": keys.sequence_parallel_size, "context_method": "ulysses"}
    offload = keys.zero_optimization.offload_optimizer
    return {
        "batch": {"micro": batch.micro, "global": batch.total},
        "parallel": parallel,
        "precision": precision,
        "memory": {"offload": "optimizer"} if _offloads(offload) else {},
        "optimizer": {"clip": config.clip},
    }


def _offloads(offload: Offload | None) -> bool:
    return offload is not None and offload.device != "none"


def _check_offload(keys: Keys, gpu: bool) -> None:
    zero = keys.zero_optimization
    for name in ("offload_optimizer", "offload_param"):
        offload: Offload | None = getattr(zero, name)
        if offload is not None and offload.device == "nvme":
            raise ConfigError(
                f"zero_optimization.{name}.device", "found nvme, which is not supported; use cpu or none"
            )
    if gpu and _offloads(zero.offload_param):
        raise ConfigError(
            "zero_optimization.offload_param.device",
            "found cpu, but parameters stay on the GPU; remove it (stage 3 shards them)",
        )


def _adamw(config: CheckedConfig, notes: list[str], strict: bool) -> dict[str, Any]:
    """The settings of AdamW, the one optimizer of a ``run.yaml``."""
    optimizer = config.keys.optimizer
    if optimizer is None:
        notes.append("optimizer: the script's own; the settings here are AdamW's defaults in DeepSpeed")
    name = "AdamW" if optimizer is None else optimizer.type
    adam = name.lower() in ("adam", "adamw")
    written = {} if optimizer is None or not adam else optimizer.params
    params = checked(written, AdamParams, "optimizer.params.", strict)
    notes += _unknown(written, AdamParams, "optimizer.params.")
    plain_adam = name.lower() == "adam" and not params.adam_w_mode
    if not adam or plain_adam:
        kind = "Adam with adam_w_mode: false" if plain_adam else name
        raise ConfigError(
            "optimizer.type",
            f"found {kind}, but a run.yaml has AdamW; use it, or hexad.compat.deepspeed.initialize, which "
            "takes any optimizer",
        )
    if params.weight_decay:
        notes.append("optimizer.params.weight_decay: norms and biases are excluded here")
    unused = [name for name, info in AdamParams.model_fields.items() if _ONE_ADAM in info.metadata]
    names = [f"optimizer.params.{name}" for name in unused if name in written]
    notes += notes_without_effect((name, f": {_ONE_ADAM.note}") for name in names)
    return {
        "lr": params.lr,
        "betas": list(params.betas),
        "eps": params.eps,
        "weight_decay": params.weight_decay,
    }


_KINDS: dict[type[LRSchedule], str] = {
    WarmupLR: "constant",
    WarmupDecayLR: "linear",
    WarmupCosineLR: "cosine",
}
"""DeepSpeed's schedule -> ``lr_schedule.kind``."""


def _schedule(
    config: CheckedConfig, optimizer: dict[str, Any], notes: list[str], strict: bool
) -> dict[str, Any]:
    """The settings of the learning-rate schedule; its peak goes to the optimizer's settings."""
    scheduler = config.keys.scheduler
    assert scheduler is not None
    schedules = {schedule.__name__: schedule for schedule in _KINDS}
    if scheduler.type not in schedules:
        raise ConfigError(
            "scheduler.type",
            f"found {scheduler.type}, which has no counterpart in a run.yaml; use {', '.join(schedules)}, "
            "or hexad.compat.deepspeed.initialize",
        )
    schedule = schedules[scheduler.type]
    parameters = _parameters(schedule)
    params: Any = checked(scheduler.params, parameters, "scheduler.params.", strict)
    notes += _unknown(scheduler.params, parameters, "scheduler.params.")
    settings: dict[str, Any] = {"kind": _KINDS[schedule], "warmup": params.warmup_num_steps}
    if schedule is WarmupCosineLR:
        low, least = params.warmup_min_ratio, optimizer["lr"] * params.cos_min_ratio
    else:
        low = least = params.warmup_min_lr
        if params.warmup_max_lr is not None:
            optimizer["lr"] = params.warmup_max_lr
    if params.warmup_type == "log":
        notes.append("scheduler.params.warmup_type: log there, linear here")
    if low:
        notes.append(f"scheduler: warm-up begins at {low} there, at 0 here")
    if schedule is not WarmupLR:
        settings |= {"decay_steps": params.total_num_steps, "min_lr": least}
    notes.append(
        "scheduler: step n there has the rate of step n - 2 here, since the first two have the smallest"
    )
    return settings
