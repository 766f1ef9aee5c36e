"""The modules that scripts import from ``megatron``, of Megatron-Core and of older releases, and the names
that Hexad lacks."""

WHERE = {
    "arguments": "training",
    "checkpointing": "initialize",
    "core.datasets.blended_megatron_dataset_builder": "datasets",
    "core.datasets.gpt_dataset": "datasets",
    "core.datasets.utils": "datasets",
    "core.enums": "transformer",
    "core.models.gpt": "gpt",
    "core.models.gpt.gpt_layer_specs": "transformer",
    "core.models.gpt.gpt_model": "gpt",
    "core.mpu": "parallel_state",
    "core.num_microbatches_calculator": "schedules",
    "core.parallel_state": "parallel_state",
    "core.pipeline_parallel": "schedules",
    "core.pipeline_parallel.schedules": "schedules",
    "core.rerun_state_machine": "training",
    "core.tensor_parallel": "tensor_parallel",
    "core.tensor_parallel.layers": "layers",
    "core.tensor_parallel.mappings": "mappings",
    "core.transformer": "transformer",
    "core.transformer.enums": "transformer",
    "core.transformer.spec_utils": "transformer",
    "core.transformer.transformer_config": "transformer",
    "core.utils": "training",
    "global_vars": "training",
    "initialize": "initialize",
    "legacy.model": "gpt",
    "model": "gpt",
    "mpu": "parallel_state",
    "training": "training",
    "training.arguments": "training",
    "training.global_vars": "training",
    "training.initialize": "initialize",
    "training.utils": "training",
    "training.yaml_arguments": "transformer",
    "utils": "training",
}
"""Module of Megatron-LM -> module of this package."""

_NAMES = {
    "reinforcement learning is not part of Hexad yet": ("rl.rl_utils",),
    "use GPTDataset, or a data set of torch.utils.data": (
        "training.datasets.fim_dataset.GPTFIMDataset",
        "training.datasets.fim_dataset.GPTFIMDatasetConfig",
        "training.datasets.sft_dataset.SFTDataset",
    ),
    "documents are isolated by --reset-position-ids and its companions": (
        "core.packed_seq_params.PackedSeqParams",
    ),
    "only the next token is predicted": (
        "core.transformer.multi_token_prediction.get_mtp_ranks",
        "core.transformer.multi_token_prediction.mtp_on_this_rank",
    ),
    "GPTModel is the only model": (
        "core.models.bert.bert_model.BertModel",
        "core.models.T5.t5_model.T5Model",
        "core.models.mamba.MambaModel",
        "core.models.hybrid.hybrid_model.HybridModel",
    ),
    "convert checkpoints with hexad checkpoint import": (
        "training.checkpointing.load_checkpoint",
        "training.checkpointing.save_checkpoint",
    ),
}

UNSUPPORTED = {name: why for why, names in _NAMES.items() for name in names}
"""Names below ``megatron`` that can be imported -> what to do instead of using them."""
