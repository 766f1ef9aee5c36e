"""LightningModules whose ``configure_model`` divides their layers over tensor ranks: the numbers of
DDPStrategy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ...pool import Pool
from .program import fitted, launched, recorder, strategy_of, trainer_of

pytest.importorskip("lightning")

KIND = "language: Divided"


@pytest.mark.parametrize("zero", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))])
def test_equal_to_ddp(pool: Pool, zero: int) -> None:
    """Two data ranks of two tensor ranks each, which get the same samples."""
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    theirs = pool.run(2, fitted, KIND, "ddp", options)
    ours = pool.run(4, fitted, KIND, f"zero {zero}, tensor 2", options)
    for rank, found in enumerate(ours):
        expected = theirs[rank // 2]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["rates"] == expected["rates"]
        for mine, reference in zip(found["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(reference, rel=1e-6)
        assert found["validated"] == pytest.approx(expected["validated"], rel=1e-6)
        for name, values in expected["state"].items():
            assert found["state"].keys() == expected["state"].keys()
            torch.testing.assert_close(found["state"][name], values, rtol=1e-7, atol=1e-9)


def resumed(strategy: str, path: str, load: str | None, evaluate: bool = False) -> dict[str, Any]:
    """Fit and save, or evaluate; losses and metrics."""
    from . import hooks
    from .modules import loader

    with launched() as world:
        torch.manual_seed(5)
        module, record = hooks.Divided(), recorder()
        trainer = trainer_of(strategy_of(strategy), max_epochs=1 if load is None else 2, callbacks=[record])
        batch = 6 // trainer.strategy.mesh.data.size if world > 1 else 6
        data = [loader("language", 12, torch.float32, False, batch) for _ in range(2)]
        if evaluate:
            metrics = trainer.validate(module, data[1], ckpt_path=load, verbose=False)[0]
        else:
            trainer.fit(module, *data, ckpt_path=load)
            metrics = record.metrics[-1]
        trainer.save_checkpoint(path)
        return {"losses": record.losses, "loss": metrics["val_loss"]}


def test_checkpoints(pool: Pool, tmp_path: Path) -> None:
    """Saved by tensor ranks, resumed and evaluated by one process, and the other way round."""
    paths = [str(tmp_path / name) for name in ("a", "b", "c", "d", "e")]
    begun = pool.run(2, resumed, "zero 1, tensor 2", paths[0], None)[0]
    alone = pool.run(1, resumed, "zero 0", paths[1], None)[0]
    assert begun == {key: pytest.approx(value, rel=1e-5) for key, value in alone.items()}
    ended = pool.run(1, resumed, "zero 0", paths[2], paths[0])[0]
    divided = pool.run(2, resumed, "zero 0, tensor 2", paths[3], paths[1])[0]
    assert divided == {key: pytest.approx(value, rel=1e-5) for key, value in ended.items()}
    seen = pool.run(2, resumed, "zero 0, tensor 2", paths[4], paths[2], True)[0]
    assert seen["loss"] == pytest.approx(ended["loss"], rel=1e-5)
    again = pool.run(1, resumed, "zero 0", paths[3], paths[4], True)[0]
    assert again["loss"] == pytest.approx(ended["loss"], rel=1e-5)
