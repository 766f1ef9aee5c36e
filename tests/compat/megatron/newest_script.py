"""A training script in the style of ``pretrain_gpt.py`` since core_v0.18: the line is read first, settings
are passed to ``pretrain`` in place of a model provider, and the first tensor rank's batch is sent."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.package_info import __version__ as mcore_version
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_te_version,
)
from megatron.training import get_args, inprocess_restart, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

try:
    from megatron.post_training.arguments import add_modelopt_args
except ImportError:
    add_modelopt_args = None

KEYS = ["attention_mask", "cu_seqlens", "labels", "loss_mask", "position_ids", "tokens"]


def get_batch(data_iterator, vp_stage=None):
    args = get_args()
    assert not mtp_on_this_rank(vp_stage=vp_stage) and get_te_version().major == 0
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = next(data_iterator)
        for key in KEYS:
            value = batch.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        micro_batch_size=args.micro_batch_size,
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return [get_batch_on_this_cp_rank(batch)[key] for key in KEYS]


def loss_func(loss_mask, output_tensor, model=None):
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask.view(-1))
    tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    batch = dict(zip(KEYS, get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))))
    inputs = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    losses = model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"], packed_seq_params=None)
    return losses, partial(loss_func, batch["loss_mask"], model=model)


def datasets_provider(sizes, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(sequence_length=args.seq_length, tokenizer=build_tokenizer(args))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    assert groups.tp.size() == args.tensor_model_parallel_size and groups.dp_cp.size() == 1
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


if __name__ == "__main__":
    print_rank_0(f"megatron-core {mcore_version}")
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(
        extra_args_provider=add_modelopt_args, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    assert args.params_dtype == torch.float32 and get_args() is args
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step, store=store)
