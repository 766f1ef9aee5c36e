"""The modules that scripts import from ``megatron``, of Megatron-Core and of older releases; the names and
arguments that Hexad lacks."""

from collections.abc import Mapping
from typing import Any

from hexad.config import HexadError, did_you_mean

_MODULES = {
    "datasets": "core.datasets.blended_megatron_dataset_builder core.datasets.gpt_dataset "
    "core.datasets.utils",
    "gpt": "core.models.gpt core.models.gpt.gpt_model legacy.model model",
    "initialize": "checkpointing initialize training.initialize",
    "layers": "core.tensor_parallel.layers",
    "mappings": "core.tensor_parallel.mappings",
    "parallel_state": "core.mpu core.parallel_state mpu",
    "schedules": "core.num_microbatches_calculator core.pipeline_parallel core.pipeline_parallel.schedules",
    "settings": "core.distributed core.model_parallel_config core.optimizer core.transformer.module",
    "tensor_parallel": "core.tensor_parallel",
    "training": "arguments core.rerun_state_machine core.utils global_vars training training.arguments "
    "training.global_vars training.utils utils",
    "transformer": "core.enums core.models.gpt.gpt_layer_specs core.transformer core.transformer.enums "
    "core.transformer.spec_utils core.transformer.transformer_config training.yaml_arguments",
}
WHERE = dict(sorted((name, module) for module, names in _MODULES.items() for name in names.split()))
"""Module of Megatron-LM -> module of this package; packages before their modules."""

NAMES = {
    "core.ModelParallelConfig": "settings",
    "core.dist_checkpointing.validation.StrictHandling": "settings",
    "core.inference.common_inference_params.CommonInferenceParams": "settings",
}
"""Name in a package of Megatron-Core -> module of this package that has it."""

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


def check_arguments(
    function: str, given: Mapping[str, Any], ignored: str, absent: str = "", **defaults: Any
) -> None:
    """Refuse arguments that Megatron-LM does not have, and values that Hexad has no equivalent for.

    Args:
        function: for messages.
        given: its keyword arguments beside those of its signature.
        ignored: names of those that have no effect here.
        absent: names of those that are supported as None only.
        defaults: by name, the only value of further ones that is supported beside None.

    Raises:
        TypeError: an unknown argument.
        HexadError: another value.
    """
    defaults |= dict.fromkeys(absent.split())
    for name, value in given.items():
        if name not in (known := {*defaults, *ignored.split()}):
            raise TypeError(f"{function}: unexpected argument {name!r}{did_you_mean(name, known)}")
        if value is not None and name in defaults and value != defaults[name]:
            shown = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
            raise HexadError(f"{function}: found {name} {shown}; it is not supported: leave it out")
