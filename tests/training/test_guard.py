"""Steps that must not count: NaN and spikes, skipped or rolled back, the same in every layout."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hexad.config.schema import FaultSettings
from hexad.engine.engine import Engine
from hexad.engine.faults import FaultGuard

from ..pool import Pool
from .command import FOUR, RunFile, call, free_port, rank_variables, train_rank
from .conftest import MakeRun

NAN, NONE = range(40, 44), range(0)  # the batch of step 11; no batch
MANY = range(40, 60)  # those of steps 11 to 15


@contextmanager
def spoilt(how: str, samples: range) -> Iterator[None]:
    """Spoil the batches that begin at some samples, as a real fault would: whenever they are read, and on one
    tensor rank only. ``nan``: an element of the gradient; ``spike``: the loss before the verdict."""
    made, veto = Engine.train_step, Engine._veto

    def step(engine: Engine, *arguments: Any) -> Any:
        first, real = engine.mesh.tensor.rank == 0, engine.gradients.finish

        def finish() -> None:
            real()
            if first:
                engine.buckets[0].gradient[0] = math.nan

        if how == "nan" and engine.samples in samples:
            engine.gradients.finish = finish  # type: ignore[method-assign]
        try:
            return made(engine, *arguments)
        finally:
            engine.gradients.finish = real  # type: ignore[method-assign]

    def lower(engine: Engine, loss: Any, limit: float) -> Any:
        hit = engine.samples in samples and engine.mesh.tensor.rank == 0
        return veto(engine, loss, 0.0 if hit else limit)

    Engine.train_step = step  # type: ignore[assignment,method-assign]
    if how == "spike":
        Engine._veto = lower  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.train_step, Engine._veto = made, veto  # type: ignore[method-assign]


def _rank(
    rank: int, world: int, how: str, samples: range, arguments: list[str], port: int
) -> tuple[int, str]:
    with spoilt(how, samples), rank_variables(rank, world, port):
        return train_rank(arguments)


def train(
    run: RunFile, pool: Pool, how: str, *overrides: str, samples: range = NAN, ranks: int = 1
) -> list[tuple[int, str]]:
    """Train on some ranks with spoilt batches; (status, message) of each."""
    if ranks == 1:
        with spoilt(how, samples):
            result = run.train(*overrides)
        return [(result.status, result.err)]
    return pool.apart(ranks, _rank, how, samples, [str(run.path), *overrides], free_port())


SPIKE = ("faults.spike=50", "faults.spike_window=5")
LAYOUTS = [(1, ()), (4, FOUR), (4, ("parallel.pipeline=2", "parallel.schedule=zb_h1", "parallel.zero=2"))]


@pytest.mark.parametrize("how", ["nan", pytest.param("spike", marks=pytest.mark.slow)])
def test_a_step_is_skipped_alike_in_every_layout(make_run: MakeRun, pool: Pool, how: str) -> None:
    traces = []
    for ranks, layout in LAYOUTS:
        run = make_run(run={"steps": 14})
        options = (*SPIKE, "faults.on_spike=skip") if how == "spike" else ("faults.not_finite=skip",)
        outcomes = train(run, pool, how, *layout, *options, ranks=ranks)
        assert [status for status, _ in outcomes] == [0] * ranks, outcomes
        lines = run.metrics
        assert [line["skipped"] for line in lines] == [line["step"] == 11 for line in lines]
        what = "spike" if how == "spike" else "not finite"
        assert what in lines[10]["fault"] and all("fault" not in line for line in lines if line["step"] != 11)
        assert lines[11]["samples"] == 48  # its data is consumed
        traces.append(run.losses)
    for other in traces[1:]:
        np.testing.assert_allclose(other, traces[0], rtol=1e-9)


@pytest.mark.parametrize("how", ["nan", "spike"])
def test_a_skipped_step_changes_no_bit(make_run: MakeRun, pool: Pool, how: str) -> None:
    run = make_run()
    options = ("faults.not_finite=skip", "checkpoint.every=1", "checkpoint.keep=20", "run.steps=11", *SPIKE)
    assert train(run, pool, how, *options)[0][0] == 0
    folder = run.directory / "checkpoints"
    before, after = (
        next((folder / f"step-000000{step}").glob("*.safetensors")).read_bytes() for step in (10, 11)
    )
    assert before == after
    assert run.state()["updates"] == 10 and run.state()["samples"] == 44


@pytest.mark.parametrize(
    ("how", "ranks", "layout"),
    [
        ("nan", *LAYOUTS[0]),
        *(pytest.param("nan", *layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:]),
        *(pytest.param("spike", *layout, marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
)
def test_rolling_back_leaves_the_data_out(
    make_run: MakeRun, pool: Pool, how: str, ranks: int, layout: tuple[str, ...]
) -> None:
    """As if the data between the checkpoint and the fault had never been there; killed or not."""
    rolled, killed = make_run(), make_run()
    options = (*layout, "faults.not_finite=roll_back", "faults.on_spike=roll_back", *SPIKE)
    for run, stops in ((rolled, (16,)), (killed, (9, 10, 13, 16))):
        for stop in stops:
            # run.steps ends with a save, which a kill would not have: a run that dies makes none.
            outcomes = train(run, pool, how, *options, f"run.steps={stop}", ranks=ranks)
            assert [status for status, _ in outcomes] == [0] * ranks, outcomes
            if run is killed and stop in (9, 10):
                folder = run.directory / "checkpoints"
                shutil.rmtree(folder / f"step-{stop:08d}")
    lines = rolled.metrics
    assert [line["step"] for line in lines] == list(range(1, 17))
    faults = [line["step"] for line in lines if "fault" in line]
    assert faults == [9] and "rolled back to step 8, skipping samples 32 to 43" in lines[8]["fault"]
    assert [line["samples"] for line in lines[7:10]] == [32, 48, 52]
    assert killed.losses == rolled.losses
    assert killed.metrics[8]["fault"] == lines[8]["fault"]


def test_rolling_back_needs_a_checkpoint(make_run: MakeRun, pool: Pool) -> None:
    run = make_run(checkpoint={"every": 0})
    status, text = train(run, pool, "nan", "faults.not_finite=roll_back")[0]
    assert status == 2 and "no checkpoint to roll back to yet (checkpoint.every)" in text


@pytest.mark.parametrize("action", [pytest.param("skip", marks=pytest.mark.slow), "roll_back"])
def test_faults_in_a_row_end_the_run(make_run: MakeRun, pool: Pool, action: str) -> None:
    for most, status in ((4, 2), (5, 0)):
        run = make_run(run={"steps": 18})
        options = (f"faults.not_finite={action}", f"faults.most={most}")
        code, text = train(run, pool, "nan", *options, samples=MANY)[0]
        assert code == status, text
        if status:
            assert "faults.most 4 consecutive faults came before it" in text
        else:
            assert len(run.losses) == 18


def test_stopping_is_the_default(make_run: MakeRun, pool: Pool) -> None:
    for how, what in (("nan", "the gradient is not finite"), ("spike", "is a spike, above ")):
        run = make_run()
        status, text = train(run, pool, how, *SPIKE, "faults.on_spike=stop")[0]
        assert status == 2 and "error: step 11: the loss " in text and what in text
        assert run.metrics[-1]["skipped"] and len(run.metrics) == 11


def test_a_real_spike_in_the_data(make_run: MakeRun, tmp_path: Any) -> None:
    """Text a model has learnt, and a batch of noise."""
    lines = "".join("abcdefgh" * 2 for _ in range(400))
    noise = "".join(chr(33 + int(n)) for n in np.random.default_rng(0).integers(0, 90, 64))
    text = tmp_path / "text.txt"
    text.write_text(lines + noise)
    prefix = str(tmp_path / "noisy")
    options = ("--tokenizer", "byte", "--workers", "1")
    assert call("data", "build", "--input", str(text), "--output", prefix, *options).status == 0
    run = make_run(data={"train": prefix}, run={"steps": 102}, faults={"spike": 2.0, "spike_window": 8})
    assert run.train().status == 0
    skipped = [line["step"] for line in run.metrics if line["skipped"]]
    assert 1 <= len(skipped) <= 5 and skipped[0] > 8
    first = skipped[0] - 1
    assert run.losses[first] > 2 * np.median(run.losses[first - 8 : first])


def test_the_guard() -> None:
    guard = FaultGuard(FaultSettings(spike=2.0, spike_window=3, most=2))
    for step, loss in enumerate((5.0, 1.0, 3.0), 1):
        assert guard.limit is None
        guard.record(step, loss, True, None)
    assert guard.limit == 6.0
    guard.record(4, 100.0, False, "spike")
    assert guard.limit == 6.0 and guard.streak == (1, 4) and not guard.exhausted
    guard.record(3, 1.0, True, None)  # made again after rolling back: not beyond the fault
    assert guard.streak == (1, 4) and guard.limit == 2.0
    again = FaultGuard(guard.settings)
    again.restore(guard.state())
    assert again.limit == 2.0 and again.streak == (1, 4)
    guard.record(4, 1.0, False, None)  # a loss scale that was too large is no fault
    assert guard.streak == (1, 4)
    guard.record(4, 1.0, False, "not_finite")
    guard.record(5, 1.0, False, "spike")
    assert guard.exhausted
    guard.record(6, 1.0, True, None)
    assert guard.streak == (0, 0)
    assert FaultGuard(FaultSettings()).limit is None


@pytest.mark.parametrize("override", ["faults.spike_window=3", "faults.on_spike=stop"])
def test_settings_that_would_do_nothing_are_refused(make_run: MakeRun, override: str) -> None:
    result = make_run().train(override)
    assert result.status == 2 and "with faults.spike null" in result.error
