"""Scripts in the style of ``pretrain_gpt.py``, unchanged after ``install()``."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hexad.compat import megatron
from hexad.compat.megatron import datasets, tensor_parallel, training, transformer
from hexad.compat.megatron.training import Timers
from hexad.config import HexadError

from ... import forks
from ...pool import Pool
from ...training.command import call

SCRIPT = Path(__file__).parent / "pretrain_script.py"
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-decay-style cosine "
    "--tokenizer-type NullTokenizer --vocab-size 255 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-interval 2 --eval-iters 2 --save-interval 2 --log-interval 1 --distributed-backend gloo"
).split()
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel".split()


def metrics(run: Path) -> list[float]:
    """Loss, norm, rate and validation loss of every step, one after the other."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "lr", "validation_loss")
    assert [row["step"] for row in rows if "validation_loss" in row] == [2, 4]
    return [row.get(name, 0.0) for row in rows for name in names]


def pretrained(
    ranks: int, *flags: str, first: list[str] = FLAGS, script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [
        "-m",
        "hexad.compat.megatron",
        "--ignore",
        "--spam,--num-experts",
        str(script),
        *first,
        *flags,
    ]
    return forks.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def run_metrics(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The metrics of a run with the flags, which all scripts reproduce."""
    run = tmp_path_factory.mktemp("run")
    assert call("megatron", "--", *FLAGS, "--mock-data", "--save", str(run / "run")).status == 0
    return metrics(run / "run")


def test_a_script_trains_as_a_run_does(run_metrics: list[float], tmp_path: Path) -> None:
    script = tmp_path / "script"
    done = pretrained(4, *LAYOUT, "--mock-data", "--spam", "1", "--num-experts", "2", "--save", str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("hexad: --spam 1, --num-experts 2: ignored") == 1
    assert done.stdout.count("building GPT model") == 1
    assert metrics(script) == pytest.approx(run_metrics, rel=3e-5)
    assert run_metrics[-4] < run_metrics[0]


ZERO = ["--deepspeed", "--zero-stage", "1"]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("newest_script", ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        ("megatron_deepspeed_script", ["--pipeline-model-parallel-size", "2", *ZERO]),
        pytest.param("megatron_deepspeed_script", ["--other", *ZERO], marks=pytest.mark.slow),
    ],
)
def test_scripts_of_other_releases_train_as_a_run_does(
    name: str, flags: list[str], run_metrics: list[float], tmp_path: Path
) -> None:
    if "--deepspeed" in flags:
        config = tmp_path / "ds.json"
        config.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')
        flags = [*flags, "--deepspeed_config", str(config)]
    script = SCRIPT.with_name(f"{name}.py")
    done = pretrained(2, *flags, "--mock-data", "--save", str(tmp_path / "script"), script=script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert metrics(tmp_path / "script") == pytest.approx(run_metrics, rel=3e-5)


RAMP = "--train-samples 24 --rampup-batch-size 4 4 8"
"""In place of four iterations as many, of 4, 4, 8 and 8 samples."""


@pytest.mark.slow
@pytest.mark.parametrize("ramp", ["", RAMP], ids=["constant", "ramp"])
def test_own_data_in_any_layout_and_resumed(ramp: str, tmp_path: Path) -> None:
    one, four = tmp_path / "one", tmp_path / "four"
    first = " ".join(FLAGS).replace("--train-iters 4", ramp or "--train-iters 4").split()
    done = pretrained(1, "--own-data", "--save", str(one), first=first)
    assert done.returncode == 0, done.stderr[-3000:]
    pipeline = ["--pipeline-model-parallel-size", "2", "--own-data", "--save", str(four)]
    half = pretrained(2, *pipeline, "--exit-interval", "2", first=first)
    assert half.returncode == 0, half.stderr[-3000:]
    done = pretrained(4, *LAYOUT, "--own-data", "--save", str(four), "--load", str(four), first=first)
    assert done.returncode == 0 and "resuming from" in done.stderr, done.stderr[-3000:]
    assert metrics(four) == pytest.approx(metrics(one), rel=1e-4)
    lines = [json.loads(line) for line in (four / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines] == ([4, 8, 16, 24] if ramp else [8, 16, 24, 32])


def mistakes(kind: str) -> None:
    sys.argv = ["script", *FLAGS, "--mock-data"]
    megatron.initialize_megatron()
    args = megatron.get_args()
    if kind == "size":
        config: Any = megatron.TransformerConfig(**{**vars(args), "hidden_size": 128})
        megatron.GPTModel(config=config)
    if kind == "vocab":
        megatron.GPTModel(vocab_size=300)
    if kind == "spec":
        megatron.GPTModel(transformer_layer_spec=transformer.ModuleSpec(torch.nn.Linear))
    if kind == "data":
        datasets.BlendedMegatronDatasetBuilder(datasets.GPTDataset, (1, 1, 1), lambda: True, None)
    if kind == "length":
        config = datasets.GPTDatasetConfig(sequence_length=33)
        datasets.BlendedMegatronDatasetBuilder(datasets.MockGPTDataset, (1, 1, 1), lambda: True, config)
    if kind == "type":
        megatron.pretrain(lambda _: (None,) * 3, lambda **_: None, "bert", lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("size", "config: found hidden_size 128, but the flags say 64"),
        ("vocab", "GPTModel: found vocab_size 300, but the flags say 256"),
        ("spec", "transformer_layer_spec: found a ModuleSpec of other modules"),
        ("data", "found 'GPTDataset'; with these flags pass MockGPTDataset"),
        ("length", "GPTDatasetConfig: found sequence_length 33, but the flags say 32"),
        ("type", "pretrain: found model type bert; use ModelType.encoder_or_decoder"),
    ],
)
def test_what_does_not_agree_with_the_flags_is_refused(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    try:
        with pytest.raises(HexadError, match=message):
            mistakes(kind)
    finally:
        megatron.destroy_megatron()


def test_masks_and_positions() -> None:
    """Documents end with 9."""
    data = torch.tensor([[1, 9, 2, 3, 9, 4]])
    mask, losses, places = datasets.get_ltor_masks_and_position_ids(data, 9, True, True, True)
    assert places.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert losses.tolist() == [[1, 0, 1, 1, 0, 1]]
    documents = [0, 0, 1, 1, 1, 2]
    for query in range(6):
        for key in range(6):
            allowed = key <= query and documents[key] == documents[query]
            assert bool(mask[0, 0, query, key]) != allowed
    mask, losses, places = datasets.get_ltor_masks_and_position_ids(data, 9, False, False, False)
    assert places.tolist() == [list(range(6))] and losses.sum() == 6 and mask.shape == (1, 1, 6, 6)
    assert datasets.get_blend_from_list(["0.3", "a", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    assert datasets.get_blend_from_list(["a", "b"]) == (["a", "b"], None)


def of_tensor_ranks() -> tuple[list[float], list[float], bool, bool]:
    sys.argv = ["script", *FLAGS, "--tensor-model-parallel-size", "2", "--mock-data"]
    megatron.initialize_megatron()
    rank = megatron.parallel_state.get_tensor_model_parallel_rank()
    given = {"text": torch.arange(4) + 1, "more": torch.ones(2, 2, dtype=torch.int64)} if rank == 0 else None
    sent = tensor_parallel.broadcast_data(["text", "more"], given, torch.int64)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork():
        apart = torch.rand(2).tolist()
    with tracker.fork():
        assert torch.rand(2).tolist() != apart
    common = torch.rand(2).tolist()
    x = torch.ones(64, requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return torch.nn.functional.dropout(x, 0.5)

    out = tensor_parallel.checkpoint(dropped, False, x)
    out.sum().backward()
    for keys, found in ((["text"], "text in torch.int64"), (["none"], "none in None")):
        with pytest.raises(HexadError, match=f"broadcast_data: found {found}, expected torch.int32"):
            tensor_parallel.broadcast_data(keys, given, torch.int32)  # on all ranks: none waits
    megatron.destroy_megatron()
    return apart, common, torch.equal(x.grad, out.detach()), sent["text"].tolist() == [1, 2, 3, 4]


def test_the_tracker_is_of_the_device_that_ranks_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on CPUs, with gloo, of a machine that has GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tensor_parallel.parallel_state, "is_initialized", lambda: True)
    mesh = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(tensor_parallel.parallel_state, "get_mesh", lambda: mesh)
    tracker, before = tensor_parallel.RngTracker(), torch.get_rng_state()
    tracker.add("own", 3)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("own"):
        first = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), first)


def test_timers(capsys: pytest.CaptureFixture[str]) -> None:
    timers = Timers()
    with pytest.raises(HexadError, match="timer: stopped, but not started"):
        timers("a").stop()
    timers("a").start()
    running = timers("a").elapsed(reset=False)
    assert 0 < running < timers("a").elapsed(reset=False)
    timers("a").stop()
    assert timers("a").active_time() == timers("a").elapsed() > timers("a").elapsed() == 0.0
    timers("b")._total = 0.5
    timers.log(["a", "b", "c"], normalizer=10)
    assert capsys.readouterr().out == "a: 0.00 ms, b: 50.00 ms\n"


def test_no_evaluation_without_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script", *FLAGS, "--mock-data", "--eval-interval", "0"])
    megatron.initialize_megatron()
    try:
        assert training._samples() == (32, 0, 16) and megatron.get_config().validate_.every == 0
    finally:
        megatron.destroy_megatron()


def test_random_numbers_and_data_of_tensor_ranks(pool: Pool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (apart, common, same, sent), (other, again, same_too, sent_too) = pool.run(2, of_tensor_ranks)
    assert apart != other and common == again and same and same_too and sent and sent_too
    parts = tensor_parallel.split_tensor_along_last_dim(torch.arange(6).view(1, 6), 3)
    assert [part.tolist() for part in parts] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    with pytest.raises(HexadError, match="found 6, which 4 does not divide"):
        tensor_parallel.split_tensor_along_last_dim(torch.arange(6), 4)
