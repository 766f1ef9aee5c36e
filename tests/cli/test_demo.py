"""The demo's own part: its run file, its errors and its exit status; nothing is trained here."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hexad.cli import demo as module
from hexad.cli.main import run
from hexad.dataset.build.corpus import DemoData
from hexad.model.configuration import load_config
from hexad.optim.schedule import learning_rate


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Data are made up and ranks not started; what they would have been started with."""
    arguments: list[list[str]] = []

    def data(directory: Path) -> DemoData:
        directory.mkdir(parents=True)
        train, validation, tokenizer = (
            str(directory / name) for name in ("train", "validation", "tokenizer")
        )
        return DemoData(train, validation, tokenizer, 4096, 1000, 7.0)

    def start(command: str, request: dict[str, Any], ranks: int, run_dir: str) -> int:
        assert request["path"].startswith(run_dir)
        arguments.append([request["path"], *request["overrides"]])
        return 0

    monkeypatch.setattr("hexad.dataset.build.corpus.build_demo_data", data)
    monkeypatch.setattr(module, "start_local", start)
    monkeypatch.setattr(module, "_report", lambda where, data: 0)
    return arguments


def test_the_run_file_holds_any_path_and_the_overrides(tmp_path: Path, started: list[list[str]]) -> None:
    where = tmp_path / "a, b: {c} #d"
    assert run(["demo", "--dir", str(where), "optimizer.lr=0.1", "log.every=5"]) == 0
    [[path, *overrides]] = started
    config = load_config(path, overrides)
    assert config.run.dir == str(where) and config.data.train == str(where / "data" / "train")
    assert config.optimizer.lr == 0.1 and config.log.every == 5
    assert (config.parallel.data, config.parallel.tensor, config.parallel.pipeline) == (2, 2, 2)


@pytest.mark.parametrize("steps", [200, 60, 10])
def test_training_on_as_the_run_file_says_goes_on_smoothly(
    tmp_path: Path, started: list[list[str]], steps: int
) -> None:
    assert run(["demo", "--dir", str(tmp_path / "a b"), f"run.steps={steps}"]) == 0
    [[path, *_]] = started
    lines = [line for line in Path(path).read_text().splitlines() if line.startswith("#")]
    hexad, train, *arguments = shlex.split(lines[-1].removeprefix("#"))
    assert (hexad, train, arguments[0]) == ("hexad", "train", path)
    before, after = load_config(path), load_config(path, arguments[1:])
    assert after.run.steps > before.run.steps == steps
    last, following = (
        learning_rate(config.lr_schedule, config.optimizer.lr, config.run.steps, step)
        for config, step in ((before, steps), (after, steps + 1))
    )
    assert abs(following - last) <= before.optimizer.lr / before.lr_schedule.warmup + 1e-12


def test_wrong_settings_are_refused_before_the_work(tmp_path: Path, started: list[list[str]]) -> None:
    assert run(["demo", "--dir", str(tmp_path / "d"), "model.layer=2"]) == 2
    assert not (tmp_path / "d").exists() and not started


def test_a_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["demo", "--dir", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"hexad: error: {tmp_path}/file/data/tokenizer: cannot be written: Not a directory"


def test_a_run_file_that_cannot_be_written(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d" / "run.yaml").mkdir(parents=True)
    assert run(["demo", "--dir", str(tmp_path / "d")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"hexad: error: {tmp_path}/d/run.yaml: cannot be written: Is a directory"


def test_the_samples_exit_status_is_the_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"step": 1, "loss": 5.0, "comm_bytes": {"tensor": 8}}'
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    data = DemoData("train", "validation", "byte", 4096, 1000, 7.0)
    for status in (1, 0):
        monkeypatch.setattr("hexad.cli.generate.generate.main", lambda *_, status=status, **__: status)
        assert module._report(tmp_path, data) == status


def test_the_template_is_accepted(tmp_path: Path) -> None:
    data = DemoData("train", "validation", "byte", 4096, 1000, 7.0)
    path = module._write_run(tmp_path, data, ())
    assert yaml.safe_load(path.read_text())["run"]["steps"] == 150
    assert run(["config", "check", str(path), "--world", "8", "--elsewhere"]) == 0
