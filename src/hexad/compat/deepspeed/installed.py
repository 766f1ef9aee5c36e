"""The modules that scripts import from ``deepspeed``, and the names that Hexad lacks. No torch."""

from collections import defaultdict
from typing import Any

from ..facade.names import read_names

WHERE = {
    "accelerator": "accelerator",
    "accelerator.abstract_accelerator": "accelerator",
    "accelerator.real_accelerator": "accelerator",
    "checkpoint.utils": "utils",
    "checkpointing": "checkpointing",
    "comm": "comm",
    "comm.comm": "comm",
    "compression.helper": "utils",
    "constants": "entry",
    "env_report": "env_report",
    "launcher.runner": "entry",
    "moe.utils": "utils",
    "ops": "ops",
    "ops.adam": "ops",
    "pipe": "pipe",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.base_optimizer": "optimizers",
    "runtime.config": "entry",
    "runtime.dataloader": "data",
    "runtime.engine": "engine",
    "runtime.lr_schedules": "lr_schedules",
    "runtime.pipe.engine": "pipe_engine",
    "runtime.pipe.module": "pipe",
    "runtime.pipe.topology": "groups",
    "runtime.utils": "utils",
    "runtime.zero": "zero",
    "runtime.zero.config": "zero",
    "runtime.zero.offload_config": "zero",
    "runtime.zero.parameter_offload": "zero",
    "runtime.zero.partition_parameters": "zero",
    "runtime.zero.stage3": "zero",
    "utils": "utils",
    "utils.groups": "groups",
    "utils.logging": "utils",
    "utils.nvtx": "utils",
    "utils.tensor_fragment": "parameter_values",
    "utils.timer": "timers",
    "utils.torch": "utils",
    "utils.z3_leaf_module": "utils",
    "utils.zero_to_fp32": "zero_to_fp32",
    "zero": "zero",
}
"""Module of DeepSpeed -> module of this package."""

_KERNELS = "DeepSpeed's kernels are not part of Hexad; use PyTorch's modules"
_DIVIDED = "a user-defined module is not divided; use one of Hexad's models with parallel"
_INFERENCE = "inference uses Hexad's models: hexad generate, hexad.generate"
_CHANGES = "it changes the training; remove it"
_OPTIMIZER = "use an optimizer of torch.optim"
_COMPRESSION = "compression is not supported; remove it"
_STATE = "Hexad's engine shards the state; use the engine that deepspeed.initialize returns"
_FILES = "checkpoints are written by the engine; use torch.save for other files"
_INSTEAD = {
    "": "Hexad has no counterpart; remove it",
    "accelerator": "use get_accelerator()",
    "autotuning": "use hexad show memory and hexad train --dry-run",
    "checkpoint": "checkpoints here have no layout; hexad checkpoint import --from ds:DIR reads DeepSpeed's",
    "comm": "use torch.distributed",
    "compile": "use torch.compile, which the engine does not need",
    "compression": _COMPRESSION,
    "datastates": _FILES,
    "elasticity": "use torchrun --nnodes MIN:MAX",
    "env_report": "use python -m torch.utils.collect_env",
    "inference": _INFERENCE,
    "init_inference": _INFERENCE,
    "io": _FILES,
    "launcher": "start the script with torchrun, or python -m hexad.compat.deepspeed",
    "linear": "use the modules of peft, or torch.nn.Linear",
    "model_implementations": _KERNELS,
    "module_inject": _KERNELS,
    "moe": "mixtures of experts are not supported yet; build the model without them",
    "monitor": "use the script's own logger",
    "nvme": "NVMe offload is not supported; use offload_optimizer with device cpu",
    "ops": _KERNELS,
    "ops.adagrad": _OPTIMIZER,
    "ops.adam": _OPTIMIZER,
    "ops.lamb": _OPTIMIZER,
    "ops.lion": _OPTIMIZER,
    "ops.muon": _OPTIMIZER,
    "profiling": "use torch.profiler, or torch.utils.flop_counter",
    "revert_transformer_layer": _KERNELS,
    "runtime": _STATE,
    "runtime.compiler": "use torch.compile",
    "runtime.data_pipeline": _CHANGES,
    "runtime.data_pipeline.data_sampling.indexed_dataset": (
        "Hexad reads these files itself: hexad.dataset, hexad data inspect"
    ),
    "runtime.domino": f"{_DIVIDED}.tensor",
    "runtime.fp16": _OPTIMIZER,
    "runtime.hybrid_engine": _INFERENCE,
    "runtime.pipe": "PipelineModule runs one of Hexad's schedules, which its argument schedule names",
    "runtime.progressive_layer_drop": _CHANGES,
    "runtime.rollout": _INFERENCE,
    "runtime.sequence_parallel": f"{_DIVIDED}.context",
    "runtime.state_dict_factory": "load the state before deepspeed.initialize",
    "runtime.swap_tensor": "NVMe offload is not supported; use offload_optimizer with device cpu",
    "runtime.tensor_parallel": f"{_DIVIDED}.tensor",
    "runtime.zenflow": _CHANGES,
    "sequence": f"{_DIVIDED}.context",
    "set_autotp_mode": f"{_DIVIDED}.tensor",
    "tp_model_init": f"{_DIVIDED}.tensor",
    "utils.OnDevice": "create the module inside torch.device(...), or deepspeed.zero.Init",
    "OnDevice": "create the module inside torch.device(...), or deepspeed.zero.Init",
    "DeepSpeedHybridEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "DeepSpeedTransformerConfig": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "InferenceEngine": _INFERENCE,
    "replace_transformer_layer": _KERNELS,
    "utils": "Hexad has no counterpart; remove it",
}
"""Name or module below ``deepspeed`` -> what to do instead of using it, or a name in it."""

_EARLIER = {
    "moe.layer": "MoE",
    "compression.compress": "init_compression redundancy_clean",
    "compression.helper": "convert_conv1d_to_linear",
    "inference": "DeepSpeedTPConfig RaggedInferenceEngineConfig",
    "inference.v2.ragged": "DSStateManagerConfig",
    "runtime.domino.transformer": "DominoTransformer",
    "sequence.layer": "DistributedAttention",
    "runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    "module_inject": "replace_transformer_layer",
    "ops.transformer": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
    "ops.sparse_attention": (
        "BSLongformerSparsityConfig BertSparseSelfAttention BigBirdSparsityConfig DenseSparsityConfig "
        "FixedSparsityConfig SparseAttentionUtils VariableSparsityConfig"
    ),
    "ops.op_builder": "AsyncIOBuilder GDSBuilder",
    "ops.lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
    "io": "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter",
    "runtime.data_pipeline.data_routing.helper": "convert_to_random_ltd save_without_random_ltd",
    "runtime.data_pipeline.data_sampling.data_analyzer": "DataAnalyzer",
    "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": (
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"
    ),
    "runtime.data_pipeline.data_sampling.indexed_dataset": "MMapIndexedDataset",
    "utils": "OnDevice",
}
"""Module -> names of earlier releases, or that only some systems have."""


_NONE: Any = defaultdict(bool)
_EMPTY: dict[str, Any] = {
    "git_version_info.compatible_ops": _NONE,
    "git_version_info.installed_ops": _NONE,
    "git_version_info.torch_info": {"version": "0.0", "cuda_version": "0.0", "hip_version": "0.0"},
    "ops.__compatible_ops__": _NONE,
    "HAS_TRITON": False,
}
"""What the package finds out when it is installed or imported: there are no kernels."""


_NAMES = read_names(__package__, _INSTEAD, _EARLIER, _EMPTY)
MODULES, UNSUPPORTED, CONSTANTS = _NAMES.modules, _NAMES.unsupported, _NAMES.constants
"""DeepSpeed's modules; names below ``deepspeed`` -> what to do instead of using them, where this package
lacks them; names of constants -> their values."""
