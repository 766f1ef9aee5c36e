"""One Lightning script with any strategy, in the ranks of a pool."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def launched() -> Iterator[int]:
    """The environment that torchrun gives a rank of the process group that has been joined; yields the number
    of ranks."""
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
        state = sys.modules.get("hexad.compat.megatron.parallel_state")
        if state is not None and state.is_initialized():  # by MegatronStrategy
            state.destroy_model_parallel()


def strategy_of(name: str, **options: Any) -> Any:
    """``ddp``, or ours: ``zero 3``, ``zero 1, tensor 2``."""
    from lightning.pytorch.strategies import DDPStrategy

    from hexad.compat.lightning import HexadStrategy

    if name == "ddp":
        return DDPStrategy(**options)
    words = {"zero": "zero", "tensor": "tensor_model_parallel_size"}
    numbers = (part.split() for part in name.split(", "))
    return HexadStrategy(**{words[word]: int(number) for word, number in numbers}, **options)


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


def fitted(
    kind: str,
    strategy: str,
    options: dict[str, Any] | None = None,
    precision: Any = "64-true",
    batch: int = 3,
) -> dict[str, Any]:
    """Fit a module and validate it; losses of this rank, rates, metrics, what the module has recorded, and
    the state afterwards.

    Args:
        kind: of the module, and its class if they differ: ``classifier: Manual``.
        strategy: as of :func:`strategy_of`.
        options: of the trainer.
        precision: of the trainer, or a precision plugin.
        batch: samples of a rank's batch.
    """
    from . import hooks
    from .modules import MODULES, loader

    data, _, name = kind.partition(": ")
    with launched():
        torch.manual_seed(5)
        module = getattr(hooks, name)() if name else MODULES[data]()
        dtype = torch.float64 if precision == "64-true" else torch.float32
        record = recorder()
        how = {"precision": precision} if isinstance(precision, str) else {"plugins": [precision]}
        given = {"max_epochs": 2, **how, **(options or {})}
        given["callbacks"] = [record, *given.get("callbacks", [])]
        trainer = trainer_of(strategy_of(strategy), **given)
        trainer.fit(module, loader(data, 30, dtype, True, batch), loader(data, 12, dtype, False, batch))
        state = {key: value.clone() for key, value in module.state_dict().items()}
        tested = trainer.validate(module, loader(data, 12, dtype, False, batch), verbose=False)[0]
        return {
            "losses": record.losses,
            "rates": record.rates,
            "metrics": record.metrics,
            "recorded": getattr(module, "recorded", []),
            "state": state,
            "validated": tested,
            "steps": trainer.global_step,
            "trains": [name for name, p in module.named_parameters() if p.requires_grad],
        }


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """The largest relative difference of losses, rates, metrics, records and states between two results of
    all ranks; of states absolute."""
    largest = dict.fromkeys(("losses", "rates", "metrics", "recorded", "validated", "state"), 0.0)
    for one, other in zip(ours, theirs, strict=True):
        assert one["steps"] == other["steps"] and one["trains"] == other["trains"]
        for key in ("losses", "rates", "recorded"):
            pairs = zip(one[key], other[key], strict=True)
            largest[key] = max([largest[key], *(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)])
        both = [*zip(one["metrics"], other["metrics"], strict=True), (one["validated"], other["validated"])]
        for place, (mine, reference) in enumerate(both):
            assert mine.keys() == reference.keys()
            key = "validated" if place == len(both) - 1 else "metrics"
            gaps = (abs(mine[name] - value) / max(abs(value), 1e-12) for name, value in reference.items())
            largest[key] = max([largest[key], *gaps])
        assert one["state"].keys() == other["state"].keys()
        gaps = ((one["state"][name] - value).abs().max().item() for name, value in other["state"].items())
        largest["state"] = max(largest["state"], *gaps)
    return largest
