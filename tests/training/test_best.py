"""The best checkpoints by validation loss, and runs that end when it no longer falls."""

import json
import math
from typing import Any

import pytest

import hexad
from hexad.checkpoint.directory import find_checkpoint
from hexad.config import HexadError
from hexad.engine.evaluation import Score, ValidationSets
from hexad.training.saves import Evaluations

from ..pool import Pool
from .command import RunFile, call
from .conftest import MakeRun
from .test_guard import spoilt

LOSSES = [9.0, 4.0, 6.0, 3.0, math.nan, 5.0, 2.0, 3.5, 8.0, 7.0, 1.0, 6.5]
"""After each step."""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(self: Any, engine: Any, batches: Any) -> dict[str, Score]:
        return {"validation": Score(LOSSES[engine.step - 1], 1)}

    monkeypatch.setattr(ValidationSets, "scores", scores)


@pytest.fixture
def run(make_run: MakeRun, data: str, scripted: None) -> RunFile:
    return make_run(
        data={"validation": data},
        run={"steps": 9},
        validate={"every": 1},
        checkpoint={"every": 0, "keep": 1, "keep_best": 2},
    )


def best_of(run: RunFile) -> str:
    return (run.directory / "checkpoints" / "best").read_text()


@pytest.mark.usefixtures("scripted")
def test_the_best_checkpoints_stay(run: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.train("run.steps=3").status == 0
    assert run.checkpoints == [2, 3] and best_of(run) == "step-00000002\n"
    assert run.train("run.steps=6").status == 0  # resumed: earlier losses count
    assert run.checkpoints == [2, 4, 6] and best_of(run) == "step-00000004\n"
    assert run.train().status == 0
    assert run.checkpoints == [4, 7, 9] and best_of(run) == "step-00000007\n"
    best = run.directory / "checkpoints" / "best"
    monkeypatch.undo()  # the script of losses
    monkeypatch.chdir(run.directory)
    assert find_checkpoint(best).name == "step-00000007"
    assert find_checkpoint(best.with_name("latest")).name == "step-00000009"
    result = call("generate", str(best), "--prompt", "line", "--tokens", "2")
    assert result.status == 0, result.err
    for command in (("evaluate", str(best)), ("checkpoint", "export", "--from", str(best), "--to", "out")):
        result = call(*command)
        assert result.status == 0, result.err
    best.write_text("step-00000005\n")
    with pytest.raises(HexadError, match="neither a checkpoint nor a run directory"):
        find_checkpoint(best)


def test_another_runs_losses_do_not_count(run: RunFile, make_run: MakeRun, data: str) -> None:
    assert run.train("run.steps=4").status == 0
    other = make_run(
        data={"validation": data},
        run={"steps": 6},
        validate={"every": 1},
        checkpoint={"load": str(run.directory), "keep": 1, "keep_best": 1, "every": 0},
    )
    assert other.train().status == 0
    assert other.checkpoints == [6] and best_of(other) == "step-00000006\n"


def test_a_run_ends_when_the_loss_no_longer_falls(run: RunFile, capsys: pytest.CaptureFixture[str]) -> None:
    ending = json.loads(call(*run.arguments("validate.patience=2", "--json")).out)
    assert (ending["step"], ending["stopped_by"], ending["finished"]) == (6, "patience", True)
    assert run.checkpoints == [2, 4, 6]
    again = hexad.train(run.path, ["validate.patience=2"])
    assert (again.step, again.stopped_by) == (6, "patience") and len(run.metrics) == 6
    outcome = hexad.train(run.path, ["validate.patience=3"])  # 2.0 after step 7 begins anew
    assert (outcome.step, outcome.stopped_by) == (9, None)


def test_evaluations_that_are_rolled_back_do_not_count(run: RunFile) -> None:
    """Step 6 is rolled back to step 4, so that step 5 is evaluated twice."""
    with spoilt("nan", range(20, 24)):  # the batch of step 6
        result = run.train("checkpoint.every=4", "faults.not_finite=roll_back", "validate.patience=3")
    assert result.status == 0 and "rolled back to step 4" in result.err
    assert [line["step"] for line in run.metrics] == list(range(1, 10))
    assert run.state()["validation"] == {"best": [[2.0, 7], [3.0, 4]], "since": 2}


def test_ranks_end_together(run: RunFile, pool: Pool) -> None:
    """Without a script: the loss of weights that do not change never falls."""
    results = run.world(pool, 2, "optimizer.lr=1e-30", "validate.patience=2")
    assert results == [(0, "")] * 2
    assert len(run.metrics) == 3


def test_evaluations_are_remembered() -> None:
    memory = Evaluations(2)
    kept = [memory.add(loss, step) for step, loss in enumerate(LOSSES, 1)]
    assert kept == [True, True, True, True, False, False, True, False, False, False, True, False]
    assert memory.best == [(1.0, 11), (2.0, 7)] and memory.since == 1
    other = Evaluations(1)
    other.restored(json.loads(json.dumps(memory.progress())))
    assert other.best == [(1.0, 11)] and other.since == memory.since
    assert Evaluations(1).progress() == {}


@pytest.mark.parametrize("setting", ["checkpoint.keep_best=1", "validate.patience=1"])
def test_what_needs_evaluation_says_so(make_run: MakeRun, setting: str) -> None:
    result = make_run().train(setting)
    name = setting.partition("=")[0]
    assert result.error.startswith(f"{name}: found 1, but nothing is evaluated; set validate.every")
