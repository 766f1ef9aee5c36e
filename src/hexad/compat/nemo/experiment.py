"""NeMo 2's experiments: the trainer, where it logs and saves, and what it resumes from."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint as LightningCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from hexad.comm import from_first
from hexad.config import HexadError
from hexad.launching.environment import environment

from ..facade import world
from .models import GPTModel
from .recipe import configure, weights_of

log = logging.getLogger("hexad")


class Trainer(pl.Trainer):
    """Lightning's trainer, which gives a language model the settings of its recipe. A trainer of GPUs trains
    on the CPU of a host without one, which is logged."""

    @wraps(pl.Trainer.__init__)  # type: ignore[misc]
    def __init__(self, *arguments: Any, **named: Any) -> None:
        if named.get("accelerator") in ("gpu", "cuda") and not torch.cuda.is_available():
            log.warning("Trainer: found no GPU for accelerator=%r: the CPU trains", named["accelerator"])
            named["accelerator"] = "cpu"
        super().__init__(*arguments, **named)

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train like Lightning's ``Trainer.fit``; ``train_dataloaders`` may be the data module too."""
        if configure(self, model, _data_module(train_dataloaders, datamodule)):
            train_dataloaders = val_dataloaders = datamodule = None
            if isinstance(self.val_check_interval, int):
                # Steps of the run, which may be fewer than the interval, or than it after a resume.
                self.check_val_every_n_epoch = None
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Validate like Lightning's ``Trainer.validate``; ``dataloaders`` may be the data module too."""
        dataloaders, datamodule = self._evaluated(model, dataloaders, datamodule)
        return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Test, with the arguments of :meth:`validate`."""
        dataloaders, datamodule = self._evaluated(model, dataloaders, datamodule)
        return super().test(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def _evaluated(self, model: Any, dataloaders: Any, datamodule: Any) -> tuple[Any, Any]:
        """The loaders and the data module of an evaluation; none for a language model, which has its own."""
        if model is not None and configure(self, model, _data_module(dataloaders, datamodule)):
            return None, None
        if isinstance(dataloaders, pl.LightningDataModule):
            return None, dataloaders
        return dataloaders, datamodule


def _data_module(*given: Any) -> Any:
    return next((one for one in given if isinstance(one, pl.LightningDataModule)), None)


class ModelCheckpoint(LightningCheckpoint):
    """Lightning's, with NeMo 2's defaults: the best three by ``val_loss``, and the last.

    Args:
        given: those of ``lightning.pytorch.callbacks.ModelCheckpoint``.
        save_optim_on_train_end, always_save_context, save_context_on_train_end, async_save,
            try_restore_best_ckpt: accepted without effect: checkpoints are complete.
    """

    def __init__(
        self,
        monitor: str | None = "val_loss",
        verbose: bool = True,
        save_last: Any = True,
        save_top_k: int = 3,
        save_weights_only: bool = False,
        mode: str = "min",
        *,
        save_on_train_epoch_end: bool | None = False,
        save_optim_on_train_end: bool | None = False,
        always_save_context: bool = True,
        save_context_on_train_end: bool = True,
        async_save: bool = False,
        try_restore_best_ckpt: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(
            monitor=monitor,
            verbose=verbose,
            save_last=save_last,
            save_top_k=save_top_k,
            save_weights_only=save_weights_only,
            mode=mode,
            save_on_train_epoch_end=save_on_train_epoch_end,
            **given,
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last step, if ``save_last`` says so and it has not been saved."""
        super().on_train_end(trainer, pl_module)
        if self.save_last and trainer.global_step and self._last_global_step_saved != trainer.global_step:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


@dataclass
class NeMoLogger:
    """Where an experiment is logged and saved: ``log_dir/name/version``.

    Attributes:
        name, log_dir, version: of its directory; ``log_dir`` is ``nemo_experiments`` by default, a version
            the time of the start, and none for a run that resumes.
        explicit_log_dir: in place of these.
        use_datetime_version: False for no version by the time.
        ckpt: saves checkpoints, into ``checkpoints`` of the directory.
        tensorboard, wandb, extra_loggers: the trainer's loggers.
        update_logger_directory: let ``tensorboard`` write into the directory.
        log_local_rank_0_only, log_global_rank_0_only, files_to_copy: accepted without effect.
    """

    name: str = "default"
    log_dir: str | None = None
    explicit_log_dir: str | None = None
    version: str | None = None
    use_datetime_version: bool = True
    log_local_rank_0_only: bool = False
    log_global_rank_0_only: bool = False
    files_to_copy: list[str] | None = None
    update_logger_directory: bool = True
    ckpt: LightningCheckpoint | None = None
    tensorboard: TensorBoardLogger | None = None
    wandb: WandbLogger | None = None
    extra_loggers: list[Logger] = field(default_factory=list)

    def setup(self, trainer: pl.Trainer, resume_if_exists: bool = False) -> SimpleNamespace:
        """Give a trainer its loggers and directory; returns ``log_dir`` and ``exp_dir``."""
        base = Path(self.explicit_log_dir or self.log_dir or "nemo_experiments")
        version = self.version
        if version is None and self.use_datetime_version and not resume_if_exists:
            version = os.environ.get("NEMO_EXPM_VERSION") or time.strftime("%Y-%m-%d_%H-%M-%S")
            version = _of_first_rank(version, trainer)
            os.environ["NEMO_EXPM_VERSION"] = version  # of processes that this one starts
        directory = base if self.explicit_log_dir else base / self.name / (version or "")
        trainer._default_root_dir = str(directory)  # type: ignore[attr-defined]
        self._set_loggers(trainer, base, version or "")
        self._set_checkpoint(trainer, directory)
        return SimpleNamespace(log_dir=directory, exp_dir=base, name=self.name, version=version)

    def _set_loggers(self, trainer: pl.Trainer, base: Path, version: str) -> None:
        tensorboard = self.tensorboard
        if tensorboard is not None and self.update_logger_directory:
            # Lightning's logger has no setters; its prefix and other options stay.
            vars(tensorboard).update(
                _root_dir=str(base / "tb_logs"), _name=self.name, _version=version, _experiment=None
            )
        loggers = [one for one in (tensorboard, self.wandb, *self.extra_loggers) if one is not None]
        if loggers:
            trainer.loggers = loggers

    def _set_checkpoint(self, trainer: pl.Trainer, directory: Path) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self.ckpt is not None:
            callbacks[:] = [one for one in callbacks if not isinstance(one, LightningCheckpoint)] + [
                self.ckpt
            ]
        for callback in callbacks:
            if isinstance(callback, LightningCheckpoint):
                callback.dirpath = str(callback.dirpath or directory / "checkpoints")
                monitored = f"{{{callback.monitor}:.4f}}-" if callback.monitor else ""
                template = callback.filename or f"{{model_name}}--{monitored}{{step}}-{{consumed_samples}}"
                callback.filename = template.replace("{model_name}", self.name)


def _of_first_rank(text: str, trainer: pl.Trainer) -> str:
    """The first rank's text on all ranks that a launcher has started."""
    if not environment().joined:
        return text
    device = trainer.strategy.root_device
    world.join(None, "gloo" if device.type == "cpu" else None)
    return from_first(lambda: text, world.mesh_of(device).world)


@dataclass
class RestoreConfig:
    """Where weights come from that a run begins with.

    Attributes:
        path: a checkpoint, or a model's directory in Hugging Face's format; ``hf://ORG/NAME`` for one of the
            hub, ``nemo://NAME`` for one that ``llm.import_ckpt`` has written.
        load_optim_state: False: a checkpoint with optimizer state is resumed (``resume_from_path``).
        load_model_state: True.
        load_artifacts: accepted without effect: weights are loaded.
        adapter_path: None.

    Raises:
        HexadError: another value.
    """

    path: str
    load_model_state: bool = True
    load_optim_state: bool = False
    load_artifacts: bool = True
    adapter_path: str | None = None

    def __post_init__(self) -> None:
        if not self.load_model_state:
            raise HexadError(
                "RestoreConfig: found load_model_state=False; leave restore_config out to begin without "
                "weights"
            )
        if self.load_optim_state or self.adapter_path is not None:
            name = "load_optim_state" if self.load_optim_state else "adapter_path"
            raise HexadError(
                f"RestoreConfig: found {name}={getattr(self, name)!r}; to resume with all of a checkpoint "
                "pass AutoResume(resume_from_path=...)"
            )


@dataclass(kw_only=True)
class AutoResume:
    """What a run begins with: its own last checkpoint, another one, or weights.

    Attributes:
        restore_config: weights to begin with, where there is no checkpoint to resume.
        resume_from_path: a checkpoint.
        resume_from_directory: in place of the experiment's ``checkpoints``.
        resume_if_exists: resume the last checkpoint of the experiment.
        resume_past_end: accepted without effect: a run that is complete ends at once.
        resume_ignore_no_checkpoint: begin anew where there is none; otherwise that is an error.
        adapter_path: None.

    Raises:
        HexadError: an adapter's path.
    """

    restore_config: RestoreConfig | None = None
    resume_from_directory: str | None = None
    resume_from_path: str | None = None
    resume_if_exists: bool = False
    resume_past_end: bool = False
    resume_ignore_no_checkpoint: bool = False
    adapter_path: str | None = None

    def __post_init__(self) -> None:
        if self.adapter_path is not None:
            raise HexadError(
                f"AutoResume: found adapter_path={self.adapter_path!r}; pass resume_from_path, of a "
                "checkpoint with adapters"
            )

    def setup(self, trainer: pl.Trainer, model: Any = None) -> None:
        """Give trainer and model what is to be loaded.

        Raises:
            HexadError: there is none, or weights for a model that cannot load them.
        """
        path = self.resume_from_path or (self._last(trainer) if self.resume_if_exists else None)
        if path is not None:
            trainer.ckpt_path = str(path)
        elif self.restore_config is not None:
            if not isinstance(model, GPTModel):
                raise HexadError(
                    f"restore_config: found with a {type(model).__name__}; load weights in configure_model"
                )
            model.weights = weights_of(self.restore_config.path)
        elif self.resume_if_exists and not self.resume_ignore_no_checkpoint:
            raise HexadError(
                f"AutoResume: found no checkpoint in {self._directory(trainer)}; set "
                "resume_ignore_no_checkpoint=True to begin anew"
            )

    def _directory(self, trainer: pl.Trainer) -> Path:
        return Path(self.resume_from_directory or Path(trainer.default_root_dir) / "checkpoints")

    def _last(self, trainer: pl.Trainer) -> Path | None:
        """The newest complete checkpoint."""
        complete = [path for path in self._directory(trainer).glob("*") if (path / "manifest.json").is_file()]
        return max(complete, key=lambda path: (path / "manifest.json").stat().st_mtime, default=None)
