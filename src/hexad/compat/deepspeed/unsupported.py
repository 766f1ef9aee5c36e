"""Names of DeepSpeed that Hexad lacks: scripts can import them; using them is an error. No torch."""

_NAMES = {
    "mixtures of experts are not supported yet; build the model without them": ("moe.layer.MoE",),
    "compression is not supported; remove it": (
        "compression.compress.init_compression",
        "compression.compress.redundancy_clean",
        "compression.helper.convert_conv1d_to_linear",
    ),
    "inference uses Hexad's models: hexad generate, hexad.generate": (
        "init_inference",
        "inference.DeepSpeedTPConfig",
        "inference.RaggedInferenceEngineConfig",
        "inference.v2.ragged.DSStateManagerConfig",
    ),
    "a user-defined module is not divided; use one of Hexad's models with parallel.tensor": (
        "tp_model_init",
        "set_autotp_mode",
        "runtime.domino.transformer.DominoTransformer",
    ),
    "a user-defined module is not divided; use one of Hexad's models with parallel.context": (
        "sequence.layer.DistributedAttention",
        "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF",
        "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter",
    ),
    "DeepSpeed's kernels are not part of Hexad; use PyTorch's modules": (
        "DeepSpeedTransformerConfig",
        "DeepSpeedTransformerLayer",
        "replace_transformer_layer",
        "revert_transformer_layer",
        "module_inject.replace_transformer_layer",
        "ops.transformer.DeepSpeedTransformerConfig",
        "ops.transformer.DeepSpeedTransformerLayer",
        "ops.sparse_attention.BSLongformerSparsityConfig",
        "ops.sparse_attention.BertSparseSelfAttention",
        "ops.sparse_attention.BigBirdSparsityConfig",
        "ops.sparse_attention.DenseSparsityConfig",
        "ops.sparse_attention.FixedSparsityConfig",
        "ops.sparse_attention.SparseAttentionUtils",
        "ops.sparse_attention.VariableSparsityConfig",
        "ops.op_builder.AsyncIOBuilder",
        "ops.op_builder.GDSBuilder",
    ),
    "use an optimizer of torch.optim": (
        "ops.lamb.FusedLamb",
        "ops.lion.DeepSpeedCPULion",
        "ops.lion.FusedLion",
        "ops.adagrad.DeepSpeedCPUAdagrad",
        "runtime.fp16.fused_optimizer.FP16_Optimizer",
        "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
    ),
    "checkpoints are written by the engine; use torch.save for other files": (
        "io.FastFileWriter",
        "io.FastFileWriterConfig",
        "io.MockFileWriter",
        "io.PyFileWriter",
    ),
    "it changes the training; remove it": (
        "runtime.data_pipeline.data_routing.helper.convert_to_random_ltd",
        "runtime.data_pipeline.data_routing.helper.save_without_random_ltd",
        "runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer",
        "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr."
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    ),
    "Hexad reads these files itself: hexad.dataset, hexad data inspect": (
        "runtime.data_pipeline.data_sampling.indexed_dataset.MMapIndexedDataset",
    ),
    "create the module inside torch.device(...), or deepspeed.zero.Init": ("OnDevice", "utils.OnDevice"),
}
"""What to do instead -> names below ``deepspeed``."""

UNSUPPORTED = {name: why for why, names in _NAMES.items() for name in names}
"""Names below ``deepspeed`` -> what to do instead of using them."""
