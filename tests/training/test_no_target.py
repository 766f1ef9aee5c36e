"""Steps whose samples have no target: nothing changes but the numbers of steps and samples; every layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hexad import Engine, launch, load_config
from hexad.dataset.indexed import IndexedWriter
from hexad.dataset.load.microbatch import IGNORED, Microbatch
from hexad.optim.schedule import learning_rates

from ..pool import Pool
from .command import Result, RunFile, call, write_run

DOCUMENTS = [(17, 0)] * 40 + [(17, 5)] * 12
"""Tokens of each document, and how many of them, the last ones, are trained."""


def write(prefix: Path, documents: list[tuple[int, int]]) -> str:
    with IndexedWriter(prefix, np.uint16) as writer:
        for number, (length, trained) in enumerate(documents):
            ids = (np.arange(length) * 7 + number) % 250
            writer.add_document(ids, None, np.arange(length) >= length - trained)
    return str(prefix)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("data") / "d", DOCUMENTS)


def run_on(directory: Path, prefix: str, **groups: dict[str, Any]) -> RunFile:
    settings = {"packing": "cut", "sequence": 16, **groups.pop("data", {})}
    batch, model = {"micro": 1, "global": 2}, {"layers": 2}
    return write_run(directory, prefix, data=settings, batch=batch, model=model, **groups)


def numbers(run: RunFile) -> list[dict[str, Any]]:
    """Its metrics, which are JSON: no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: str) -> RunFile:
    """Twelve steps on one rank; the first, and others, have no target."""
    run = run_on(tmp_path_factory.mktemp("alone"), data, run={"seed": 4})
    result = run.train()
    assert result.status == 0 and result.err.count("has a target") == 1
    return run


def test_steps_without_a_target_are_counted(alone: RunFile) -> None:
    lines = numbers(alone)
    empty = [line for line in lines if line["loss"] is None]
    assert [line["step"] for line in lines] == list(range(1, 13)) and 2 <= len(empty) <= 10
    for line in empty:
        assert line["skipped"] and line["grad_norm"] == 0.0 and "fault" not in line
    state = alone.state()
    assert (state["step"], state["samples"], state["updates"]) == (12, 24, 12 - len(empty))
    config = load_config(alone.path)
    expected = [learning_rates(config.optimizer, config.lr_schedule, 40, step).lr for step in range(1, 13)]
    assert [line["lr"] for line in lines] == pytest.approx(expected)


LAYOUTS = {
    "zero 3": (2, ("parallel.data=2", "parallel.zero=3")),
    "tensor": (2, ("parallel.tensor=2",)),
    "context": (2, ("parallel.context=2",)),
    "pipeline": (2, ("parallel.pipeline=2",)),
    "all": (8, ("parallel.data=2", "parallel.zero=1", "parallel.tensor=2", "parallel.context=2")),
}
EVERY_TIME = ("zero 3", "pipeline", "all")


@pytest.mark.parametrize(
    "layout",
    [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_in_every_layout(tmp_path: Path, data: str, alone: RunFile, pool: Pool, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    run = run_on(tmp_path / "run", data, run={"seed": 4})
    assert run.world(pool, ranks, *overrides) == [(0, "")] * ranks
    for line, other in zip(numbers(run), numbers(alone), strict=True):
        assert line["skipped"] == other["skipped"]
        if line["loss"] is not None:
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-9)
            assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)


def test_a_resumed_run_continues_as_one_that_was_not_stopped(
    tmp_path: Path, data: str, alone: RunFile
) -> None:
    run = run_on(tmp_path, data, run={"seed": 4}, checkpoint={"every": 1})
    for steps in (1, 5, 12):
        assert run.train(f"run.steps={steps}").status == 0
    losses = [[line["loss"] for line in numbers(one)] for one in (run, alone)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_nothing_but_the_counts_changes(dtype: str) -> None:
    """Weights, moments, loss scale and the record of losses, bit for bit."""
    scale = {"loss_scale_window": 2, "loss_scale_initial": 8.0}
    config = load_config(
        {
            "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn_hidden": 16, "vocab": 32},
            "run": {"device": "cpu"},
            "data": {"sequence": 8},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": dtype, **(scale if dtype == "fp16" else {})},
            "faults": {"spike": 9.0, "spike_window": 2},
        }
    )
    generator = torch.Generator().manual_seed(0)
    with launch(config) as run:
        engine = Engine(run.resolved, run.mesh)

        def step(masked: bool) -> Any:
            tokens = torch.randint(32, (2, 2, 8), generator=generator)
            labels = torch.full_like(tokens, IGNORED) if masked else tokens
            return engine.train_step([Microbatch(*pair) for pair in zip(tokens, labels)])

        def state() -> Any:
            tensors = {chunk.name: chunk.tensor.detach().clone() for chunk in engine.chunks()}
            kept = {n: v for n, v in engine.progress().items() if n not in ("step", "samples")}
            weights = [p.detach().clone() for stage in engine.stages.values() for p in stage.parameters()]
            return tensors, kept, weights

        for _ in range(2):  # before the first update, and after one
            (tensors, kept, weights), counts = state(), (engine.step, engine.samples)
            result = step(masked=True)
            again = state()
            assert result.skipped and result.targets == 0 and result.fault is None
            assert np.isnan(result.loss) and result.grad_norm == 0.0
            assert (engine.step, engine.samples) == (counts[0] + 1, counts[1] + 4) and kept == again[1]
            assert all(torch.equal(tensor, again[0][name]) for name, tensor in tensors.items())
            assert all(map(torch.equal, weights, again[2]))
            result = step(masked=False)
            assert not result.skipped and np.isfinite(result.loss)
        assert engine.updates == 2
        # What losses are divided by may be given: then the caller knows what there is to learn from.
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        masked = [Microbatch(tokens, torch.full_like(tokens, IGNORED))] * 2
        assert engine.train_step(masked, divisor=4).loss == 0.0 and engine.updates == 3


NONE, ONE = [(17, 0)] * 12, [(1, 1)] * 100


@pytest.mark.parametrize(
    ("documents", "settings", "early"),
    [
        (NONE, {}, True),
        (DOCUMENTS, {"split": [76, 24, 0]}, True),
        (ONE, {"documents": "isolate"}, False),
    ],
    ids=["no token is trained", "none of the part", "no sample has a target"],
)
def test_data_without_any_target_are_refused(
    tmp_path: Path, documents: list[tuple[int, int]], settings: dict[str, Any], early: bool
) -> None:
    run = run_on(tmp_path, write(tmp_path / "d", documents), data=settings, run={"steps": 1000})
    checked = call("config", "check", str(run.path))
    trained = run.train()
    if early:
        assert f"data.train: {tmp_path / 'd'}: no token is trained" in checked.error
        assert trained.error == checked.error
    else:
        assert checked.status == 0
        assert "data.train: none of 14 samples, a complete epoch and more, has a target" in trained.error


def test_a_blend_is_trained_if_one_of_its_sets_has_targets(tmp_path: Path, data: str) -> None:
    run = run_on(tmp_path, data)
    blend = f"data.train=[[1, {write(tmp_path / 'none', NONE)}], [1, {data}]]"
    assert run.train(blend).status == 0
    assert {line["skipped"] for line in numbers(run)} == {True, False}


def test_evaluation_without_a_target_has_no_loss(tmp_path: Path, data: str, alone: RunFile) -> None:
    """It is no best one, and does not end a run by its patience."""
    few = write(tmp_path / "few", [(17, 0)] * 60 + [(17, 5)])
    run = run_on(tmp_path / "run", data, validate={"every": 1, "batches": 1, "patience": 2},
                 checkpoint={"keep_best": 1}, data={"validation": few})  # fmt: skip
    result = run.train()
    assert result.status == 0 and "no token that was evaluated has a target: no loss" in result.err
    assert [line["validation_loss"] for line in numbers(run)] == [None] * 12
    assert not (run.directory / "checkpoints" / "best").exists()

    def evaluated(*arguments: str) -> Result:
        return call("evaluate", str(alone.directory), "data.packing=cut", "--json", *arguments)

    assert json.loads(evaluated("--data", few).out)["results"]["few"]["tokens"] == 5
    first = evaluated("--data", few, "--batches", "1")
    assert "few: no token in its first 1 batch (--batches) has a target" in first.error
    none = evaluated("--data", write(tmp_path / "none", NONE))
    assert f"--data: {tmp_path / 'none'}: no token is trained" in none.error
