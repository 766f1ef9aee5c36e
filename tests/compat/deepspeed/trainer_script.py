"""A script of transformers' Trainer with a DeepSpeed configuration: ``package|compat CONFIG OUTPUT``."""

import json
import os
import sys


def main() -> None:
    which, config, output = sys.argv[1:]
    if which == "compat":
        from hexad.compat import deepspeed

        deepspeed.install()
    import torch
    from transformers import Trainer, TrainingArguments

    from .program import gpt2

    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(61, (64,), generator=generator).tolist()
    samples = [(torch.arange(16) + start) % 61 for start in starts]
    data = [{"input_ids": sample, "labels": sample} for sample in samples]

    def trained(steps: int, resume: bool) -> list[dict[str, float]]:
        arguments = TrainingArguments(
            output_dir=output,
            deepspeed=config,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=steps,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            learning_rate=1e-2,
            max_grad_norm=0.5,
            warmup_steps=2,
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        )
        torch.manual_seed(0)
        model = gpt2(
            vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume or None)
        trainer.save_model(f"{output}/final")
        names = ("loss", "grad_norm", "learning_rate")
        return [{name: line[name] for name in names} for line in trainer.state.log_history if "loss" in line]

    logs = [trained(4, False)]
    if which == "compat":
        logs.append(trained(6, True))
    if os.environ["RANK"] == "0":
        with open(f"{output}/log.json", "w") as file:
            json.dump(logs, file)


if __name__ == "__main__":
    main()
