"""The modules that scripts import from ``deepspeed``, and the names that Hexad lacks. No torch."""

WHERE = {
    "accelerator": "accelerator",
    "checkpoint.utils": "utils",
    "checkpointing": "checkpointing",
    "comm": "comm",
    "compression.helper": "utils",
    "constants": "entry",
    "launcher.runner": "entry",
    "moe.utils": "utils",
    "ops.adam": "ops",
    "pipe": "pipe",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.config": "entry",
    "runtime.dataloader": "data",
    "runtime.engine": "engine",
    "runtime.lr_schedules": "lr_schedules",
    "runtime.pipe.engine": "pipe_engine",
    "runtime.pipe.module": "pipe",
    "runtime.pipe.topology": "groups",
    "runtime.utils": "utils",
    "runtime.zero": "zero",
    "runtime.zero.offload_config": "zero",
    "runtime.zero.partition_parameters": "zero",
    "utils": "utils",
    "utils.groups": "groups",
    "utils.logging": "utils",
    "zero": "zero",
}
"""Module of DeepSpeed -> module of this package."""

_KERNELS = "DeepSpeed's kernels are not part of Hexad; use PyTorch's modules"
_DIVIDED = "a user-defined module is not divided; use one of Hexad's models with parallel"
_INFERENCE = "inference uses Hexad's models: hexad generate, hexad.generate"
_CHANGES = "it changes the training; remove it"
_OPTIMIZER = "use an optimizer of torch.optim"
_NAMES = {
    "moe.layer": ("mixtures of experts are not supported yet; build the model without them", "MoE"),
    "compression.compress": ("compression is not supported; remove it", "init_compression redundancy_clean"),
    "compression.helper": ("compression is not supported; remove it", "convert_conv1d_to_linear"),
    "inference": (_INFERENCE, "DeepSpeedTPConfig RaggedInferenceEngineConfig"),
    "inference.v2.ragged": (_INFERENCE, "DSStateManagerConfig"),
    "runtime.domino.transformer": (f"{_DIVIDED}.tensor", "DominoTransformer"),
    "sequence.layer": (f"{_DIVIDED}.context", "DistributedAttention"),
    "runtime.sequence_parallel.ulysses_sp": (
        f"{_DIVIDED}.context",
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    ),
    "module_inject": (_KERNELS, "replace_transformer_layer"),
    "ops.transformer": (_KERNELS, "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
    "ops.sparse_attention": (
        _KERNELS,
        "BSLongformerSparsityConfig BertSparseSelfAttention BigBirdSparsityConfig DenseSparsityConfig "
        "FixedSparsityConfig SparseAttentionUtils VariableSparsityConfig",
    ),
    "ops.op_builder": (_KERNELS, "AsyncIOBuilder GDSBuilder"),
    "ops.lamb": (_OPTIMIZER, "FusedLamb"),
    "ops.lion": (_OPTIMIZER, "DeepSpeedCPULion FusedLion"),
    "ops.adagrad": (_OPTIMIZER, "DeepSpeedCPUAdagrad"),
    "runtime.fp16.fused_optimizer": (_OPTIMIZER, "FP16_Optimizer"),
    "runtime.fp16.unfused_optimizer": (_OPTIMIZER, "FP16_UnfusedOptimizer"),
    "io": (
        "checkpoints are written by the engine; use torch.save for other files",
        "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter",
    ),
    "runtime.data_pipeline.data_routing.helper": (_CHANGES, "convert_to_random_ltd save_without_random_ltd"),
    "runtime.data_pipeline.data_sampling.data_analyzer": (_CHANGES, "DataAnalyzer"),
    "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": (
        _CHANGES,
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    ),
    "runtime.data_pipeline.data_sampling.indexed_dataset": (
        "Hexad reads these files itself: hexad.dataset, hexad data inspect",
        "MMapIndexedDataset",
    ),
    "utils": ("create the module inside torch.device(...), or deepspeed.zero.Init", "OnDevice"),
}
"""Module of DeepSpeed -> what to do instead, names."""

UNSUPPORTED = {
    "OnDevice": _NAMES["utils"][0],
    "init_inference": _INFERENCE,
    "set_autotp_mode": f"{_DIVIDED}.tensor",
    "tp_model_init": f"{_DIVIDED}.tensor",
    "DeepSpeedTransformerConfig": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "replace_transformer_layer": _KERNELS,
    "revert_transformer_layer": _KERNELS,
    **{f"{module}.{name}": why for module, (why, names) in _NAMES.items() for name in names.split()},
}
"""Names below ``deepspeed`` that can be imported -> what to do instead of using them."""
