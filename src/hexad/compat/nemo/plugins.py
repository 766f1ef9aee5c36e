"""NeMo 2's plugins of NeMo-Run, which change a recipe and the executor that runs it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

import nemo_run as run
import torch
import yaml
from nemo_run.core.serialization.yaml import YamlSerializer
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from hexad.config import HexadError

from .callbacks import MemoryProfileCallback, NsysCallback, PreemptionCallback
from .utils import logging


def _add(task: Any, callbacks: list[Any]) -> None:
    """Add callbacks to a recipe's trainer, except those that it has."""
    trainer = getattr(task, "trainer", None)
    if trainer is None:
        return
    known = list(getattr(trainer, "callbacks", None) or [])
    trainer.callbacks = known + [deepcopy(one) for one in callbacks if one not in known]


def _is_script(plugin: Any, task: Any) -> bool:
    """Whether a task is a script, on which a plugin has no effect; that is logged."""
    if isinstance(task, run.Script):
        logging.warning("%s: no effect on a run.Script", type(plugin).__name__)
        return True
    return False


@dataclass(kw_only=True)
class PreemptionPlugin(run.Plugin):
    """Stops a recipe after the step in which it receives a signal; SLURM sends it before the time is over.

    Attributes:
        preempt_time: seconds before the end of the time.
        sig: the signal.
        callbacks: in place of :class:`PreemptionCallback`.
    """

    preempt_time: int = 60
    sig: signal.Signals = signal.SIGTERM
    callbacks: list[Any] | None = None

    def setup(self, task: Any, executor: Any) -> None:
        """Change recipe and executor."""
        if _is_script(self, task):
            return
        if isinstance(executor, run.SlurmExecutor):
            executor.signal = f"{self.sig.value}@{self.preempt_time}"
        _add(task, self.callbacks or [run.Config(PreemptionCallback, sig=int(self.sig))])


@dataclass(kw_only=True)
class NsysPlugin(run.Plugin):
    """Profiles steps of a recipe by Nsight Systems; on a host without GPU the recipe runs as it is.

    Attributes:
        start_step, end_step: the steps.
        ranks: that are profiled, by default the first.
        nsys_trace: what is traced, by default ``nvtx`` and ``cuda``.
        gen_shape: record shapes of operators.
    """

    start_step: int
    end_step: int
    ranks: list[int] | None = None
    nsys_trace: list[str] | None = None
    gen_shape: bool = False

    def setup(self, task: Any, executor: Any) -> None:
        """Change recipe and executor.

        Raises:
            HexadError: a host with GPUs, and without Nsight Systems.
        """
        if isinstance(task, run.Partial):
            callback = run.Config(
                NsysCallback,
                start_step=self.start_step,
                end_step=self.end_step,
                ranks=self.ranks or [0],
                gen_shape=self.gen_shape,
            )
            _add(task, [callback])
        if isinstance(executor, run.LocalExecutor) and shutil.which("nsys") is None:
            if torch.cuda.is_available():
                raise HexadError(
                    "NsysPlugin: found no command nsys; install Nsight Systems, or remove the plugin"
                )
            logging.warning("NsysPlugin: no effect: found no GPU and no command nsys")
            return
        launcher = executor.get_launcher()
        launcher.nsys_profile = True
        launcher.nsys_trace = self.nsys_trace or ["nvtx", "cuda"]
        if isinstance(executor, run.SlurmExecutor):
            # %q{} is replaced by nsys, in each rank.
            launcher.nsys_filename = "profile_%p_%q{SLURM_JOB_ID}_node%q{SLURM_NODEID}_rank%q{SLURM_PROCID}"


@dataclass(kw_only=True)
class MemoryProfilePlugin(run.Plugin):
    """Writes snapshots of GPUs' allocations.

    Attributes:
        dir: where.
        ranks: that write one, by default the first.
    """

    dir: str
    ranks: list[int] | None = None

    def setup(self, task: Any, executor: Any) -> None:
        """Change the recipe."""
        if isinstance(task, run.Partial):
            _add(task, [run.Config(MemoryProfileCallback, dir=self.dir, ranks=self.ranks or [0])])


@dataclass(kw_only=True)
class WandbPlugin(run.Plugin):
    """Logs a recipe with Weights & Biases, where ``WANDB_API_KEY`` is set.

    Attributes:
        name: of the run.
        logger_fn: makes the configuration of a ``WandbLogger``, given ``name``.
        log_task_config: log the recipe too.
    """

    name: str
    logger_fn: Callable[..., Any]
    log_task_config: bool = True

    def setup(self, task: Any, executor: Any) -> None:
        """Change recipe and executor."""
        if _is_script(self, task):
            return
        if "WANDB_API_KEY" not in environ:
            logging.warning("WandbPlugin: no effect: WANDB_API_KEY is not set")
            return
        executor.env_vars["WANDB_API_KEY"] = environ["WANDB_API_KEY"]
        if not hasattr(task, "log"):
            return
        task.log.wandb = self.logger_fn(name=self.name)
        if self.log_task_config:
            settings = yaml.safe_load(YamlSerializer().serialize(task))
            task.log.wandb.config = {**settings, "experiment": self._experiment(executor)}

    def _experiment(self, executor: Any) -> dict[str, Any]:
        remote = None
        if isinstance(executor, run.SlurmExecutor):
            remote = str(Path(executor.tunnel.job_dir) / Path(executor.job_dir).name)
        return {
            "id": self.experiment_id,
            "task_name": self.name,
            "executor": executor.info(),
            "remote_directory": remote,
            "local_directory": executor.job_dir,
        }


@dataclass(kw_only=True)
class ConfigValidationPlugin(run.Plugin):
    """Checks a recipe before it is run.

    Attributes:
        validate_preemption: it has a :class:`PreemptionCallback`.
        validate_checkpoint_dir: under SLURM, it logs into a mounted directory.
        validate_serialization: it can be written and read.
        validate_wandb: it logs with Weights & Biases.
        validate_nodes_and_devices: under SLURM, it has the executor's nodes and devices.
    """

    validate_preemption: bool = True
    validate_checkpoint_dir: bool = True
    validate_serialization: bool = True
    validate_wandb: bool = False
    validate_nodes_and_devices: bool = True

    def setup(self, task: Any, executor: Any) -> None:
        """Check the recipe.

        Raises:
            HexadError: naming what it lacks.
        """
        for name, (checked, passed) in self._checks(task, executor).items():
            if checked and not passed():
                raise HexadError(f"ConfigValidationPlugin: found a recipe without {name}")

    def _checks(self, task: Any, executor: Any) -> dict[str, tuple[bool, Callable[[], bool]]]:
        """What a recipe must have -> whether that is checked, and the check."""
        slurm, trainer = isinstance(executor, run.SlurmExecutor), task.trainer

        def has_preemption() -> bool:
            return any(one.__fn_or_cls__ is PreemptionCallback for one in trainer.callbacks or ())

        def has_mount() -> bool:
            mounts = [*(mount.split(":")[-1] for mount in executor.container_mounts), "/nemo_run"]
            directory = task.log.log_dir
            return bool(directory) and any(Path(mount) in Path(directory).parents for mount in mounts)

        def is_serializable() -> bool:
            serializer = ZlibJSONSerializer()
            return bool(serializer.deserialize(serializer.serialize(task)) == task)

        def has_wandb() -> bool:
            return "WANDB_API_KEY" in executor.env_vars and bool(task.log.wandb)

        def fits() -> bool:
            return (trainer.num_nodes, trainer.devices) == (executor.nodes, executor.nproc_per_node())

        return {
            "PreemptionCallback; add PreemptionPlugin()": (self.validate_preemption, has_preemption),
            "log.log_dir below a mounted directory": (self.validate_checkpoint_dir and slurm, has_mount),
            "objects that can be serialized only": (self.validate_serialization, is_serializable),
            "WANDB_API_KEY and log.wandb; add WandbPlugin": (self.validate_wandb, has_wandb),
            "the executor's nodes and devices": (self.validate_nodes_and_devices and slurm, fits),
        }


@dataclass(kw_only=True)
class PerfEnvPlugin(run.Plugin):
    """Accepted without effect: Hexad sets the variables of NCCL and CUDA that it needs.

    Attributes:
        enable_layernorm_sm_margin, layernorm_sm_margin, enable_vboost, nccl_pp_comm_chunksize,
            gpu_sm100_or_newer, user_buffer_registration: without effect.
    """

    enable_layernorm_sm_margin: bool = True
    layernorm_sm_margin: int = 16
    enable_vboost: bool = False
    nccl_pp_comm_chunksize: int | None = None
    gpu_sm100_or_newer: bool = False
    user_buffer_registration: bool = False

    def setup(self, task: Any, executor: Any) -> None:
        """Accepted without effect."""


@dataclass(kw_only=True)
class TritonCacheSetup(run.Plugin):
    """Accepted without effect: ranks share Triton's cache safely since its release 3.2."""

    def setup(self, task: Any, executor: Any) -> None:
        """Accepted without effect."""
