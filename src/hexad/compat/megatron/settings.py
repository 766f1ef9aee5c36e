"""Megatron-Core's classes of settings that scripts make themselves, and the base class of its modules."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn


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
        params_dtype, overlap_param_gather, overlap_param_gather_with_optimizer_step, timers: without effect.
        use_precision_aware_optimizer, log_num_zeros_in_grad, barrier_with_L1_time: likewise.
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
        check_for_nan_in_grad, check_for_large_grads, average_in_collective, fp8_param_gather: likewise.
        others: of kernels, of buffers, and of Megatron-FSDP's own: likewise.
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
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    preserve_fp32_weights: bool = True
    keep_fp8_transpose_cache: bool = False
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False
