"""One Lightning script with any strategy, in the ranks of a pool."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def launched() -> Iterator[int]:
    """The environment that torchrun gives a rank of the process group that has been joined; yields the
    number of ranks."""
    joined = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    variables = {name: str(value) for name, value in numbers.items()}
    variables |= {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    before = dict(os.environ)
    os.environ |= variables if joined else {}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield world
    finally:
        os.environ.clear()
        os.environ |= before


def strategy_of(name: str, **options: Any) -> Any:
    """``ddp``, or our strategy: ``zero 3``."""
    from lightning.pytorch.strategies import DDPStrategy

    from hexad.compat.lightning import HexadStrategy

    return DDPStrategy(**options) if name == "ddp" else HexadStrategy(zero=int(name.split()[-1]), **options)


def trainer_of(strategy: Any, **options: Any) -> Any:
    """A trainer of the ranks of the process group, quiet and without files unless asked for."""
    from lightning.pytorch import Trainer

    world = dist.get_world_size() if dist.is_initialized() else 1
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 1, "log_every_n_steps": 1}
    common = {"accelerator": "cpu", "devices": world, "strategy": strategy}
    return Trainer(**{**quiet, **common, **options})


def recorder() -> Any:
    """A callback that records losses and rates of every step, and metrics of every validation."""
    from lightning.pytorch import Callback

    class Recorder(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.rates: list[float] = []
            self.metrics: list[dict[str, float]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(float(outputs["loss"]))
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    return Recorder()


def fitted(kind: str, strategy: str, options: dict[str, Any], double: bool = True) -> dict[str, Any]:
    """Fit a module; losses of this rank, rates, metrics, and the state afterwards."""
    from .modules import MODULES, loader

    with launched():
        torch.manual_seed(5)
        module = MODULES[kind]()
        dtype = torch.float64 if double else torch.float32
        record = recorder()
        precision = {"precision": "64-true"} if double else {}
        options = {
            "max_epochs": 2,
            **precision,
            **options,
            "callbacks": [record, *options.get("callbacks", [])],
        }
        trainer = trainer_of(strategy_of(strategy), **options)
        trainer.fit(module, loader(kind, 30, dtype, True), loader(kind, 9, dtype, False))
        state = {name: value.clone() for name, value in module.state_dict().items()}
        tested = trainer.validate(module, loader(kind, 9, dtype, False), verbose=False)[0]
        return {
            "losses": record.losses,
            "rates": record.rates,
            "metrics": record.metrics,
            "state": state,
            "validated": tested,
            "step": trainer.global_step,
        }
