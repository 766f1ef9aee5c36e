"""A hybrid of Megatron-LM's model and DeepSpeed's engine, as textbooks sketch it: imports unchanged."""

import deepspeed
import torch
from megatron.initialize import initialize_megatron
from megatron.model import GPTModel
from megatron.training import get_args


def main() -> None:
    torch.distributed.init_process_group(backend="gloo")
    initialize_megatron()
    args = get_args()
    model = GPTModel(num_tokentypes=0, parallel_output=True)
    model_engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        config_params=args.deepspeed_config,
    )
    passes = model_engine.gradient_accumulation_steps()
    generator = torch.Generator().manual_seed(5)
    for step in range(args.train_iters):
        total = 0.0
        for _ in range(passes):
            shape = args.micro_batch_size, args.seq_length + 1
            tokens = torch.randint(40, shape, generator=generator) ** 2 % 61  # learnable: not all ids occur
            losses = model_engine(tokens[:, :-1], None, None, labels=tokens[:, 1:])
            loss = losses.mean()
            model_engine.backward(loss)
            model_engine.step()
            total += float(loss.detach()) / passes
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1} loss {total:.7f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
