"""``examples/hybrid_megatron_deepspeed.py``: its losses are those of ``hexad train``, in every layout."""

import json
import re
import sys
from pathlib import Path

import pytest

from .. import forks
from ..training.command import call

ROOT = Path(__file__).parents[2]
TEXT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-decay-style constant "
    "--weight-decay 0 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.05 --split 100,0,0 "
    "--vocab-size 511 --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights "
    "--distributed-backend gloo --clip-grad 0.8 --log-interval 1"
)
FLAGS = TEXT.split(" ")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    (directory / "corpus.txt").write_text("\n".join(f"line {n}: {n * n}" for n in range(500)))
    files = ("--input", str(directory / "corpus.txt"), "--output", str(directory / "data"))
    assert call("data", "build", *files, "--tokenizer", "byte", "--workers", "1").status == 0
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[float]:
    """The losses of ``hexad train`` with the settings of the flags, on one rank."""
    run = str(directory / "run")
    line = [*FLAGS, "--data-path", str(directory / "data"), "--save", run]
    result = forks.run(
        [sys.executable, "-m", "hexad.cli.main", "megatron", "--", *line], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(row)["loss"] for row in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def sketched(directory: Path, ranks: int, layout: str) -> list[float]:
    """The losses of the sketch, unchanged."""
    keys = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8, "gradient_clipping": 0.8}
    adam = {"type": "Adam", "params": {"lr": 1e-2}}
    file = directory / "ds_config.json"
    file.write_text(json.dumps({**keys, "optimizer": adam, "zero_optimization": {"stage": 1}}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = ["-m", "hexad.compat.megatron", str(Path(__file__).parent / "sketch_script.py")]
    flags = [*layout.split(), *FLAGS, "--deepspeed", "--deepspeed_config", str(file)]
    done = forks.run([*command, *script, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", done.stdout)]


def test_the_sketch_of_textbooks_runs_unchanged(tmp_path: Path) -> None:
    alone = sketched(tmp_path, 1, "")
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    assert sketched(tmp_path, 4, layout) == pytest.approx(alone, rel=2e-6)
    assert len(alone) == 4 and alone[-1] < alone[0] - 0.5


@pytest.mark.slow  # the textbooks' sketch, below, is in the default tests
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--pipeline-model-parallel-size 2"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
        (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    ],
)
def test_losses_are_those_of_a_run(directory: Path, expected: list[float], ranks: int, layout: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(ROOT / "examples" / "hybrid_megatron_deepspeed.py"), *layout.split(), *FLAGS]
    result = forks.run(
        [*command, *script, "--data-path", str(directory / "data")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", result.stdout)]
    assert losses == pytest.approx(expected, rel=2e-6)
    assert losses[-1] < losses[0] - 0.5
