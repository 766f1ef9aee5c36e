"""Configured models under Lightning's trainer, in any layout: the numbers of ``hexad train``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hexad.dataset.indexed import IndexedWriter

from ...pool import Pool, RankError
from ...training.command import RunFile, call, write_run
from .program import launched, trainer_of

pytest.importorskip("lightning")

STEPS = 6
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data, zero 1": (2, {"zero": 1}, {"data": 2}),
    "tensor": (2, {"tensor_model_parallel_size": 2}, {}),
    "context": (2, {"context_parallel_size": 2, "zero": 3}, {"context_method": "ring"}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2, "schedule": "zb_h1"}, {}),
    "data and tensor": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero": 2},
        {"data": 2},
    ),
    "virtual stages": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "schedule": "interleaved",
            "zero": 3,
        },
        {},
    ),
    "pipeline and context": (
        4,
        {"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "zero": 1},
        {"tensor": 1},
    ),
}
"""Ranks, arguments of the strategy, and settings of the configuration."""
EVERY_TIME = ("pipeline",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Byte tokens, ``train`` and ``validation``."""
    directory = tmp_path_factory.mktemp("data")
    for name in ("train", "validation"):
        text = directory / f"{name}.txt"
        text.write_text("\n".join(f"{name} line {n}: {n * n} is the square of {n}" for n in range(60)))
        options = ("--tokenizer", "byte", "--workers", "1", "--output", str(directory / name))
        assert call("data", "build", "--input", str(text), *options).status == 0
    return str(directory / "train")


def written(directory: Path, data: str, parallel: dict[str, Any], **groups: dict[str, Any]) -> RunFile:
    """A run of four layers that is evaluated after steps 3 and 6."""
    groups = {
        "run": {"steps": STEPS, "dir": str(directory / "run")},
        "model": {"layers": 4, "kv_heads": 2},
        "data": {"validation": data.replace("train", "validation")},
        "batch": {"global": 8},
        "optimizer": {"lr": 0.01, "clip": 0.5},
        "validate": {"every": 3, "batches": 2},
        "parallel": parallel,
        **groups,
    }
    return write_run(directory, data, **groups)


def modules() -> dict[str, Any]:
    """A HexadModule, and some that override its hooks."""
    from hexad.compat.lightning import HexadModule

    class OwnOptimizer(HexadModule):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    class OwnLoss(HexadModule):
        def loss(self, outputs: Any, microbatch: Any) -> Any:
            return -outputs.log_probabilities().sum()

    class OwnHead(HexadModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
            self.head = torch.nn.Linear(16, 1, dtype=torch.float64)

        def loss(self, outputs: Any, microbatch: Any) -> Any:
            values = self.head(outputs.hidden()).squeeze(1) * self.scale
            return -outputs.log_probabilities().sum() + values.square().sum()

    kinds = (HexadModule, OwnOptimizer, OwnLoss, OwnHead)
    return {kind.__name__: kind for kind in kinds}


def fitted(
    path: str,
    given: dict[str, Any],
    kind: str = "HexadModule",
    options: dict[str, Any] | None = None,
    load: str | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Fit; losses, gradient norms, rates and evaluations, and the validation of the saved checkpoint."""
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    from hexad.compat.lightning import HexadStrategy

    class Recorder(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.rates: list[float] = []
            self.evaluations: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(float(outputs["loss"]))
            self.norms.append(float(trainer.callback_metrics["grad_norm"]))
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self.evaluations.append(float(trainer.callback_metrics["val_loss"]))

    with launched():
        torch.manual_seed(3)
        module, record = modules()[kind](path), Recorder()
        logged = {"logger": CSVLogger(str(Path(path).parent / "logs"))}
        callbacks = [record, LearningRateMonitor()]
        common = {"val_check_interval": 3, "callbacks": callbacks, **logged, **(options or {})}
        trainer = trainer_of(HexadStrategy(**given), **common)
        trainer.fit(module, ckpt_path=load)
        result = {
            "losses": record.losses,
            "norms": record.norms,
            "rates": record.rates,
            "evaluations": record.evaluations,
            "steps": trainer.global_step,
        }
        if save is not None:
            trainer.save_checkpoint(save)
            again = trainer_of(HexadStrategy(**given))
            result["validated"] = again.validate(modules()[kind](path), ckpt_path=save, verbose=False)[0]
        return result


def of_command(run: RunFile) -> dict[str, Any]:
    """What ``hexad train`` has recorded; what Lightning's metrics hold is float32."""
    lines = run.metrics
    single = lambda x: float(torch.tensor(x, dtype=torch.float32))  # noqa: E731
    return {
        "losses": [line["loss"] for line in lines],
        "norms": [single(line["grad_norm"]) for line in lines],
        "rates": [line["lr"] for line in lines],
        "evaluations": [single(line["validation_loss"]) for line in lines if "validation_loss" in line],
        "steps": STEPS,
    }


def overrides(given: dict[str, Any]) -> list[str]:
    """Arguments of a strategy as settings."""
    from hexad.compat.lightning.module import WORDS

    names = {word: name for name, word in WORDS.items()}
    return [f"parallel.{names[word]}={value}" for word, value in given.items()]


@pytest.mark.parametrize(
    "case", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_equal_to_the_command(pool: Pool, tmp_path: Path, data: str, case: str) -> None:
    """Losses, gradient norms, rates and evaluations, bit for bit."""
    ranks, given, parallel = LAYOUTS[case]
    ours, theirs = (written(tmp_path / name, data, parallel) for name in ("ours", "theirs"))
    assert theirs.world(pool, ranks, *overrides(given)) == [(0, "")] * ranks
    expected = of_command(theirs)
    assert len(expected["evaluations"]) == 2
    for found in pool.run(ranks, fitted, str(ours.path), given):
        assert found == expected


def test_resumed_in_another_layout(pool: Pool, tmp_path: Path, data: str) -> None:
    """Within the epoch, and evaluated in a third layout; the command resumes from it too."""
    run = written(tmp_path, data, {})
    path, saved = str(run.path), str(tmp_path / "saved.ckpt")
    whole = pool.run(1, fitted, path, {})[0]
    first = {"tensor_model_parallel_size": 2}
    (begun, _) = pool.run(2, fitted, path, first, "HexadModule", {"max_steps": 3}, None, saved)
    assert begun["losses"] == pytest.approx(whole["losses"][:3], rel=1e-9)
    assert begun["validated"]["val_loss"] == pytest.approx(whole["evaluations"][0], rel=1e-6)
    second = {"pipeline_model_parallel_size": 2, "zero": 1}
    (ended, _) = pool.run(2, fitted, path, second, "HexadModule", {}, saved)
    assert ended["losses"] == pytest.approx(whole["losses"][3:], rel=1e-9)
    assert ended["rates"] == whole["rates"][3:] and ended["steps"] == STEPS
    assert run.train(f"checkpoint.load={saved}").status == 0
    assert [line["loss"] for line in run.metrics] == pytest.approx(whole["losses"][3:], rel=1e-9)
    assert call("generate", saved, "--prompt", "line 7", "--tokens", "4").status == 0


def test_steps_without_a_target_and_other_data(pool: Pool, tmp_path: Path, data: str) -> None:
    """As with the command: such steps change nothing, and rebuilt data are refused when a fit resumes."""

    def write(factor: int) -> None:
        with IndexedWriter(tmp_path / "masked", np.uint16) as writer:
            for number in range(60):
                trained = np.full(17, number >= 50)
                writer.add_document((np.arange(17) * factor + number) % 250, None, trained)

    groups: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "data": {"packing": "cut", "sequence": 16, "validation": data},
        "batch": {"micro": 1, "global": 2},
        "validate": {"every": 3, "batches": 1},
    }
    masked = str(tmp_path / "masked")
    ours, theirs = (write_run(tmp_path / name, masked, **groups) for name in ("ours", "theirs"))
    write(3)
    saved = str(tmp_path / "saved.ckpt")
    found = pool.run(1, fitted, str(ours.path), {}, "HexadModule", {"max_steps": 5}, None, saved)[0]
    assert theirs.train().status == 0
    expected = [line["loss"] for line in theirs.metrics][:5]
    assert None in expected and len({*expected}) > 2
    assert [None if np.isnan(loss) else loss for loss in found["losses"]] == expected
    write(4)
    with pytest.raises(RankError, match="masked, which was rebuilt or replaced since"):
        pool.run(1, fitted, str(ours.path), {}, "HexadModule", {}, saved)


@pytest.mark.parametrize(
    "kind", ["OwnHead", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("OwnOptimizer", "OwnLoss"))]
)
def test_overridden(pool: Pool, tmp_path: Path, data: str, kind: str) -> None:
    """A custom optimizer with its schedule, loss, and head, on pipeline ranks as on one."""
    run = written(tmp_path, data, {})
    alone = pool.run(1, fitted, str(run.path), {}, kind)[0]
    given = {"pipeline_model_parallel_size": 2, "zero": 1}
    (found, other) = pool.run(2, fitted, str(run.path), given, kind, {}, None, str(tmp_path / "saved.ckpt"))
    assert found == other
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert found["rates"] == alone["rates"]
    plain = pool.run(1, fitted, str(run.path), {})[0]["losses"]
    assert (alone["losses"] == pytest.approx(plain, rel=1e-9)) == (kind == "OwnLoss")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two degrees": (
        {"tensor_model_parallel_size": 2},
        {},
        "parallel.tensor: found 1, but HexadStrategy has tensor_model_parallel_size=2; name it in one place",
    ),
    "expert": ({"expert_model_parallel_size": 2}, {}, "found expert_model_parallel_size=2"),
    "negative": ({"pipeline_model_parallel_size": 0}, {}, "pipeline_model_parallel_size: "),
    "precision": ({}, {"precision": "bf16-mixed"}, "found precision='bf16-mixed' with a HexadModule"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(pool: Pool, tmp_path: Path, data: str, case: str) -> None:
    given, options, message = REFUSED[case]
    run = written(tmp_path, data, {"tensor": 1})
    with pytest.raises(RankError, match=f"(Hexad|Config)Error: .*{message}"):
        pool.run(2, fitted, str(run.path), given, "HexadModule", options)
