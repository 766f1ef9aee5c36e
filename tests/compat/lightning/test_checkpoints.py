"""Checkpoints: of any layout, with loops, callbacks, schedules and hyperparameters; files of other
strategies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hexad.checkpoint.manifest import MANIFEST_FILE
from hexad.config import HexadError

from ...pool import Pool, RankError
from .program import launched, recorder, strategy_of, trainer_of

pytest.importorskip("lightning")

TOTAL = 24
"""Samples of a step, over all ranks."""


def trained(
    strategy: str,
    directory: str,
    epochs: int,
    resume: Any = None,
    kind: str = "fine-tune",
    weights_only: bool = False,
    every: int | None = None,
    precision: str = "64-true",
) -> dict[str, Any]:
    """Fit up to so many epochs of four steps, saving after every epoch or ``every`` steps; the mean losses of
    all ranks' samples in each step, of epochs, and the paths that were saved."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from .modules import MODULES, loader

    with launched() as world:
        torch.manual_seed(5 if resume is None else 6)
        module = MODULES[kind]()
        record, dtype = recorder(), torch.float64 if precision == "64-true" else torch.float32
        each = {"every_n_train_steps": every} if every else {"every_n_epochs": 1}
        keeping = ModelCheckpoint(
            directory,
            "{epoch}-{step}",
            monitor=None,
            save_top_k=-1,
            save_last=True,
            save_weights_only=weights_only,
            **each,
        )
        stopping = EarlyStopping("val_loss", patience=50)
        options = {"callbacks": [record, keeping, stopping], "enable_checkpointing": True}
        options["num_sanity_val_steps"] = 0
        trainer = trainer_of(strategy_of(strategy), max_epochs=epochs, precision=precision, **options)
        fitting, held_out = (loader(kind, n * TOTAL, dtype, False, TOTAL // world) for n in (4, 1))
        trainer.fit(module, fitting, held_out, ckpt_path=resume)
        losses = torch.tensor(record.losses, dtype=torch.float64)
        if world > 1:
            torch.distributed.all_reduce(losses)
        return {
            "losses": (losses / world).tolist(),
            "rates": record.rates,
            "metrics": [one["val_loss"] for one in record.metrics],
            "best": float(stopping.best_score),
            "last": keeping.last_model_path,
            "epoch": trainer.current_epoch,
            "steps": trainer.global_step,
        }


@pytest.fixture(scope="module")
def uninterrupted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Four epochs by two ranks with ZeRO 3, saved after each."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, pool.run(2, trained, "zero 3", str(directory), 4)[0]


LAYOUTS = [(1, "zero 0"), (4, "zero 2")]
MORE = [(4, "zero 0"), (2, "zero 3"), (3, "zero 1")]


@pytest.mark.parametrize(
    ("ranks", "strategy"), [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in MORE)]
)
def test_resumes_in_any_layout(
    pool: Pool, uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path, ranks: int, strategy: str
) -> None:
    """Losses, rates and the callback's state continue as if nothing had happened."""
    directory, whole = uninterrupted
    path = directory / "epoch=1-step=8.ckpt"
    assert (path / MANIFEST_FILE).is_file()
    rest = pool.run(ranks, trained, strategy, str(tmp_path), 4, str(path))[0]
    torch.testing.assert_close(rest["losses"], whole["losses"][8:], rtol=1e-9, atol=0)
    torch.testing.assert_close(rest["metrics"], whole["metrics"][2:], rtol=1e-9, atol=0)
    assert rest["rates"] == whole["rates"][8:]
    assert rest["best"] == pytest.approx(whole["best"], rel=1e-9)
    assert (rest["epoch"], rest["steps"]) == (4, 16)


def test_last_and_none(pool: Pool, uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """``ckpt_path="last"`` finds the newest directory; there is nothing to do after the last epoch."""
    directory, whole = uninterrupted
    done = pool.run(2, trained, "zero 1", str(directory), 4, "last")[0]
    assert done["losses"] == [] and done["steps"] == 16
    assert Path(whole["last"]).name == "last.ckpt"


def evaluated(strategy: str, path: str, kind: str = "fine-tune") -> list[Any]:
    """Validate, test or predict with the weights of a checkpoint."""
    from .modules import MODULES, loader

    with launched():
        torch.manual_seed(8)
        module = MODULES[kind]()
        trainer = trainer_of(strategy_of(strategy), precision="64-true")
        data = loader(kind, TOTAL, torch.float64, False, 6)
        results = trainer.validate(module, data, ckpt_path=path, verbose=False)
        if kind == "classifier":
            results += trainer.test(module, data, ckpt_path=path, verbose=False)
            results += trainer.predict(module, data, ckpt_path=path)
        return results


def test_evaluation_loads_weights(pool: Pool, uninterrupted: tuple[Path, dict[str, Any]]) -> None:
    directory, whole = uninterrupted
    for ranks in (1, 2):
        found = pool.run(ranks, evaluated, "zero 3", str(directory / "epoch=2-step=12.ckpt"))[0]
        assert found[0]["val_loss"] == pytest.approx(whole["metrics"][2], rel=1e-9)


def test_other_strategies_load_the_export(
    pool: Pool, uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """A file with everything: DDPStrategy resumes from it, ``load_from_checkpoint`` makes the module."""
    from hexad.compat.lightning import checkpoint_file, export_checkpoint

    from .modules import FineTune, dataset

    directory, whole = uninterrupted
    path = directory / "epoch=1-step=8.ckpt"
    export_checkpoint(path, tmp_path / "model.ckpt")
    rest = pool.run(2, trained, "ddp", str(tmp_path / "ddp"), 4, str(tmp_path / "model.ckpt"))[0]
    # DDPStrategy loads weights before Lightning converts the module to float64.
    torch.testing.assert_close(rest["losses"], whole["losses"][8:], rtol=1e-6, atol=0)
    assert rest["rates"] == whole["rates"][8:]
    tokens, labels = torch.utils.data.default_collate(list(dataset("fine-tune", TOTAL, torch.float64)))
    values = []
    for source in (tmp_path / "model.ckpt", checkpoint_file(path)):
        module = FineTune.load_from_checkpoint(source, lr=0.5).eval()
        assert module.hparams == {"lr": 0.5}
        values.append(module.model(input_ids=tokens, labels=labels).loss.item())
    assert values == pytest.approx([whole["metrics"][1]] * 2, rel=1e-5)


FILES = [("fine-tune", "zero 3"), ("classifier", "zero 0")]
MORE_FILES = [
    ("fine-tune", "zero 0"),
    ("classifier", "zero 3"),
    ("language", "zero 0"),
    ("language", "zero 3"),
]


@pytest.mark.parametrize(
    ("kind", "strategy"), [*FILES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_FILES)]
)
def test_files_of_ddp_are_resumed(pool: Pool, tmp_path: Path, kind: str, strategy: str) -> None:
    """A plain ``.ckpt`` file with weights and optimizer state, as DDPStrategy itself resumes it: there
    Lightning loads weights before it converts the module to float64, and leaves out a step of
    ReduceLROnPlateau."""
    pool.run(2, trained, "ddp", str(tmp_path / "ddp"), 1, None, kind)
    path = tmp_path / "ddp" / "epoch=0-step=4.ckpt"
    assert path.is_file()
    theirs = pool.run(2, trained, "ddp", str(tmp_path / "more"), 3, str(path), kind)[0]
    ours = pool.run(2, trained, strategy, str(tmp_path / "ours"), 3, str(path), kind)[0]
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-9, atol=0)
    assert len(ours["losses"]) == 8 and ours["rates"] == theirs["rates"]


def test_damage_is_detected(pool: Pool, uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "damaged.ckpt"
    shutil.copytree(uninterrupted[0] / "epoch=0-step=4.ckpt", path)
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RankError, match="damaged"):
        pool.run(2, trained, "zero 1", str(tmp_path / "more"), 4, str(path))
    file.unlink()
    with pytest.raises(RankError, match="is missing"):
        pool.run(2, evaluated, "zero 1", str(path))
    (path / MANIFEST_FILE).unlink()
    with pytest.raises(RankError, match="no checkpoint"):
        pool.run(2, evaluated, "zero 1", str(path))


def kept(strategy: str, directory: str, manual: bool) -> Mapping[str, Any]:
    """Fit with ``save_top_k``, then load the best, save by hand, and save weights that a script has
    changed."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hexad.compat.lightning import read_checkpoint

    from .modules import Classifier, loader

    with launched():
        torch.manual_seed(5)
        module = Classifier(lr=0.2)
        best_of = {"monitor": "val_loss", "save_top_k": 1, "save_weights_only": not manual}
        keeping = ModelCheckpoint(directory, "{step}", **best_of)
        options = {"callbacks": [keeping], "enable_checkpointing": True, "max_epochs": 5}
        trainer = trainer_of(strategy_of(strategy), **options)
        data = [loader("classifier", 12, torch.float32, False) for _ in range(2)]
        trainer.fit(module, *data)
        found = sorted(path.name for path in Path(directory).iterdir())
        best = trainer.validate(ckpt_path="best", verbose=False, dataloaders=data[1])[0]["val_loss"]
        score = float(keeping.best_model_score)
        trainer.fit(module, *data, ckpt_path=keeping.best_model_path) if manual else None
        with torch.no_grad():
            module.head.bias.fill_(3.0)
        by_hand = Path(directory) / "by hand.ckpt"
        trainer.save_checkpoint(by_hand)
        content = read_checkpoint(by_hand)
        return {
            "found": found,
            "best": (best, score),
            "bias": content["state_dict"]["head.bias"].tolist(),
            "keys": sorted(content),
            "hyper": content["hyper_parameters"],
            "batches": int(content["state_dict"]["body.1.num_batches_tracked"]),
        }


@pytest.mark.parametrize(("strategy", "manual"), [("zero 3", True), ("zero 0", False)])
def test_top_k_best_and_by_hand(pool: Pool, tmp_path: Path, strategy: str, manual: bool) -> None:
    result = pool.run(2, kept, strategy, str(tmp_path), manual)[0]
    assert len(result["found"]) == 1 and result["found"][0].startswith("step=")
    assert result["best"][0] == pytest.approx(result["best"][1], rel=1e-6)
    assert result["bias"] == [3.0] * 4
    assert {"loops", "callbacks", "lr_schedulers", "state_dict"} <= set(result["keys"])
    assert result["hyper"] == {"lr": 0.2, "classes": 4}


def test_errors_name_what_a_directory_is(tmp_path: Path) -> None:
    from hexad.compat.lightning import export_checkpoint, read_checkpoint

    with pytest.raises(HexadError, match="no checkpoint"):
        read_checkpoint(tmp_path)
    (tmp_path / ".metadata").touch()
    with pytest.raises(HexadError, match="consolidate_checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "file")
