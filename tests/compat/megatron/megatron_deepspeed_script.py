"""A training script in the style of Megatron-DeepSpeed's ``pretrain_gpt.py``: modules below ``megatron``
without ``core``, a pipeline model whose script says how a batch is read, and data as ``text``. With
``--other`` a model that returns losses of experts too, and a forward step."""

from functools import partial

import deepspeed
import torch
from deepspeed.runtime.utils import see_memory_usage
from megatron import get_args, get_timers, get_tokenizer, mpu, print_rank_0
from megatron.arguments import core_transformer_config_from_args
from megatron.core import tensor_parallel
from megatron.data.gpt_dataset import build_train_valid_test_datasets
from megatron.enums import AttnMaskType
from megatron.model import GPTModel, GPTModelPipe, ModelType
from megatron.training import pretrain
from megatron.utils import average_losses_across_data_parallel_group, get_ltor_masks_and_position_ids


def model_provider(pre_process=True, post_process=True):
    see_memory_usage("Before Building Model", force=False)
    args = get_args()
    assert args.remote_device == "none" and not args.curriculum_learning
    with deepspeed.zero.Init(
        data_parallel_group=mpu.get_data_parallel_group(),
        config_dict_or_path=args.deepspeed_config,
        enabled=args.zero_stage == 3,
        mpu=mpu,
    ):
        if not args.other:
            model = GPTModelPipe(num_tokentypes=0, parallel_output=True, attn_mask_type=AttnMaskType.causal)
            model._megatron_batch_fn = get_batch_pipe
        else:
            model = GPTModel(
                config=core_transformer_config_from_args(args),
                num_tokentypes=0,
                parallel_output=True,
                pre_process=pre_process,
                post_process=post_process,
            )
    return model


def get_batch(data):
    args, tokenizer = get_args(), get_tokenizer()
    tokens_ = mpu.broadcast_data(["text"], data, torch.int64)["text"].long()
    labels, tokens = tokens_[:, 1:].contiguous(), tokens_[:, :-1].contiguous()
    resets = args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss
    more = {"prefix_indices": None, "loss_on_targets_only": args.loss_on_targets_only}
    masks = get_ltor_masks_and_position_ids(tokens, tokenizer.eod, *resets, **more)
    return tokens, labels, *masks


def get_batch_pipe(data):
    tokens, labels, attention_mask, loss_mask, position_ids = get_batch(data)
    return (tokens, position_ids, attention_mask), (labels, loss_mask)


def loss_func(loss_mask, moe_loss, output_tensor):
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.float().view(-1) * loss_mask) / loss_mask.sum() + moe_loss
    averaged = average_losses_across_data_parallel_group([loss])
    return loss, {"lm loss": averaged[0]}


def forward_step(data_iterator, model):
    args = get_args()
    assert args.other and max(args.num_experts) <= 1
    get_timers()("batch-generator", log_level=2).start()
    tokens, labels, attention_mask, loss_mask, position_ids = get_batch(next(data_iterator))
    get_timers()("batch-generator").stop()
    output, other_losses = model(tokens, position_ids, attention_mask, labels=labels)
    return output, partial(loss_func, loss_mask, sum(other_losses) * args.moe_loss_coeff)


def datasets_provider(sizes):
    args = get_args()
    return build_train_valid_test_datasets(
        data_prefix=args.data_path,
        data_impl=args.data_impl,
        splits_string=args.split,
        train_valid_test_num_samples=sizes,
        seq_length=args.seq_length,
        seed=args.seed,
        skip_warmup=(not args.mmap_warmup),
    )


def add_arguments(parser):
    parser.add_argument("--other", action="store_true")
    return parser


if __name__ == "__main__":
    import sys

    assert tensor_parallel.broadcast_data is mpu.broadcast_data
    print_rank_0("megatron-deepspeed")
    defaults = {"extra_args_provider": add_arguments, "args_defaults": {"tokenizer_type": "GPT2BPETokenizer"}}
    if "--other" in sys.argv:
        kind = ModelType.encoder_or_decoder
        defaults["data_post_process"] = lambda data, _: data
        pretrain(datasets_provider, model_provider, kind, forward_step, **defaults)
    else:
        pretrain(datasets_provider, model_provider, forward_step, **defaults)
