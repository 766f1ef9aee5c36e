"""Published launch lines at a small size: ``hexad megatron`` runs them."""

import json
import math
from pathlib import Path

import pytest
import yaml

from ...training.command import Process, call
from . import lines
from .test_translate import SMALL, without

SIZES = lines.words("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --kv-channels 8
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4
    --log-interval 1 --eval-interval 2 --eval-iters 1 --save-interval 2 --distributed-backend gloo
""")
DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--mock-data")
TOKENIZER = ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size")
STEPS = {
    "iterations": ["--train-iters", "2", "--lr-decay-iters", "8"],
    "samples": ["--train-samples", "8", "--lr-decay-samples", "32", "--lr-warmup-samples", "4"],
}
# Line -> (flags that are refused or need a package, further flags).
RUNS = {
    "GPT3_175B": (
        ("--rampup-batch-size", "--tensorboard-dir"),
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
    "GPT2_345M": ((), ""),
    "GPT3_345M": ((), "--num-layers-per-virtual-pipeline-stage 1 --tensor-model-parallel-size 1"),
    "LLAMA2_7B": (("--wandb-project",), "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"),
    "LLAMA3_8B": (
        ("--tensorboard-dir", "--profile"),
        "--num-query-groups 2",
    ),
    "LLAMA3_70B": (
        ("--recompute-num-layers", "--recompute-method"),
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --num-query-groups 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --recompute-method uniform",
    ),
    "BLOOM_176B": (
        (
            "--embed-layernorm",
            "--position-embedding-type",
            "--train-weighted-split-paths-path",
            "--valid-weighted-split-paths-path",
            "--tensorboard-dir",
            "--tokenizer-name-or-path",
        ),
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2",
    ),
    "LLAMA3_LONG": (
        ("--pretrained-checkpoint", "--hierarchical-context-parallel-sizes"),
        "--tensor-model-parallel-size 1 --context-parallel-size 2 --cp-comm-type p2p --num-query-groups 2",
    ),
}
QUICK = ("GPT2_345M", "LLAMA3_LONG")
"""The others start processes for as long, and are in the slow sweep."""


def line_of(name: str, save: Path) -> list[str]:
    """A published line with small sizes and mock data."""
    gone, more = RUNS[name]
    line = without(getattr(lines, name), *gone, *DATA, *TOKENIZER)
    kind = "samples" if "--train-samples" in line else "iterations"
    where = ["--save", str(save), "--load", str(save)]
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "300"]
    warmup = ["--lr-warmup-iters", "1"] if "--lr-warmup-iters" in line else []
    ramp = lines.words("--rampup-batch-size 2 2 2 --train-samples 6") if "--rampup-batch-size" in line else []
    return [*line, *SIZES, *STEPS[kind], *warmup, *ramp, *where, *data, *more.split()]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_published_line_runs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "BLOOM_176B":
        keys = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 0}, "steps_per_print": 2000}
        (tmp_path / "ds_config.json").write_text(json.dumps(keys))
    save = tmp_path / "run"
    result = Process.hexad(["megatron", "--", *line_of(name, save)], tmp_path).wait()
    assert result.status == 0, result.err
    metrics = [json.loads(record) for record in (save / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [1, 2]
    assert all(math.isfinite(record["loss"]) and 4 < record["loss"] < 8 for record in metrics)
    assert (save / "checkpoints" / "latest").read_text().strip() == "step-00000002"


def test_gpt2_tokenizer_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: the line is printed as the file that runs, and a second call resumes."""
    from tokenizers import ByteLevelBPETokenizer

    monkeypatch.chdir(tmp_path)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["a line of text"] * 8, vocab_size=300, special_tokens=["<|endoftext|>"])
    trained.save_model(".")
    flags = [*without(SMALL, "--tokenizer-type", "--vocab-size"), "--train-iters", "2", "--save", "run"]
    flags += ["--vocab-file", "vocab.json", "--merge-file", "merges.txt", "--log-interval", "1"]
    printed = call("megatron", "--print-config", "--", *flags)
    assert printed.status == 0 and not Path("run").exists()
    assert call("megatron", "--", *flags).status == 0
    assert "add --save run --load run to resume" in call("megatron", "--", *flags).error
    assert Path("run/megatron.yaml").read_text() == printed.out
    tree = yaml.safe_load(Path("run/config.yaml").read_text())
    assert tree["model"]["vocab"] == trained.get_vocab_size()
    again = call("megatron", "--json", "--", *flags, "--load", "run", "--train-iters", "3")
    assert again.status == 0 and json.loads(again.out)["step"] == 3, again.err
    missing = call("megatron", "--", *flags, "--vocab-file", "none.json", "--save", "other")
    assert missing.status == 2 and "--vocab-file: none.json: no such file" in missing.error


def test_command_line(tmp_path: Path) -> None:
    document = json.loads(call("megatron", "--print-config", "--json", "--nproc", "4", "--", *SMALL).out)
    assert document["config"]["batch"] == {"micro": 1, "global": 8} and document["notes"]
    assert call("megatron", "--", *SMALL, "--num-expert", "8").error.startswith("--num-expert: not a flag")
    ignored = call("megatron", "--print-config", "--ignore", "--spam,--num-experts", "--ignore", "eggs", "--",
                   *SMALL, "--spam", "1", "--num-experts", "8", "--eggs")  # fmt: skip
    assert ignored.status == 0 and "# --spam 1, --num-experts 8, --eggs: ignored" in ignored.out
    assert "give it" in call("megatron", "--").error
    wrong = call(
        "megatron", "--", *SMALL, "--tensor-model-parallel-size", "3", "--save", str(tmp_path / "new")
    )
    assert (
        wrong.error.startswith("parallel.tensor: found 3") and "(--tensor-model-parallel-size)" in wrong.error
    )
    wrong = call("megatron", "--", *SMALL, "--lr", "-1", "--save", str(tmp_path / "new"))
    assert wrong.error.startswith("optimizer.lr: found -1.0") and wrong.error.endswith("(--lr)")
    assert not (tmp_path / "new").exists()
    assert call("megatron", "--help").status == 0
