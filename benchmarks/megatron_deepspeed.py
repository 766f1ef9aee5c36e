"""``pretrain_gpt.py`` of a Megatron-DeepSpeed checkout, unchanged, on Hexad's interfaces: losses of one rank
and of eight, tensor 2 x pipeline 2 x data 2 with ZeRO 1.

    git clone https://github.com/deepspeedai/Megatron-DeepSpeed
    python benchmarks/megatron_deepspeed.py Megatron-DeepSpeed --output megatron_deepspeed.json

The model is small, and the data are synthetic. ``--script`` names another script of the checkout, and further
flags of it follow ``--``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from facts import facts

from hexad.dataset.indexed import IndexedWriter, dtype_for

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 255 "
    "--split 90,10,0 --eval-interval 1000 --eval-iters 1 --log-interval 1 --distributed-backend gloo"
).split()
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
ZERO = 1
SIZES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}


def write_data(prefix: Path) -> None:
    """Write documents of numbers, each the one before plus a step of its document."""
    draw = np.random.default_rng(1)
    with IndexedWriter(str(prefix), dtype_for(256)) as writer:
        for _ in range(200):
            length, first, step = draw.integers((20, 0, 1), (200, 254, 9))
            numbers = (first + step * np.arange(length)) % 254
            writer.add_document(np.append(numbers, 255))  # the end of a document


def losses(checkout: Path, folder: Path, ranks: int, flags: list[str]) -> list[float]:
    """The losses of a run of the script on so many ranks.

    Raises:
        SystemExit: it fails.
    """
    config, run = folder / f"ds-{ranks}.json", folder / f"run-{ranks}"
    config.write_text(json.dumps({**SIZES, "zero_optimization": {"stage": ZERO}, "gradient_clipping": 1.0}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "hexad.compat.megatron", *flags, "--deepspeed", "--deepspeed_config", str(config)]
    command += ["--zero-stage", str(ZERO), "--save", str(run), "--data-path", str(folder / "data")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-6000:])
    rows = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--script", default="pretrain_gpt.py")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("flags", nargs="*", help="further flags of the script")
    options = parser.parse_args()
    flags = [options.script, *FLAGS, "--train-iters", str(options.steps), *options.flags]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_data(folder / "data")
        one = losses(options.checkout, folder, 1, flags)
        eight = losses(options.checkout, folder, 8, [*flags, *LAYOUT])
    for step, pair in enumerate(zip(one, eight, strict=True), 1):
        print(f"step {step}: {pair[0]:.6f} on one rank, {pair[1]:.6f} on eight")
    worst = max(abs(a - b) / abs(a) for a, b in zip(one, eight, strict=True))
    print(f"largest relative difference: {worst:.1e}")
    if options.output:
        result = {**facts(), "script": options.script, "one": one, "eight": eight, "difference": worst}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
