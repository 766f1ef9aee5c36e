"""Callbacks, loggers, launchers and what is refused."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ... import forks
from ...pool import Pool, RankError
from .program import differences, fitted, launched, strategy_of, trainer_of

pytest.importorskip("lightning")


def attempted(name: str, strategy: str, directory: str, options: dict[str, Any], callback: str = "") -> Any:
    """Fit a module of ``hooks``, and save; what it is left with."""
    from lightning.pytorch import callbacks, plugins

    from . import hooks
    from .modules import loader

    extra = {
        "ema": lambda: callbacks.EMAWeightAveraging(),
        "finetuning": lambda: callbacks.BackboneFinetuning(1),
        "pruning": lambda: callbacks.ModelPruning("l1_unstructured"),
    }
    with launched():
        torch.manual_seed(5)
        module = getattr(hooks, name)()
        if callback == "finetuning":
            module.backbone = module.body
        given = {"max_epochs": 3, **options}
        if callback == "async":
            given["plugins"] = [plugins.AsyncCheckpointIO()]
        elif callback:
            given["callbacks"] = [extra[callback]()]
        trainer = trainer_of(strategy_of(strategy), **given)
        data = [loader("classifier", 18, torch.float32, shuffle) for shuffle in (True, False)]
        trainer.fit(module, *data)
        path = f"{directory}/saved.ckpt"
        trainer.save_checkpoint(path)
        trainer.validate(module, data[1], ckpt_path=path, verbose=False)
        return getattr(module, "loaded", None), float(module.head.bias.sum())


REFUSED: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "two optimizers": ("TwoOptimizers", "zero 0", {}, "", "found 2 optimizers, expected one"),
    "LBFGS": ("Lbfgs", "zero 0", {}, "", "found LBFGS, which evaluates the loss several times"),
    "unknown optimizer": ("Unknown", "zero 1", {}, "", "found RowWise, which may need complete parameters"),
    "two formats": (
        "TwoFormats",
        "zero 0",
        {},
        "",
        "found trained parameters in float32, float64, expected one",
    ),
    "changed weights": ("ChangesSaved", "zero 2", {}, "", "found head.bias changed in checkpoint"),
    "averaged weights": (
        "LeavesOut",
        "zero 0",
        {},
        "ema",
        "found EMAWeightAveraging, which keeps a second model",
    ),
    "finetuning": (
        "LeavesOut",
        "zero 0",
        {},
        "finetuning",
        "found BackboneFinetuning, which adds parameters",
    ),
    "checkpoint plugin": ("LeavesOut", "zero 0", {}, "async", "found the plugin AsyncCheckpointIO"),
    "remote path": ("LeavesOut", "zero 0", {}, "remote", "expected a directory of a file system"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(pool: Pool, tmp_path: Path, case: str) -> None:
    name, strategy, options, callback, message = REFUSED[case]
    directory = str(tmp_path)
    if callback == "remote":
        directory, callback = "s3://bucket/runs", ""
    with pytest.raises(RankError, match=f"HexadError: .*{message}"):
        pool.run(1 if strategy == "zero 0" else 2, attempted, name, strategy, directory, options, callback)


@pytest.mark.parametrize("strategy", ["zero 3", pytest.param("zero 0", marks=pytest.mark.slow)])
def test_hooks_choose_what_is_saved(pool: Pool, tmp_path: Path, strategy: str) -> None:
    (loaded, names), _ = pool.run(2, attempted, "LeavesOut", strategy, str(tmp_path), {})[0][0], None
    assert loaded == [0, 1, 2] and names == ["head.bias", "head.weight"]


def test_without_an_optimizer(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, attempted, "NoOptimizer", "zero 1", str(tmp_path), {})


def test_configure_model(pool: Pool) -> None:
    options = {"max_epochs": 1, "gradient_clip_val": 1.0}
    theirs, ours = (
        pool.run(2, fitted, "language: Configured", strategy, options) for strategy in ("ddp", "zero 3")
    )
    found = differences(ours, theirs)
    assert max(found.values()) < 1e-9, found


def averaged(strategy: str) -> dict[str, Any]:
    """Stochastic weight averaging, with an epoch that updates batch normalisation."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2)
    return fitted("classifier", strategy, {"max_epochs": 4, "callbacks": [averaging]})


@pytest.mark.slow
def test_stochastic_weight_averaging_equals_ddp(pool: Pool) -> None:
    theirs, *others = (pool.run(2, averaged, strategy) for strategy in ("ddp", "zero 1", "zero 3"))
    for ours in others:
        found = differences(ours, theirs)
        assert max(found.values()) < 1e-9, found


def logged(strategy: str, directory: str) -> list[str]:
    """Fit with loggers and Lightning's common callbacks."""
    from lightning.pytorch import callbacks
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from .modules import Classifier, loader

    with launched():
        torch.manual_seed(5)
        loggers = [CSVLogger(directory, name="csv"), TensorBoardLogger(directory, name="tensorboard")]
        used = [
            callbacks.LearningRateMonitor("step"),
            callbacks.RichModelSummary(),
            callbacks.TQDMProgressBar(),
        ]
        used += [callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0), callbacks.Timer()]
        used += [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]
        options = {
            "logger": loggers,
            "callbacks": used,
            "enable_progress_bar": True,
            "enable_model_summary": True,
        }
        trainer = trainer_of(strategy_of(strategy), max_epochs=9, enable_checkpointing=True, **options)
        module = Classifier()
        trainer.fit(module, *(loader("classifier", 18, torch.float32, False) for _ in range(2)))
        if trainer.is_global_zero:
            assert trainer.callback_metrics["val_loss"] > 0
        return [f"{trainer.current_epoch} epochs, {trainer.global_step} steps"]


def test_callbacks_and_loggers(pool: Pool, tmp_path: Path) -> None:
    """Early stopping ends all ranks after two epochs; rates, losses and metrics are logged as by
    DDPStrategy."""
    rows = []
    for strategy in ("ddp", "zero 2"):
        directory = tmp_path / strategy
        assert pool.run(2, logged, strategy, str(directory)) == [["2 epochs, 5 steps"]] * 2
        assert list(directory.glob("tensorboard/version_0/events*"))
        (file,) = directory.glob("csv/version_0/metrics.csv")
        rows.append([*csv.DictReader(file.read_text().splitlines())])
        saved = list(directory.glob("csv/version_0/checkpoints/*.ckpt"))
        assert [path.is_dir() for path in saved] == [strategy != "ddp"]
    assert "lr-SGD" in rows[0][0]
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert (value == "") == (other[name] == "")
            assert not value or float(other[name]) == pytest.approx(float(value), rel=1e-4)


def test_bf16_weights_have_fp32_masters(pool: Pool) -> None:
    """Losses of bf16-true are nearer those of float32 than those of DDPStrategy, which has no masters."""
    options = {"max_epochs": 2}
    exact = pool.run(2, fitted, "language", "ddp", options, "32-true")
    ours = pool.run(2, fitted, "language", "zero 1", options, "bf16-true")
    assert differences(ours, exact)["losses"] < 0.05
    assert {value.dtype for value in ours[0]["state"].values()} == {torch.bfloat16}


def test_names_in_lightnings_registry() -> None:
    from lightning.pytorch import Trainer

    from hexad.compat.lightning import HexadStrategy

    for name, zero in (("hexad", 0), ("hexad_zero3", 3)):
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=name, logger=False, enable_checkpointing=False
        )
        assert isinstance(trainer.strategy, HexadStrategy) and trainer.strategy.parallel.zero == zero


@pytest.mark.parametrize(("tensor", "replicas"), [(1, 4), (2, 2)])
def test_samples_are_divided_before_ranks_meet(tensor: int, replicas: int) -> None:
    """Lightning counts the steps of a fit before it starts one, ``trainer.estimated_stepping_batches``."""
    from lightning.pytorch import Trainer

    from hexad.compat.lightning import HexadStrategy

    strategy = HexadStrategy(tensor_model_parallel_size=tensor)
    Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False, enable_checkpointing=False)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": replicas, "rank": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "HexadStrategy: zero: found 4, expected"),
        ({"tensor_model_parallel_size": 0}, "HexadStrategy: tensor_model_parallel_size: found 0, expected"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    from hexad.compat.lightning import HexadStrategy
    from hexad.config import HexadError

    with pytest.raises(HexadError, match=message):
        HexadStrategy(**options)


def test_without_lightning(tmp_path: Path) -> None:
    """One line where the package is missing."""
    (tmp_path / "lightning.py").write_text("raise ImportError('none')")
    done = subprocess.run(
        [sys.executable, "-c", "import hexad.compat.lightning"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "lightning is not installed: pip install 'hexad[lightning]'" in done.stderr.splitlines()[-1]


SCRIPT = """
import sys, torch
from lightning.pytorch import Trainer
from hexad.compat.lightning import HexadStrategy
from tests.compat.lightning.modules import Classifier, loader

if __name__ == "__main__":
    torch.manual_seed(5)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=HexadStrategy(zero=3), max_epochs=1,
    logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    module = Classifier()
    trainer.fit(module, loader("classifier", 12, torch.float32, False))
    trainer.save_checkpoint("model.ckpt")
    trainer.test(module, loader("classifier", 12, torch.float32, False), verbose=False)
    if trainer.is_global_zero:
        print("ranks", trainer.world_size, "loss", float(trainer.callback_metrics["test_loss"]))
"""


FORKING = """
import sys, torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from hexad.compat.lightning import HexadStrategy
from tests.compat.lightning.modules import Classifier, loader

def trained(strategy, options, module=None):
    torch.manual_seed(5)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    module = module or Classifier()
    trainer.fit(module, data, **options)
    return trainer, module

if __name__ == "__main__":
    method, data = sys.argv[1], loader("classifier", 12, torch.float32, False)
    _, expected = trained(DDPStrategy(start_method=method), {})
    trainer, module = trained(HexadStrategy(start_method=method, zero=3), {})
    torch.testing.assert_close(module.state_dict(), expected.state_dict())
    assert trainer.test(module, data, verbose=False)[0].keys() == {"test_loss"}
    trainer.save_checkpoint("model.ckpt")  # of weights: the optimizer's state was the processes'
    strategy = HexadStrategy(start_method=method, zero=1)
    _, module = trained(strategy, {"ckpt_path": "model.ckpt", "weights_only": False}, Classifier(lr=0.0))
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, trainer.model.get_parameter(name)), name
    try:
        trained(HexadStrategy(start_method=method, tensor_model_parallel_size=2), {})
    except Exception as error:
        print(str(error).splitlines()[-1])
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_of_a_notebook(tmp_path: Path, method: str) -> None:
    """Ranks that are forked or spawned: weights return to the script, as with DDPStrategy."""
    (tmp_path / "script.py").write_text(FORKING)
    # A new interpreter finds the tests' modules by this path, a fork has it.
    variables = {"PYTHONPATH": str(Path(__file__).parents[3])} if method == "spawn" else {}
    environment, command = {**os.environ, **variables}, [sys.executable, "script.py", method]
    done = forks.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    message = f"found start_method='{method}' with a Classifier, of which every process has its own part"
    assert message in done.stdout


def test_a_file_is_replaced(pool: Pool, tmp_path: Path) -> None:
    """One of another strategy, whose directory is used on."""
    (tmp_path / "saved.ckpt").write_text("of DDPStrategy")
    assert pool.run(2, attempted, "Classifier", "zero 1", str(tmp_path), {})
    assert (tmp_path / "saved.ckpt" / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_script_starts_its_ranks(tmp_path: Path, launcher: str) -> None:
    """By Lightning's own launcher or by torchrun."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    if launcher == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=forks.PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ranks 2 loss" in done.stdout
    assert (tmp_path / "model.ckpt" / "manifest.json").is_file()
