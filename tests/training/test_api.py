"""The functions of ``import hexad``: callbacks, generation and evaluation from Python."""

import pydoc
import subprocess
import sys
from typing import Any

import pytest

import hexad
from hexad.config import HexadError
from hexad.training.callbacks import checked_callbacks

from .command import RunFile
from .conftest import MakeRun


class Recorded(hexad.Callback):
    """What was called, in order."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop_at = stop_at

    def on_start(self, trainer: Any) -> None:
        self.calls.append(("start", trainer.engine.step, trainer.first))

    def on_step(self, trainer: Any, metrics: Any) -> None:
        self.calls.append(("step", metrics["step"], metrics["loss"]))
        if metrics["step"] == self.stop_at:
            trainer.stop()

    def on_evaluation(self, trainer: Any, scores: Any) -> None:
        self.calls.append(("evaluation", scores["validation"].loss))

    def on_checkpoint(self, trainer: Any, step: int) -> None:
        self.calls.append(("checkpoint", step))

    def on_end(self, trainer: Any, outcome: Any) -> None:
        self.calls.append(("end", outcome.step, outcome.stopped_by))


@pytest.fixture
def run_file(make_run: MakeRun, data: str) -> RunFile:
    groups = {"run": {"steps": 4}, "checkpoint": {"every": 2}, "validate": {"every": 3, "batches": 1}}
    return make_run(**groups, data={"validation": data})


def test_callbacks_are_called_in_order(run_file: RunFile) -> None:
    called = Recorded()
    outcome = hexad.train(run_file.path, callbacks=[called])
    assert (outcome.step, outcome.stopped_by) == (4, None)
    kinds = [call[:2] if call[0] != "evaluation" else call[:1] for call in called.calls]
    assert kinds == [
        ("start", 0), ("step", 1), ("step", 2), ("checkpoint", 2), ("evaluation",), ("step", 3), ("step", 4),
        ("checkpoint", 4), ("end", 4),
    ]  # fmt: skip
    assert [call[2] for call in called.calls if call[0] == "step"] == run_file.losses
    assert ("evaluation", run_file.metrics[2]["validation_loss"]) in called.calls


def test_a_callback_stops_and_the_run_resumes(run_file: RunFile) -> None:
    called = Recorded(stop_at=1)
    outcome = hexad.train(hexad.load_config(run_file.path), callbacks=[called])
    assert (outcome.step, outcome.stopped_by) == (1, "callback")
    assert called.calls[-1] == ("end", outcome.step, "callback")
    assert run_file.checkpoints == [outcome.step]
    again = Recorded()
    assert hexad.train(run_file.path, callbacks=[again]).step == 4
    assert again.calls[0] == ("start", outcome.step, True)


class Switched(hexad.Callback):
    """Has an attribute that is no method."""

    on_gpu = False


def test_attributes_of_callbacks_are_free() -> None:
    (callback,) = checked_callbacks([Switched()])
    assert isinstance(callback, Switched)


class Misspelt(hexad.Callback):
    def on_steps(self, trainer: Any, metrics: Any) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([print], "callbacks: found a builtin_function_or_method, expected instances of hexad.Callback"),
        ([Recorded], "callbacks: found Recorded, expected instances of hexad.Callback"),
        (Recorded(), "callbacks: found a Recorded, expected a list of hexad.Callback"),
        ([Misspelt()], "callbacks: Misspelt has on_steps, which is never called (did you mean 'on_step'?)"),
    ],
)
def test_what_is_no_callback_is_refused(run_file: RunFile, callbacks: Any, message: str) -> None:
    with pytest.raises(HexadError) as caught:
        hexad.train(run_file.path, callbacks=callbacks)
    assert str(caught.value) == message


def test_a_run_that_ends_inside_its_decay_says_so(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(run={"steps": 2}, lr_schedule={"warmup": 1, "decay_steps": 3})
    with caplog.at_level("INFO", "hexad"):
        hexad.train(run.path)
    assert "the decay of the learning rate ends at step 3, after run.steps 2" in caplog.text


def test_adapters_of_random_weights_are_reported(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(run={"steps": 1}, model={"lora": {}})
    with caplog.at_level("WARNING", "hexad"):
        hexad.train(run.path)
    assert "model.lora adapts weights that are drawn at random" in caplog.text


def test_generate_and_evaluate(run_file: RunFile, data: str) -> None:
    hexad.train(run_file.path)
    texts = hexad.generate(
        run_file.directory, ["line", {"prompt": "x"}], tokens=3, samples=2, temperature=1.0
    )
    assert [(text.number, text.prompt, text.sample, len(text.tokens)) for text in texts] == [
        (0, "line", 0, 3), (0, "line", 1, 3), (1, "x", 0, 3), (1, "x", 1, 3),
    ]  # fmt: skip
    assert hexad.generate(run_file.directory, "line", tokens=3)[0].ended == "length"
    scores = hexad.evaluate(run_file.directory, {"a": data, "b": data}, batches=1)
    assert scores["a"] == scores["b"]
    assert hexad.evaluate(run_file.directory, batches=1)["validation"].loss == scores["a"].loss
    for wrong in ({"tokens": 0}, {"samples": 0}):
        with pytest.raises(
            HexadError, match=f"^{next(iter(wrong))}: found 0, expected an integer of at least 1"
        ):
            hexad.generate(run_file.directory, "a", **wrong)
    assert hexad.generate(run_file.directory, "line", tokens=3, stop="never")[0].ended == "length"
    with pytest.raises(HexadError, match=r"^generate: unknown argument 'token' \(did you mean 'tokens'\?\)"):
        hexad.generate(run_file.directory, "a", token=3)  # type: ignore[call-arg]
    with pytest.raises(HexadError, match=r"^top_k: found 5 with temperature 0"):
        hexad.generate(run_file.directory, "a", top_k=5)
    with pytest.raises(HexadError, match=r"^data: found \['a'\], expected a prefix, or data sets by name"):
        hexad.evaluate(run_file.directory, ["a"])  # type: ignore[arg-type]
    with pytest.raises(HexadError, match=r"^overrides: found the text 'a=3', expected a list"):
        hexad.generate(run_file.directory, "a", overrides="a=3")
    with pytest.raises(HexadError, match="neither a checkpoint nor a run"):
        hexad.generate("nowhere", "a")


def test_the_package_is_imported_without_torch() -> None:
    code = "import hexad, sys; hexad.load_config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_has_what_is_public_and_nothing_of_pydantic() -> None:
    text = pydoc.plain(pydoc.render_doc(hexad))
    assert "pydantic" not in text and "BaseModel" not in text
    for name in (*hexad.__all__, "Config"):
        assert name.strip("_") in text.lower() + text and getattr(hexad, name) is not None


def test_a_signal_after_a_callbacks_stop_is_the_first_one() -> None:
    import signal
    import time

    from hexad.launching.stop import StopRequest

    asked = StopRequest.__new__(StopRequest)
    asked._received, asked._requested, asked._at, asked._previous = 0, 0, 0.0, {}
    asked.request()
    time.sleep(0.01)
    asked._receive(signal.SIGTERM, None)  # a second signal would be raised here
    assert asked._received == signal.SIGTERM
