"""Every mistake a user can make ends in one line that names the setting, before anything has started."""

from pathlib import Path

import numpy as np
import pytest

from ..pool import Pool
from .command import call, write_run
from .conftest import MakeRun

# overrides or options -> how the line begins, and what it must say as well
MISTAKES = [
    (["parallel.tensor=3"], "parallel.tensor: found 3", "use 1, 2 or 4"),
    (
        ["parallel.tensor=4", "model.heads=12", "model.kv_heads=6", "model.head_dim=4"],
        "parallel.tensor: found 4, expected a divisor or a multiple of model.kv_heads 6",
        "use 1 or 2",
    ),
    (["parallel.data=3"], "batch.global: found 4", "nearest are 3 or 6"),
    (["batch.micro=3"], "batch.global: found 4", "nearest are 3 or 6"),
    (["parallel.tensor=2", "data.sequence=15"], "parallel.sequence: ", "15 tokens"),
    (["parallel.tensor=2", "--nproc", "3"], "parallel.tensor: found 2, but world 3", "start 2 or 4 ranks"),
    (["parallel.data=4", "--nproc", "2"], "parallel.data: found 4, but world 2", "start 4 ranks"),
    (["parallel.context=3"], "data.sequence: found 16", "use 15 or 18"),
    (["parallel.pipeline=4"], "parallel.pipeline: found 4 stages", "use at most 3 stages"),
    (["parallel.pipeline=2", "parallel.split=even"], "parallel.pipeline: found 2 stages", "at most 1"),
    (["parallel.pipeline=2", "parallel.split=[1, 1]"], "parallel.split: found [1, 1]", "which is 1"),
    (["parallel.pipeline=2", "parallel.split=[1]"], "parallel.split: found [1]", "each of 2 stages"),
    (["parallel.schedule=zbv"], "parallel.schedule: found 'zbv'", "did you mean 'zb_v'?"),
    (["parallel.schedule=mine.json"], "parallel.schedule: mine.json: cannot be read", "No such file"),
    (["parallel.virtual_stages=2"], "parallel.virtual_stages: 1f1b has one stage per rank", "interleaved"),
    (["parallel.schedule_group=2"], "parallel.schedule_group: found 2", "only interleaved"),
    (["parallel.schedule_memory=2"], "parallel.schedule_memory: found 2", "only auto"),
    (
        ["parallel.pipeline=2", "parallel.schedule=auto", "parallel.schedule_memory=0.1"],
        "parallel.schedule_memory: ",
        "",
    ),
    (["run.compile=true", "parallel.schedule=zb_h1"], "run.compile: found full", "use gpipe, 1f1b or"),
    (["memory.recompute_layers=2"], "memory.recompute_layers: found 2", "set recompute"),
    (
        ["run.compile=true", "memory.recompute=full"],
        "run.compile: found full with memory.recompute full",
        "needs none",
    ),
    (["modle.layers=2"], "modle: unknown key", "did you mean 'model'?"),
    (["model.layer=2"], "model.layer: unknown key", "did you mean 'model.layers'?"),
    (["model.lr=2"], "model.lr: unknown key", "did you mean 'optimizer.lr'?"),
    (["model.layers=two"], "model.layers: found 'two'", "expected an integer"),
    (["precision.dtype=bf61"], "precision.dtype: found 'bf61'", "did you mean 'bf16'?"),
    (["model.preset=llama"], "model.preset: unknown preset 'llama'", "did you mean 'llama3-8b'?"),
    (["layers"], "found 'layers', expected a setting name=value", ""),
    (["data.train=null"], "data.train: found null", "prefix"),
    (["data.train=no/such"], "data.train: no/such.idx: no such file", ""),
    (["validate.every=2"], "data.validation: found no data", "validate.every"),
    (["validate.every=2", "data.validation=no/such"], "data.validation: no/such.idx: no such file", ""),
    (["data.tokenizer=nope"], "data.tokenizer: tokenizer 'nope': no such file", "byte"),
    (["run.device=cuda"], "run.device: found cuda", "use auto or cpu"),
    (["model.vocab=100"], "model.vocab: found 100, less than the tokenizer's 257", "use auto"),
    (["data.sequence=1000000"], "data.train: ", "smaller data.sequence"),
    (["lr_schedule.min_lr=1"], "lr_schedule.min_lr: found 1.0, more than optimizer.lr", ""),
    (["--nproc", "0"], "Invalid value for '--nproc'", "hexad train --help"),
]


@pytest.mark.parametrize(("arguments", "start", "says"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_one_line(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, arguments: list[str], start: str, says: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = make_run()
    result = run.train(*arguments)
    assert result.status == 2
    assert result.error.startswith(start) and says in result.error
    assert not run.metrics


def test_files_that_are_not_there(tmp_path: Path, make_run: MakeRun) -> None:
    missing = tmp_path / "no.yaml"
    assert call("train", str(missing)).error == f"{missing}: no such configuration file"
    assert "Is a directory" in call("train", str(tmp_path)).error
    (tmp_path / "file").write_text("")
    assert make_run().train(f"run.dir={tmp_path / 'file'}").error.startswith("run.dir: cannot write to ")


def test_commands_that_are_not_there() -> None:
    assert call("trian", "run.yaml").error.startswith("no such command 'trian' (did you mean 'train'?)")
    assert call("train").error.startswith("Missing argument 'run.yaml'.")
    assert call("train").status == 2


def test_token_ids_outside_the_vocabulary(tmp_path: Path, data: str, make_run: MakeRun) -> None:
    # A dataset of another tokenizer: raw ids beyond this one's.
    for suffix in (".bin", ".idx", ".hexad.json"):
        (tmp_path / f"other{suffix}").write_bytes(Path(data + suffix).read_bytes())
    raw = np.fromfile(tmp_path / "other.bin", np.uint16)
    raw[:] = 300
    raw.tofile(tmp_path / "other.bin")
    (tmp_path / "other.hexad.json").unlink()
    result = make_run(data={"train": str(tmp_path / "other")}).train()
    assert result.status == 2
    assert "token id 300 is outside the model's vocabulary of 257 (model.vocab); set data.tok" in result.error


def test_a_gradient_that_is_not_finite(make_run: MakeRun) -> None:
    run = make_run()
    result = run.train("optimizer.lr=1e300", "lr_schedule.warmup=0")
    assert result.status == 2 and "step 2: " in result.error and "optimizer.lr" in result.error
    assert not run.checkpoints


def test_ranks_agree_on_a_mistake(make_run: MakeRun, pool: Pool) -> None:
    run = make_run()
    outcomes = run.world(pool, 2, "data.sequence=1000000")
    assert outcomes[0] == outcomes[1] and outcomes[0][0] == 2
    assert outcomes[0][1].startswith("data.train: ")
    # A package missing on the one rank that writes.
    outcomes = run.world(pool, 2, "log.wandb=project")
    assert outcomes[0][0] == outcomes[1][0] == 2
    assert outcomes[0][1] == outcomes[1][1] and outcomes[0][1].startswith("rank 0: log.wandb: needs")
    assert not run.directory.joinpath("config.yaml").exists()  # before the model is built


def test_no_collectives_before_the_configuration_is_checked(make_run: MakeRun, pool: Pool) -> None:
    outcomes = make_run().world(pool, 2, "parallel.tensor=1", "parallel.data=1")
    assert [status for status, _ in outcomes] == [2, 2]
    assert outcomes[0][1] == outcomes[1][1] and "world 2" in outcomes[0][1]


def test_debug_shows_the_traceback(tmp_path: Path, data: str) -> None:
    run = write_run(tmp_path, data)
    result = call("--debug", *run.arguments("model.layer=2"))
    assert result.status == 2 and "Traceback" in result.err and "hexad: error: model.layer" in result.err
