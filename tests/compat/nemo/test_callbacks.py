"""NeMo's callbacks in a fit: the rate of arithmetic, and the stop after a signal."""

from pathlib import Path
from typing import Any

import pytest

from hexad.checkpoint.manifest import read_manifest

from ...pool import Pool
from ...small import config_of

pytest.importorskip("lightning")


def _fit(directory: str, steps: int, signalled: int | None) -> dict[str, Any]:
    """A fit on counting numbers, in which the first rank receives a signal in step ``signalled``."""
    import os
    import signal

    from lightning.pytorch import Callback

    from hexad.compat import nemo as nl
    from hexad.compat.nemo import callbacks, llm

    from ..lightning.program import launched
    from .recipes import objects

    seen: dict[str, Any] = {"tflops": []}

    class Seen(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if signalled == trainer.global_step + 1 and trainer.global_rank == 0:
                os.kill(os.getpid(), signal.SIGUSR2)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen["tflops"].append(trainer.callback_metrics["TFLOPS"].item())

    before = signal.getsignal(signal.SIGUSR2)
    with launched() as world:
        data = llm.MockDataModule(24, nl.tokenizers.NullTokenizer(99), 2, 8)
        measured = callbacks.FLOPsMeasurementCallback(None, None, "llama3")
        stop = callbacks.PreemptionCallback(sig=signal.SIGUSR2)
        unused = [callbacks.NsysCallback(1, 2), callbacks.MemoryProfileCallback(f"{directory}/memory")]
        known = [measured, stop, *unused, Seen()]
        # an interval above the steps of the run
        parts = objects(directory, data, {}, world, max_steps=steps, val_check_interval=7, callbacks=known)
        llm.pretrain(**parts)
        engine = parts["model"].engine
        seen |= {"step": engine.step, "samples": engine.samples}
    seen["restored"] = signal.getsignal(signal.SIGUSR2) == before
    seen["memory"] = Path(directory, "memory").exists()
    return seen


def test_signal_stops_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """Both ranks stop after the step in which one of them receives it, and the last step is saved."""
    results = pool.run(2, _fit, str(tmp_path), 5, 2)
    assert [result["step"] for result in results] == [2, 2]
    assert all(result["restored"] and not result["memory"] for result in results)
    assert all(rate > 0 for result in results for rate in result["tflops"])
    kept = list((tmp_path / "run" / "checkpoints").iterdir())
    assert [read_manifest(path).progress["step"] for path in kept] == [2]


def test_rate_of_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs of the samples since the last one that was logged, over the seconds."""
    from types import SimpleNamespace

    from hexad.compat.nemo import callbacks
    from hexad.compat.nemo.models import GPTModel
    from hexad.planning.costs import flops_per_token

    logged: dict[str, float] = {}

    class Module(GPTModel):
        def __init__(self) -> None:  # neither trainer nor engine
            pass

        config = config_of()
        engine = SimpleNamespace(samples=16)  # type: ignore[assignment]

        def log(self, name: str, value: Any, **_: Any) -> None:
            logged[name] = value

    clock = iter([10.0, 12.0])
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(clock))
    trainer: Any = SimpleNamespace(global_step=4, log_every_n_steps=2, world_size=4)
    module = Module()
    callback = callbacks.FLOPsMeasurementCallback(None, None, "llama3")
    callback.on_train_start(trainer, module)
    module.engine.samples = 48
    trainer.global_step = 3
    callback.on_train_batch_end(trainer, module)
    assert not logged
    trainer.global_step = 4
    callback.on_train_batch_end(trainer, module)
    sequence = module.config.data.sequence
    expected = flops_per_token(module.config.model, sequence) * sequence * 32 / 2.0 / 1e12
    assert logged["TFLOPS"] == pytest.approx(expected)
    assert logged["TFLOPS_per_GPU"] == pytest.approx(expected / 4)


def _validated(directory: str, steps: int) -> list[int]:
    """Fit with an interval of four steps, and resume; the steps after which the model is evaluated."""
    from lightning.pytorch import Callback

    from hexad.compat import nemo as nl
    from hexad.compat.nemo import llm

    from ..lightning.program import launched
    from .recipes import objects

    evaluated: list[int] = []

    class Seen(Callback):
        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            evaluated.append(trainer.global_step)

    with launched() as world:
        data = llm.MockDataModule(24, nl.tokenizers.NullTokenizer(99), 2, 8)
        parts = objects(directory, data, {}, world, max_steps=steps, val_check_interval=4, callbacks=[Seen()])
        parts["resume"] = nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
        llm.pretrain(**parts)
    return evaluated


@pytest.mark.slow
def test_interval_above_the_steps_left(pool: Pool, tmp_path: Path) -> None:
    """A run may have fewer steps than the interval of its evaluations, and fewer left when it resumes."""
    runs = [pool.run(1, _validated, str(tmp_path), steps)[0] for steps in (2, 6, 7)]
    assert runs == [[2], [4, 6], [7]]  # after the last step in any case
