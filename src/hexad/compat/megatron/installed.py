"""The modules that scripts import from ``megatron``, of Megatron-Core and of older releases; the names and
arguments that Hexad lacks."""

from ..facade.names import read_names

_MODULES = {
    "dist_checkpointing": "core.dist_checkpointing core.dist_checkpointing.mapping "
    "core.dist_checkpointing.serialization",
    "core_optimizer": "core.optimizer_param_scheduler",
    "distributed": "core.distributed core.distributed.distributed_data_parallel "
    "core.distributed.finalize_model_grads",
    "datasets": "data.gpt_dataset core.datasets.blended_dataset "
    "core.datasets.blended_megatron_dataset_builder core.datasets.gpt_dataset "
    "core.datasets.utils",
    "enums": "core.enums core.transformer.enums enums model.enums",
    "gpt": "core.models.gpt core.models.gpt.gpt_model legacy.model model model.gpt_model",
    "initialize": "checkpointing initialize training.initialize",
    "layers": "core.tensor_parallel.layers mpu.layers",
    "process_groups": "core.process_groups_config",
    "mappings": "core.tensor_parallel.cross_entropy core.tensor_parallel.mappings mpu.cross_entropy "
    "mpu.mappings",
    "parallel_state": "core.mpu core.parallel_state mpu mpu.initialize",
    "schedules": "core.num_microbatches_calculator core.pipeline_parallel core.pipeline_parallel.schedules "
    "microbatches schedules",
    "settings": "core.model_parallel_config core.optimizer core.transformer.module model.module",
    "tensor_parallel": "core.tensor_parallel core.tensor_parallel.data core.tensor_parallel.random "
    "core.tensor_parallel.utils mpu.data mpu.random mpu.utils",
    "training": "arguments core.rerun_state_machine core.timers core.utils global_vars timers training "
    "training.arguments training.global_vars training.training training.utils utils",
    "transformer": "core.models.gpt.gpt_layer_specs core.transformer "
    "core.transformer.spec_utils core.transformer.transformer_config training.yaml_arguments",
}
WHERE = dict(sorted((name, module) for module, names in _MODULES.items() for name in names.split()))
"""Module of Megatron-LM -> module of this package; packages before their modules."""

NAMES = {
    "core.ModelParallelConfig": "settings",
    "core.DistributedDataParallel": "distributed",
    "core.datasets.megatron_tokenizer.MegatronTokenizer": "initialize",
    "core.dist_checkpointing.validation.StrictHandling": "settings",
    "core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig": "settings",
    "core.inference.common_inference_params.CommonInferenceParams": "settings",
    "model.ModelType": "transformer",
    "core.models.gpt.heterogeneous.heterogeneous_layer_specs.get_gpt_heterogeneous_layer_spec": "transformer",
    **dict.fromkeys(
        (
            "core.dist_checkpointing.strategies.fully_parallel.FullyParallelLoadStrategyWrapper",
            "core.dist_checkpointing.strategies.fully_parallel.FullyParallelSaveStrategyWrapper",
        ),
        "dist_checkpointing",
    ),
    "core.transformer.module.Float16Module": "distributed",
    "model.module.Float16Module": "distributed",
    "core.optimizer.MegatronOptimizer": "core_optimizer",
    "core.optimizer.get_megatron_optimizer": "core_optimizer",
    "core.optimizer.optimizer.MegatronOptimizer": "core_optimizer",
    "core.tokenizers.MegatronTokenizer": "initialize",
    "core.tokenizers.megatron_tokenizer.MegatronTokenizer": "initialize",
    "core.tokenizers.text.utils.build_tokenizer.build_tokenizer": "initialize",
    "core.tokenizers.utils.build_tokenizer.build_tokenizer": "initialize",
    "training.tokenizer.build_tokenizer": "initialize",
    "training.tokenizer.tokenizer._NullTokenizer": "initialize",
    "training.argument_utils.core_transformer_config_from_args": "transformer",
    "training.argument_utils.gpt_config_from_args": "training",
    "training.argument_utils.pretrain_cfg_container_from_args": "training",
    "training.arguments.parse_and_validate_args": "initialize",
    "training.arguments.parse_args": "initialize",
    "training.arguments.validate_args": "initialize",
    "training.config.PretrainConfigContainer": "training",
    "training.models.GPTModelConfig": "training",
    **dict.fromkeys(
        (
            "core.activations.quick_gelu",
            "core.activations.squared_relu",
            "core.datasets.utils.compile_helpers",
            "core.fusions.fused_bias_dropout.get_bias_dropout_add",
            "core.fusions.fused_bias_geglu.quick_gelu",
            "core.transformer.build_module",
            "core.transformer.identity_op.IdentityFuncOp",
            "core.transformer.identity_op.IdentityOp",
            "core.transformer.multi_token_prediction.get_mtp_ranks",
            "core.transformer.multi_token_prediction.mtp_on_this_rank",
            "core.transformer.spec_utils.build_module",
            "core.transformer.spec_utils.get_module",
            "core.transformer.utils.attention_mask_func",
            "core.transformer.utils.erf_gelu",
            "core.transformer.utils.gelu_impl",
            "core.transformer.utils.get_linear_layer",
            "core.transformer.utils.openai_gelu",
            "core.utils.divide",
            "core.utils.ensure_divisibility",
            "core.utils.flatten_batch_for_packed_sequences",
            "core.utils.get_te_version",
            "core.utils.get_torch_version",
            "core.utils.init_method_normal",
            "core.utils.is_fa_min_version",
            "core.utils.is_te_min_version",
            "core.utils.is_torch_min_version",
            "core.utils.make_viewless_tensor",
            "core.utils.scaled_init_method_normal",
            "model.utils.attention_mask_func",
            "model.utils.erf_gelu",
            "model.utils.get_linear_layer",
            "model.utils.init_method_normal",
            "model.utils.openai_gelu",
            "model.utils.scaled_init_method_normal",
            "training.inprocess_restart.maybe_wrap_for_inprocess_restart",
        ),
        "helpers",
    ),
    **dict.fromkeys(
        (
            "mpu.ColumnParallelLinear",
            "mpu.RowParallelLinear",
            "mpu.VocabParallelEmbedding",
            "mpu.broadcast_data",
            "mpu.checkpoint",
            "mpu.copy_to_tensor_model_parallel_region",
            "mpu.gather_from_tensor_model_parallel_region",
            "mpu.get_cuda_rng_tracker",
            "mpu.model_parallel_cuda_manual_seed",
            "mpu.reduce_from_tensor_model_parallel_region",
            "mpu.scatter_to_tensor_model_parallel_region",
            "mpu.split_tensor_along_last_dim",
            "mpu.vocab_parallel_cross_entropy",
        ),
        "tensor_parallel",
    ),
}
"""Name in a package of Megatron-Core -> module of this package that has it."""

_CHECKPOINTS = "convert checkpoints with hexad checkpoint import; runs save and load their own"
_GENERATION = "generate with hexad generate, hexad serve, or hexad.generate"
_LAYERS = "layers are those of the flags, which GPTModel has; user-defined ones are modules of torch.nn"
_ONLY_GPT = "GPTModel is the only model"
_DATA = "use GPTDataset, or a data set of torch.utils.data"
_EXPERTS = "experts are not supported yet outside a run.yaml (model.moe); use hexad train"
_KERNELS = "kernels are Hexad's; leave it out"
_TRAIN = "use pretrain, or setup_model and get_forward_backward_func"
_ENGINE = "use pretrain, or hexad.Engine, which reduces gradients and updates weights"
_INSTEAD = {
    "": "Hexad has no counterpart; remove it",
    "arguments": "use the flags of docs/megatron.md",
    "checkpointing": _CHECKPOINTS,
    "core": "Hexad has no counterpart; remove it",
    "core.datasets": _DATA,
    "core.dist_checkpointing": _CHECKPOINTS,
    "core.distributed": _ENGINE,
    "core.export": "export models with hexad checkpoint export",
    "core.extensions": _KERNELS,
    "core.fusions": _KERNELS,
    "core.inference": _GENERATION,
    "core.inference_params": _GENERATION,
    "core.models": _ONLY_GPT,
    "core.models.common": _LAYERS,
    "core.models.gpt": _LAYERS,
    "core.optimizer": _ENGINE,
    "core.optimizer_param_scheduler": "schedules are those of the flags, as --lr-decay-style",
    "core.packed_seq_params": "documents are isolated by --reset-position-ids and its companions",
    "core.pipeline_parallel": "get_forward_backward_func runs the layout's schedule",
    "core.post_training": "quantisation after training is not supported",
    "core.quantization": "8-bit formats are those of the flags, as --fp8-format",
    "core.resharding": _CHECKPOINTS,
    "core.ssm": _ONLY_GPT,
    "core.tensor_parallel": "use the layers and mappings of megatron.core.tensor_parallel",
    "core.tokenizers": "use get_tokenizer()",
    "core.transformer": _LAYERS,
    "core.transformer.moe": _EXPERTS,
    "core.transformer.multi_token_prediction": "only the next token is predicted",
    "data": _DATA,
    "fused_kernels": _KERNELS,
    "inference": _GENERATION,
    "learning_rates": "schedules are those of the flags, as --lr-decay-style",
    "legacy": _LAYERS,
    "core.transformer.custom_layers": _KERNELS,
    "legacy.data": _DATA,
    "legacy.fused_kernels": _KERNELS,
    "legacy.model": _ONLY_GPT,
    "model": _ONLY_GPT,
    "model.transformer": _LAYERS,
    "mpu": "use the layers and mappings of megatron.core.tensor_parallel",
    "optimizer": _ENGINE,
    "optimizer_param_scheduler": "schedules are those of the flags, as --lr-decay-style",
    "rl": "reinforcement learning is not part of Hexad yet",
    "text_generation": _GENERATION,
    "text_generation_utils": _GENERATION,
    "tokenizer": "use get_tokenizer()",
    "training": _TRAIN,
    "training.argument_utils": "use gpt_config_from_args: GPTModel is the only model",
    "training.arguments": "use the flags of docs/megatron.md",
    "training.checkpointing": _CHECKPOINTS,
    "training.datasets": _DATA,
    "training.models": _ONLY_GPT,
    "training.tokenizer": "use get_tokenizer()",
}
"""Name or module below ``megatron`` -> what to do instead of using it, or a name in it."""

VERSION = "0.16.1"
"""The release of Megatron-Core that the interface is compared with."""
_VERSIONS = dict.fromkeys(("core.__version__", "core.package_info.__version__"), VERSION)

_TABLE = read_names(__package__, _INSTEAD, constants=_VERSIONS)
MODULES, UNSUPPORTED, CONSTANTS = _TABLE.modules, _TABLE.unsupported, _TABLE.constants
"""Modules of Megatron-LM, Megatron-Core and Megatron-DeepSpeed; names below ``megatron`` -> what to do
instead of using them, where this package lacks them; names of constants -> their values."""
