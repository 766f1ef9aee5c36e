"""A script with Megatron-LM's groups and model and DeepSpeed's engine, which runs on Hexad by other imports.

    torchrun --nproc-per-node 8 examples/hybrid_megatron_deepspeed.py \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \\
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
        --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 \\
        --vocab-size 511 --tokenizer-type NullTokenizer --data-path data/train --split 100,0,0
"""

from typing import Any

import torch

# In place of:
# from megatron.initialize import initialize_megatron
# from megatron import get_args, mpu
# from megatron.model import GPTModel
# import deepspeed
from hexad.compat import deepspeed
from hexad.compat.megatron import GPTModel, get_args, get_config, get_num_microbatches, initialize_megatron
from hexad.compat.megatron import parallel_state as mpu
from hexad.dataset.load.loader import loader_from_config
from hexad.dataset.text.tokenizer import load_tokenizer


def main() -> None:
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    initialize_megatron()
    args = get_args()
    model = GPTModel(
        num_tokentypes=0,
        parallel_output=True,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
    )
    engine, *_ = deepspeed.initialize(
        model=model, mpu=mpu, config_params=args.deepspeed_config or config_of(args)
    )
    data_rank, data_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    config = get_config()
    tokenizer = load_tokenizer(config.data.tokenizer)
    with loader_from_config(config, data_rank, data_size, tokenizer) as loader:
        for step in range(args.train_iters):
            total = torch.zeros((), device=engine.device)
            for batch in loader.step(step * args.global_batch_size):
                batch = batch.to(engine.device)
                losses = engine(batch.tokens, None, None, labels=batch.labels)
                loss = losses.mean()
                engine.backward(loss)
                engine.step()
                total += loss.detach().float() / get_num_microbatches()
            torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
            if torch.distributed.get_rank() == 0:
                print(f"step {step + 1} loss {float(total) / data_size:.7f}", flush=True)
    torch.distributed.destroy_process_group()


def config_of(args: Any) -> dict[str, Any]:
    """DeepSpeed's configuration, where no file is named."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "train_batch_size": args.global_batch_size,
        "gradient_clipping": args.clip_grad,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": args.lr, "weight_decay": args.weight_decay}},
    }


if __name__ == "__main__":
    main()
