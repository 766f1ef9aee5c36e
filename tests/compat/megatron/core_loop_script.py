"""A training loop as users of Megatron-Core write it: without flags, with a model of a ``TransformerConfig``,
mock data, an optimizer of torch, and a checkpoint in the working directory."""

import os
import sys

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.data import DataLoader

LENGTH = 32


def forward_step(batches, model):
    batch = {name: tensor.to("cuda") for name, tensor in next(batches).items()}
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])

    def loss_of(losses):
        loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        return loss, {"loss": loss}

    return losses, loss_of


def main(tensor: int, pipeline: int, steps: int) -> None:
    parallel_state.destroy_model_parallel()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=torch.cuda.device_count())
    parallel_state.initialize_model_parallel(tensor, pipeline)
    model_parallel_cuda_manual_seed(5)
    config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=4, use_cpu_initialization=True
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=100,
        max_sequence_length=LENGTH,
    )
    model.to(torch.device("cuda"))
    model = DistributedDataParallel(
        config=model.config, ddp_config=DistributedDataParallelConfig(), module=model
    )
    optimizer = torch.optim.Adam(model.parameters())
    compile_helpers()
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=LENGTH)
    settings = GPTDatasetConfig(
        random_seed=0,
        sequence_length=LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=tokenizer,
    )
    data = BlendedMegatronDatasetBuilder(MockGPTDataset, [64, None, None], lambda: True, settings).build()[0]
    batches = iter(DataLoader(data, batch_size=4, shuffle=True))
    forward_backward = get_forward_backward_func()
    for _ in range(steps):
        optimizer.zero_grad()
        reported = forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=4,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        finalize_model_grads([model])
        optimizer.step()
        if reported and (rank == 0 or pipeline > 1):
            print("loss", sum(float(row["loss"]) for row in reported) / len(reported), flush=True)
    state = model.module.sharded_state_dict(prefix="")
    dist_checkpointing.save(sharded_state_dict=state, checkpoint_dir=f"{os.getcwd()}/saved")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    loaded = dist_checkpointing.load(sharded_state_dict=state, checkpoint_dir=f"{os.getcwd()}/saved")
    model.module.load_state_dict(loaded)
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
