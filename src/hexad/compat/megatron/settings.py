"""Megatron-Core's classes of settings that scripts make themselves, and the base class of its modules."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from hexad.config import HexadError
from hexad.engine.workload import Manners

MANNERS = Manners(clip_epsilon=1e-6)
"""What differs in an update by Megatron-Core's optimizers."""


@dataclass
class ModelParallelConfig:
    """What layers read of Megatron-Core's class of this name, which may be passed instead.

    Attributes:
        params_dtype: of parameters and activations.
        sequence_parallel: activations outside are sharded over tokens.
        perform_initialization: set initial values.
        init_method_std: standard deviation of those that an engine draws.
        tensor_model_parallel_size: the number of tensor ranks, which layers compare with their group's; None,
            and 1, Megatron-Core's default: any.
        pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, context_parallel_size: those of
            the run, under :mod:`hexad.compat.nemo`; layers do not read them.
        fp16, bf16, pipeline_dtype, calculate_per_token_loss, timers: likewise.
    """

    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    perform_initialization: bool = True
    init_method_std: float = 0.02
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    fp16: bool = False
    bf16: bool = False
    pipeline_dtype: torch.dtype | None = None
    calculate_per_token_loss: bool = False
    timers: Any = None


class MegatronModule(nn.Module):
    """A module with Megatron-Core's name, which has a configuration.

    Args:
        config: any.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the stage before has computed: no-op; override it in a stage that takes it."""


@dataclass
class OptimizerConfig:
    """Megatron-Core's settings of the optimizer.

    Attributes:
        optimizer: ``adam``, which is AdamW.
        lr: the largest learning rate.
        min_lr: accepted without effect: schedules name it.
        decoupled_lr, decoupled_min_lr: those of embedding and head.
        weight_decay, adam_beta1, adam_beta2, adam_eps: of AdamW.
        clip_grad: the largest norm of the gradient; 0: any.
        use_distributed_optimizer: shard the optimizer's state over data ranks, ZeRO 1.
        optimizer_cpu_offload: keep it in the host's memory.
        fp16, bf16: the format of the parameters, which the trainer's plugin says.
        loss_scale, initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis: of fp16.
        decoupled_weight_decay, apply_wd_to_qk_layernorm, grad_norm_skip_threshold: their defaults only.
        main_grads_dtype, main_params_dtype, exp_avg_dtype, exp_avg_sq_dtype: float32.
        params_dtype, overlap_param_gather, overlap_param_gather_with_optimizer_step, timers: without effect.
        use_precision_aware_optimizer, log_num_zeros_in_grad, barrier_with_L1_time: likewise.
        others: of other optimizers, kernels and copies to the host: likewise.
    """

    optimizer: str = "adam"
    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    use_precision_aware_optimizer: bool = False
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    optimizer_cpu_offload: bool = False
    clip_grad: float = 1.0
    log_num_zeros_in_grad: bool = False
    barrier_with_L1_time: bool = False
    timers: Any = None
    apply_wd_to_qk_layernorm: bool = False
    decoupled_weight_decay: bool = True
    grad_norm_skip_threshold: float = math.inf
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    fp8_recipe: str | None = None
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    store_param_remainders: bool = True
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.95
    muon_split_qkv: bool = True
    muon_use_nesterov: bool = False
    muon_nesterov: bool = False
    muon_scale_mode: str = "spectral"
    muon_fp32_matmul_prec: str = "medium"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "blockwise"
    muon_extra_scale_factor: float = 1.0
    muon_coefficient_type: str = "quintic"
    muon_scalar_optimizer: str = "adam"
    adaptive_muon_moment2_method: str = "adamuon"
    adaptive_muon_beta2: float = 0.95
    adaptive_muon_eps: float = 1e-8
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98
    soap_shampoo_beta: float = 0.95
    soap_precondition_frequency: int = 1
    soap_use_kl_shampoo: bool = True
    use_layer_wise_distributed_optimizer: bool = False
    optimizer_offload_fraction: float = 0.0
    use_torch_optimizer_for_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    optimizer_cuda_graph: bool = False
    config_logger_dir: str = ""


_UPDATE = (
    "apply_wd_to_qk_layernorm decoupled_weight_decay grad_norm_skip_threshold main_grads_dtype "
    "main_params_dtype exp_avg_dtype exp_avg_sq_dtype"
).split()
_REDUCTION = (
    "use_megatron_fsdp use_custom_fsdp reduce_scatter_with_fp32_accumulation "
    "param_name_patterns_for_fp32_local_accumulation"
).split()


def check_update(config: Any) -> None:
    """Refuse settings of an :class:`OptimizerConfig` for other updates than AdamW's in float32.

    Raises:
        HexadError: naming the first one.
    """
    _check_defaults("OptimizerConfig", config, OptimizerConfig, _UPDATE)


def check_reduction(config: Any) -> None:
    """Refuse settings of a :class:`DistributedDataParallelConfig` for other reductions than Hexad's.

    Raises:
        HexadError: naming the first one, or something else than settings.
    """
    if isinstance(config, Mapping):
        raise HexadError("ddp_config: found a mapping; pass a DistributedDataParallelConfig")
    _check_defaults("DistributedDataParallelConfig", config, DistributedDataParallelConfig, _REDUCTION)


def _check_defaults(kind: str, config: Any, defaults: type, names: Sequence[str]) -> None:
    for name in names:
        default = getattr(defaults, name)
        value = getattr(config, name, default)
        if value != default:
            raise HexadError(f"{kind}.{name}: found {value}, which is not supported; use {default}")


@dataclass
class CommonInferenceParams:
    """Megatron-Core's settings of generation.

    Attributes:
        temperature, top_k, top_p: of sampling; 0 for the last two: all tokens.
        num_tokens_to_generate: at most.
        return_log_probs, num_tokens_total, top_n_logprobs: with these values only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    num_tokens_to_generate: int | None = 30
    num_tokens_total: int | None = None
    top_n_logprobs: int = 0


class StrictHandling(Enum):
    """Megatron-Core's ways to load a checkpoint with other names; without effect."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"


@dataclass
class DistributedDataParallelConfig:
    """Megatron-Core's settings of the reduction of gradients.

    Attributes:
        grad_reduce_in_fp32: reduce in fp32 whatever the parameters' format, as is done in any case.
        use_distributed_optimizer: shard the optimizer's state over data ranks, ZeRO 1.
        num_distributed_optimizer_instances: groups of ranks inside which it is sharded.
        bucket_size: parameters of a bucket.
        data_parallel_sharding_strategy: with Megatron-FSDP, what is sharded.
        overlap_grad_reduce, overlap_param_gather, align_param_gather, align_grad_reduce: without effect:
            reduction and gathering overlap in any case.
        check_for_nan_in_grad: raise an error on all ranks if a gradient is not finite, with
            ``DistributedDataParallel``; other trainers skip such updates.
        check_for_large_grads, average_in_collective, fp8_param_gather: without effect.
        use_megatron_fsdp, use_custom_fsdp, reduce_scatter_with_fp32_accumulation: False.
        param_name_patterns_for_fp32_local_accumulation: none.
        others: of buffers, of Megatron-FSDP and of fp8: without effect.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    align_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    preserve_fp32_weights: bool = True
    keep_fp8_transpose_cache: bool = False
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False
    nccl_ub: bool = False
    fp4_param_gather: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    fsdp_manual_registration: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    delay_wgrad_compute: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False
