"""TRL's trainers with Hexad's DeepSpeed interface on two ranks of a CPU, against one process and DDP.

Needs TRL and datasets, which may be in a directory of their own:

    pip install --target trl --no-deps trl
    python benchmarks/deepspeed_trl.py --trl trl --output benchmarks/results/deepspeed_trl.json

A small model with random weights is trained in float32 on sentences made here, by each of TRL's trainers:
without ``deepspeed`` (one process with all samples, two with DDP), and with ZeRO 0 to 3. DPO, GRPO and RLOO
have a reference model. GRPO and RLOO generate in every step, so that only runs with as many processes draw
the same tokens. Other settings are TRL's defaults, gradient checkpointing among them. ``--peer`` adds the
``deepspeed`` package.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from facts import facts

TRAINERS = ("sft", "dpo", "reward", "grpo", "rloo")
GENERATING = ("grpo", "rloo")
MODES = {"one process": 1, "ddp": 2, **{f"hexad, zero {stage}": 2 for stage in range(4)}}
PEERS = {f"deepspeed, zero {stage}": 2 for stage in range(4)}
STEPS, BATCH = 4, 8
WORDS = "the a red blue small large cat dog bird house tree sees likes finds under over near".split()


def make_model(folder: Path) -> None:
    """A tokenizer of whole words, and two models with random weights."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    tokenizer = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(names),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=64,
        **sizes,
    )
    torch.manual_seed(0)
    for name, kind in (("lm", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / name)
        config.num_labels = 1
        kind(config).save_pretrained(folder / name)


def rows(trainer: str) -> list[dict[str, str]]:
    """Sentences, in the form of a trainer's data."""
    import random

    draw = random.Random(5)

    def sentence(shortest: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(shortest, shortest + 4)))

    texts = [(sentence(3), sentence(4), sentence(4)) for _ in range(STEPS * BATCH)]
    if trainer == "sft":
        return [{"text": f"{prompt} {answer}"} for prompt, answer, _ in texts]
    if trainer in GENERATING:
        return [{"prompt": prompt} for prompt, _, _ in texts]
    return [
        {"prompt": prompt, "chosen": f" {answer}", "rejected": f" {other}"} for prompt, answer, other in texts
    ]


def reward_of(completions: Sequence[str], **_: Any) -> list[float]:
    """A number for each completion, different for different texts."""
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


def trained(trainer: str, stage: int | None, work: Path, accumulation: int) -> list[dict[str, float]]:
    """The log of a training run in this rank."""
    from datasets import Dataset

    trl = import_module("trl")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    common: dict[str, Any] = {
        "output_dir": str(work / "out"),
        "per_device_train_batch_size": BATCH // world // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    if world > 1 and stage is None:
        common |= {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
    if stage is not None:
        common["deepspeed"] = {
            "zero_optimization": {"stage": stage},
            "gradient_clipping": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True,
        }
    name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}[trainer]
    kind, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    model: Any = str(work / ("reward" if trainer == "reward" else "lm"))
    more: dict[str, Any] = {}
    if trainer in GENERATING:
        common |= {"num_generations": 4, "max_completion_length": 8, "beta": 0.1}
        more["reward_funcs"] = reward_of
    data = Dataset.from_list(rows(trainer))
    made = kind(model=model, args=config(**common), train_dataset=data, **more)
    assert made.is_deepspeed_enabled == (stage is not None)
    made.train()
    kept = ("loss", "grad_norm", "reward", "kl", "rewards/margins")
    logs = [line for line in made.state.log_history if "loss" in line]
    return [{name: float(line[name]) for name in kept if name in line} for line in logs]


def worker(mode: str, trainer: str, work: Path, accumulation: int) -> None:
    """Train in this rank and write the log."""
    package, _, stage = mode.partition(", zero ")
    if package == "hexad":
        from hexad.compat import deepspeed

        deepspeed.install()
    log = trained(trainer, int(stage) if stage else None, work, accumulation)
    if os.environ.get("RANK", "0") == "0":
        (work / "log.json").write_text(json.dumps(log))


def run(
    mode: str, trainer: str, trl: Path | None, ranks: int, accumulation: int
) -> list[dict[str, float]] | str:
    """The first rank's log, or the last line of an error."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make_model(work)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = command if ranks > 1 else [sys.executable]
        command += [str(Path(__file__).resolve()), "--worker", mode, "--only", trainer, "--work", directory]
        command += ["--accumulation", str(accumulation)]
        path = os.pathsep.join([*map(str, filter(None, (trl,))), os.environ.get("PYTHONPATH", "")])
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
        settings |= {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, cwd=work)
        if not (work / "log.json").exists():
            lines = [line.strip() for line in done.stderr.splitlines() if "Error" in line]
            return lines[0] if lines else f"exit status {done.returncode}"
        return list(json.loads((work / "log.json").read_text()))


def difference(log: list[dict[str, float]], other: list[dict[str, float]], name: str) -> float:
    """The largest difference of a logged number, relative to the largest value; RLOO's losses are 0 but for
    rounding."""
    pairs = [(line[name], reference[name]) for line, reference in zip(log, other, strict=True)]
    largest = max(0.1, *(abs(reference) for _, reference in pairs))
    return max(abs(a - b) for a, b in pairs) / largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", type=Path, help="directory with TRL, unless it is installed")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--only", help="one of the trainers")
    parser.add_argument("--mode", help="one of the modes, beside those that it is compared with")
    parser.add_argument("--accumulation", type=int, default=1, help="backward passes of a step")
    parser.add_argument("--peer", action="store_true", help="with the deepspeed package too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.only, options.work, options.accumulation)
        return
    results = []
    trl = options.trl.resolve() if options.trl else None
    sys.path[:0] = [str(trl)] if trl else []  # where its version is read
    for trainer in TRAINERS if options.only is None else (options.only,):
        logs: dict[str, Any] = {}
        for mode, ranks in (MODES | (PEERS if options.peer else {})).items():
            if options.mode and mode not in (options.mode, "ddp", "one process"):
                continue
            logs[mode] = run(mode, trainer, trl, ranks, options.accumulation)
            row: dict[str, Any] = {"trainer": trainer, "mode": mode}
            if isinstance(logs[mode], str):
                row["error"] = logs[mode]
            else:
                row["losses"] = [line["loss"] for line in logs[mode]]
                row["gradient norms"] = [line.get("grad_norm") for line in logs[mode]]
                for reference in ("one process", "ddp"):
                    if mode != reference and isinstance(logs.get(reference), list):
                        names = ("loss", "grad_norm")
                        row[f"against {reference}"] = {
                            name: difference(logs[mode], logs[reference], name)
                            for name in names
                            if name in logs[mode][0]  # the package has no norm at stage 0
                        }
            results.append(row)
            print(row, flush=True)
    if options.output:
        options.output.write_text(json.dumps({**facts("trl"), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
